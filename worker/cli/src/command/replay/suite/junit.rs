//! The result of a suite for machines: a JUnit report, and the annotations of a GitHub workflow.

use super::{Line, Tally};
use std::fmt::Write as _;

/// The report: a bundle is a test case. One that diverged is a failure, one that could not be run to its end an error.
pub(super) fn report(lines: &[Line]) -> String {
    let tally = Tally::of(lines);
    let seconds = |ms: i64| ms as f64 / 1000.0;
    let whole = seconds(lines.iter().map(|line| line.time_ms).sum());
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        text,
        "<testsuite name=\"wakeful replay\" tests=\"{}\" failures=\"{}\" errors=\"{}\" time=\"{whole:.3}\">",
        lines.len(),
        tally.diverged,
        tally.failed
    );
    for line in lines {
        let _ = write!(
            text,
            "  <testcase classname=\"wakeful.replay\" name=\"{}\" time=\"{:.3}\"",
            escaped(&line.bundle),
            seconds(line.time_ms)
        );
        let _ = match said(line) {
            Some((word, message)) => writeln!(
                text,
                ">\n    <{word} type=\"{}\" message=\"{}\"/>\n  </testcase>",
                line.verdict,
                escaped(&message)
            ),
            None => writeln!(text, "/>"),
        };
    }
    text.push_str("</testsuite>\n");
    text
}

/// One line for each bundle that is not well, as GitHub reads it in a log.
pub(super) fn annotations(lines: &[Line]) -> String {
    let plain = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let title = |text: &str| plain(text).replace(':', "%3A").replace(',', "%2C");
    lines
        .iter()
        .filter_map(|line| {
            let (word, message) = said(line)?;
            Some(format!("::error title=replay {word}%3A {}::{}\n", title(&line.bundle), plain(&message)))
        })
        .collect()
}

/// The kind of a bundle's trouble, and its text.
fn said(line: &Line) -> Option<(&'static str, String)> {
    match (&line.error, line.diverged) {
        (Some(error), _) => Some(("error", error.clone())),
        (None, true) => {
            let first = line.first_divergence.clone();
            Some((
                "failure",
                first.unwrap_or_else(|| "the requests differ from the recorded ones".to_owned()),
            ))
        }
        (None, false) => None,
    }
}

/// A text as an attribute of XML. Characters that XML forbids are left out.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' | '\r' => out.push(' '),
            c if c < ' ' || ('\u{fffe}'..='\u{ffff}').contains(&c) => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::failed;
    use super::*;

    #[test]
    fn each_bundle_counts_once_and_a_failed_one_does_not_differ() {
        let line = |name: &str, verdict: &'static str, diverged: bool| Line {
            verdict,
            diverged,
            error: None,
            first_divergence: Some("turn 2: <another> tool".to_owned()),
            ..failed(name.to_owned(), String::new())
        };
        // The last one has equal turns, and its requests have other bytes.
        let lines = [
            line("a.jsonl", "equal", false),
            line("b.jsonl", "prose", false),
            line("c.jsonl", "tools", true),
            line("d.jsonl", "equal", true),
            failed("e.jsonl".to_owned(), "no \"key\"\nfor it\u{1}".to_owned()),
        ];
        let tally = Tally::of(&lines);
        assert_eq!(tally, Tally { equal: 1, differ: 1, diverged: 2, failed: 1 });
        assert_eq!(tally.equal + tally.differ + tally.diverged + tally.failed, lines.len());
        let report = report(&lines);
        assert!(report.contains("tests=\"5\" failures=\"2\" errors=\"1\""), "{report}");
        assert!(
            report.contains("<failure type=\"tools\" message=\"turn 2: &lt;another&gt; tool\"/>"),
            "{report}"
        );
        assert!(
            report.contains("<error type=\"failed\" message=\"no &quot;key&quot; for it\"/>"),
            "{report}"
        );
        let told = annotations(&lines);
        assert_eq!(told.lines().count(), 3, "{told}");
        assert!(told.contains("::error title=replay error%3A e.jsonl::no \"key\"%0Afor it"), "{told}");
    }
}
