#[path = "../../../../../tests/support/payloads.rs"]
mod payloads;

use super::*;
use wakeful_workflow::diff::{Side, diff};
use wakeful_workflow::record::{Block, Details, Record, Role};

fn said(text: &str) -> Side {
    let record = |number, role, text: &str| Record {
        message_number: number,
        run_id: "run_1".into(),
        step_number: 1,
        role,
        content: vec![Block::Text { text: text.to_owned() }].into(),
        internal: false,
        details: Details::default(),
    };
    Side {
        session_id: text.into(),
        agent: text.to_owned(),
        model: text.to_owned(),
        status: "completed".to_owned(),
        system: text.to_owned(),
        tools: Vec::new(),
        seeds: Vec::new(),
        records: vec![
            record(2, Role::User, "Hi"),
            record(3, Role::Assistant, text),
            record(4, Role::User, "Bye"),
        ],
        state: [(text.to_owned(), text.into())].into_iter().collect(),
        answers: std::collections::BTreeMap::new(),
    }
}

#[test]
fn hostile_text_does_nothing_in_a_page() {
    let hostile = "</style></title><script>alert(1)</script><img src=x onerror='a()'>\" onload=\"b()\u{202e}\u{1b}[2J&amp;";
    let page = of(&diff(&said(hostile), &said("harmless"))).unwrap();
    // Only the template creates elements; angle brackets in a text stay text.
    for opened in ["<script", "<img", "</title><", "onload=\"", "\u{202e}", "\u{1b}"] {
        assert!(!page.contains(opened), "{opened:?}");
    }
    assert_eq!(page.matches("</style>").count(), 1);
    assert!(page.contains("&#60;script&#62;") || page.contains("&lt;script&gt;"), "shown as it is");
    assert!(page.contains("\\u{202e}"), "{page}");
}

/// The tags of a page, each with the names of its attributes.
fn tags(page: &str) -> std::collections::BTreeSet<String> {
    let (_, body) = page.split_once("</style>").unwrap();
    let tag = |rest: &str| {
        let inside = rest.split('>').next().unwrap_or_default();
        // What stands in quotes is a value.
        let names: String = inside.split('"').step_by(2).collect();
        names.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    body.split('<').skip(1).map(tag).collect()
}

#[test]
fn no_payload_becomes_markup_in_any_field_of_a_page() {
    // What the template itself makes of a harmless text with as many words.
    let mut known = std::collections::BTreeSet::new();
    for harmless in ["x", "plain text plain", "one two three four five", "a/b (c) [d]\nnext line"] {
        known.extend(tags(&of(&diff(&said(harmless), &said("other"))).unwrap()));
        known.extend(tags(&of(&diff(&said("other"), &said(harmless))).unwrap()));
    }
    let mut tried = 0;
    let with_nul = |text: &String| text.replace('<', "<\u{0}");
    let payloads = payloads::payloads();
    for payload in payloads.iter().cloned().chain(payloads.iter().map(with_nul)) {
        for page in [
            of(&diff(&said(&payload), &said("other"))).unwrap(),
            of(&diff(&said("other"), &said(&payload))).unwrap(),
        ] {
            let unknown: Vec<String> = tags(&page).difference(&known).cloned().collect();
            assert!(unknown.is_empty(), "{payload:?} made {unknown:?}");
        }
        tried += 1;
    }
    assert_eq!(tried, 600);
}

#[test]
fn a_page_needs_nothing_beside_it() {
    let page = of(&diff(&said("one"), &said("two"))).unwrap();
    for reference in ["http:", "https:", "//", "src=", "url(", "@import", "<link", "<script"] {
        assert!(!page.contains(reference), "{reference:?}");
    }
    assert!(page.contains("default-src 'none'"));
    assert!(page.contains("prefers-color-scheme: dark"));
    assert!(page.contains("<del>one</del>") && page.contains("<ins>two</ins>"));
}

#[test]
fn a_page_of_many_turns_stays_one_that_a_browser_opens() {
    let long = |word: &str| {
        let mut side = said(word);
        let turn = side.records.split_off(1);
        for number in 0..1_100 {
            let mut next = turn.clone();
            next[0].message_number = 10 + 2 * number;
            next[1].message_number = 11 + 2 * number;
            next[0].content =
                vec![Block::Text { text: format!("{word} {number} {}", "x".repeat(1_000)) }].into();
            side.records.extend(next);
        }
        side
    };
    let report = diff(&long("one"), &long("two"));
    assert!(report.turns.len() > 1_100);
    let page = of(&report).unwrap();
    assert!(page.len() < 5 << 20, "{} bytes", page.len());
    assert!(page.contains("more turns differ"));
}
