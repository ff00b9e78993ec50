//! The text of the step commit's statement: each part keeps to the space of its session, and mixtures of commits share a text.

use super::rows::{CloseRow, ClosedRow, IntentRow, OpenedRow, Rare, RecordRow, Rows, StepRow};
use super::statement::compose;
use crate::encryption::Seal;
use serde_json::json;
use wakeful_workflow::blob::Blob;
use wakeful_workflow::derive::NewDelivery;
use wakeful_workflow::record::Usage;

fn blob() -> Blob {
    Blob::of_state(&serde_json::Map::new())
}

/// A commit that writes in every table that commits of its kind write.
fn commit(closes: bool) -> Rows {
    let call = || OpenedRow {
        message_number: 2,
        call_id: "call".to_owned(),
        name: "note".to_owned(),
        args_sha256: String::new(),
        effect: "pure",
        opens: wakeful_workflow::session::CallStatus::Invoked,
        nonce: Some("nonce".to_owned()),
        timeout_s: 1.0,
        ended: None,
    };
    let close = CloseRow {
        error: None,
        pauses: false,
        snapshot: blob(),
        sealed_snapshot: None,
        wake_seq: closes.then_some(1),
    };
    Rows {
        status: closes.then_some("completed"),
        closes: closes.then_some(close),
        records: vec![RecordRow {
            number: 2,
            role: "assistant",
            content: "[]".to_owned(),
            internal: false,
            details: "{}".to_owned(),
        }],
        events: vec![("X".to_owned(), "{}".to_owned())],
        opened: vec![call()],
        closed: vec![ClosedRow { call_id: "before".to_owned(), status: "done", message_number: Some(2) }],
        generation_over: true,
        step: Some(StepRow {
            workspace_sha256: None,
            from_message_number: 1,
            to_message_number: 2,
            finish_reason: "stop",
            usage: Usage::default(),
            tool_calls: 0,
            attempt: 1,
            elapsed_s: 0.0,
        }),
        intent: (!closes).then(|| IntentRow {
            generation_id: "gen".to_owned(),
            step_number: 2,
            attempt: 1,
            model: String::new(),
            request_sha256: String::new(),
            base_sha256: String::new(),
            repairs: 0,
            resumes: None,
            purpose: "reply",
            context_strategy: "full",
        }),
        ..Rows::default()
    }
}

/// Returns the parts of the statement that write, each with the table that it writes.
fn writes(text: &str) -> Vec<(String, &str)> {
    let starts: Vec<(usize, String)> = ["insert into ", "update ", "delete from "]
        .iter()
        .flat_map(|verb| text.match_indices(verb).map(move |(at, _)| (at, at + verb.len())))
        // "do update set" belongs to the insert before it.
        .filter(|(at, name)| !text[..*at].ends_with("do ") && !text[*name..].starts_with("set "))
        .map(|(at, name)| {
            let table = text[name..].split(|c: char| !c.is_ascii_lowercase() && c != '_').next();
            (at, table.unwrap_or_default().to_owned())
        })
        .collect();
    let mut starts = starts;
    starts.sort_unstable();
    let ends: Vec<usize> = starts.iter().skip(1).map(|(at, _)| *at).chain([text.len()]).collect();
    starts.into_iter().zip(ends).map(|((at, table), end)| (table, &text[at..end])).collect()
}

#[test]
fn every_write_of_a_commit_names_the_space_of_its_session() {
    let seal = Seal::default();
    let rare = Rare {
        seal: &seal,
        deliveries: &[NewDelivery {
            channel: "email".to_owned(),
            source_key: "call".to_owned(),
            content: json!({}),
        }],
        drained: &[1],
        blobs: &[blob()],
    };
    let (goes_on, ends) = (commit(false), commit(true));
    let statements = [
        compose(&[&goes_on], Some(&rare)),
        compose(&[&ends], Some(&rare)),
        compose(&[&goes_on, &goes_on], None),
        compose(&[&ends, &ends], None),
        compose(&[&goes_on, &ends], None),
    ];
    let mut tables = std::collections::BTreeSet::new();
    for statement in statements {
        let (text, _) = statement.expect("the values can be encoded");
        for (table, part) in writes(&text) {
            let keeps = if part.starts_with("insert") {
                let columns = part.split_once(')').map_or(part, |(columns, _)| columns);
                columns.contains("space_id")
                    && ["select b.space_id", "r.delivery_id, b.space_id", "to_deliver.space_id"]
                        .iter()
                        .any(|of_the_session| part.contains(of_the_session))
            } else {
                [".space_id = given.of_space", ".space_id = s.space_id", ".space_id = b.space_id"]
                    .iter()
                    .any(|of_the_session| part.contains(of_the_session))
            };
            assert!(keeps, "{table} is written without its space:\n{part}");
            tables.insert(table);
        }
    }
    let all = [
        "blobs",
        "conversation_counters",
        "conversation_records",
        "conversation_sessions",
        "deliveries",
        "generation_chunks",
        "generations",
        "jobs",
        "session_events",
        "session_inbox",
        "session_runs",
        "session_steps",
        "tool_calls",
    ];
    assert_eq!(tables.iter().map(String::as_str).collect::<Vec<_>>(), all);
}

/// Leaves out of a commit what `without` says, a bit for each part.
fn commit_without(without: u32) -> Rows {
    let mut rows = commit(false);
    let lacks = |part: u32| without & (1 << part) != 0;
    // A call that the commit starts has a text of its own.
    rows.opened[0].nonce = None;
    if lacks(0) {
        rows.records.clear();
    }
    if lacks(1) {
        rows.events.clear();
    }
    if lacks(2) {
        rows.opened.clear();
    }
    if lacks(3) {
        rows.closed.clear();
    }
    if lacks(4) {
        rows.generation_over = false;
    }
    if lacks(5) {
        rows.step = None;
    }
    if lacks(6) {
        rows.intent = None;
    }
    if !lacks(7) {
        rows.status = Some("running");
    }
    rows
}

#[test]
fn mixtures_of_commits_share_a_text_and_those_that_end_a_run_another() {
    let text = |commits: &[&Rows]| compose(commits, None).expect("the values can be encoded").0;
    let kinds: Vec<Rows> = (0..1 << 8).map(commit_without).collect();
    let of_two: std::collections::BTreeSet<String> = kinds.iter().map(|one| text(&[one, one])).collect();
    assert_eq!(of_two.len(), 1, "each text is planned once for each connection");
    assert_eq!(text(&[&kinds[0], &kinds[255], &kinds[7]]), *of_two.first().unwrap());
    let of_one: std::collections::BTreeSet<String> = kinds.iter().map(|one| text(&[one])).collect();
    assert!(of_one.len() > 100, "a lone commit's text has only what it writes: {}", of_one.len());
    let mut ends = commit(true);
    ends.opened.clear();
    let ending = text(&[&ends, &ends]);
    assert!(!of_two.contains(&ending));
    assert_eq!(text(&[&kinds[0], &ends]), ending);
    assert_eq!(text(&[&kinds[255], &ends]), ending);
}
