//! How values look on a page: times, spans, statuses, sums.
//!
//! What implements [`HtmlSafe`] here writes markup of its own around digits and words of this program. Every text from
//! outside is escaped by the templates.

use askama::filters::HtmlSafe;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use std::fmt;

/// A text in which the characters that turn the text around them, and those that are no text, are made
/// visible.
pub(crate) fn visible(text: &str) -> String {
    let shown = text.chars().map(|one| match is_command(one) {
        true => one.escape_unicode().to_string(),
        false => one.to_string(),
    });
    shown.collect()
}

pub(crate) fn has_command(text: &str) -> bool {
    text.chars().any(is_command)
}

fn is_command(one: char) -> bool {
    let turns = matches!(one, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}');
    turns || (one.is_control() && !matches!(one, '\n' | '\r' | '\t'))
}

/// A time. Its text is the distance from now; the exact time is its title.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(transparent)]
pub(crate) struct Moment(pub DateTime<Utc>);

impl HtmlSafe for Moment {}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = self.0.format("%Y-%m-%dT%H:%M:%SZ");
        let full = self.0.format("%Y-%m-%d %H:%M:%S UTC");
        let distance = (Utc::now() - self.0).num_milliseconds();
        let text = match distance {
            0..1000 => "now".to_owned(),
            1000.. => format!("{} ago", about(distance)),
            _ => format!("in {}", about(-distance)),
        };
        write!(f, "<time datetime=\"{exact}\" title=\"{full}\">{text}</time>")
    }
}

impl Moment {
    /// The time of the day.
    pub fn clock(&self) -> String {
        self.0.format("%H:%M:%S").to_string()
    }

    pub fn day(&self) -> String {
        self.0.format("%Y-%m-%d %H:%M").to_string()
    }
}

/// A span in words that are short.
pub(crate) fn span(ms: i64) -> String {
    let s = ms / 1000;
    match ms.max(0) {
        0..1000 => format!("{} ms", ms.max(0)),
        1000..60_000 => format!("{:.1} s", ms as f64 / 1000.0),
        60_000..3_600_000 => format!("{} min {} s", s / 60, s % 60),
        3_600_000..86_400_000 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86_400, s / 3600 % 24),
    }
}

/// A span in its largest unit.
fn about(ms: i64) -> String {
    let s = ms / 1000;
    match s {
        ..60 => format!("{s} s"),
        60..3600 => format!("{} min", s / 60),
        3600..86_400 => format!("{} h", s / 3600),
        _ => format!("{} d", s / 86_400),
    }
}

/// Seconds as a span.
pub(crate) fn seconds(s: f64) -> String {
    span((s * 1000.0) as i64)
}

/// A sum of money, from millionths of a dollar.
pub(crate) fn dollars(micros: i64) -> String {
    match micros {
        0 => "$0".to_owned(),
        1..50 => "<$0.0001".to_owned(),
        50..10_000 => format!("${:.4}", micros as f64 / 1e6),
        _ => format!("${:.2}", micros as f64 / 1e6),
    }
}

/// A large number with thin gaps.
pub(crate) fn count(number: i64) -> String {
    let digits = number.abs().to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{2009}');
        }
        text.push(digit);
    }
    if number < 0 { format!("−{text}") } else { text }
}

/// The end of an id, which tells ids apart: their beginning is the time.
pub(crate) fn short(id: &str) -> String {
    let length = id.chars().count();
    if length <= 14 {
        return id.to_owned();
    }
    let end: String = id.chars().skip(length - 8).collect();
    let kind = id.split_once('_').map_or("", |(kind, _)| kind);
    if kind.is_empty() { format!("…{end}") } else { format!("{kind}_…{end}") }
}

/// The beginning of a text, on one line.
pub(crate) fn cut(text: &str, chars: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= chars {
        return line;
    }
    let begin: String = line.chars().take(chars).collect();
    format!("{}…", begin.trim_end())
}

/// A status: its shape, its word and its colour say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Badge {
    pub word: &'static str,
    pub class: &'static str,
    shape: &'static str,
}

impl HtmlSafe for Badge {}

impl fmt::Display for Badge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Badge { word, class, shape } = self;
        write!(
            f,
            "<span class=\"badge {class}\"><svg viewBox=\"0 0 16 16\" aria-hidden=\"true\">{shape}</svg>{word}</span>"
        )
    }
}

const DOT: &str = "<circle cx=\"8\" cy=\"8\" r=\"5\"/>";
const RING: &str = "<circle cx=\"8\" cy=\"8\" r=\"5\" class=\"line\"/>";
const TICK: &str = "<path class=\"line\" d=\"M3 8.5l3.2 3.2L13 5\"/>";
const CROSS: &str = "<path class=\"line\" d=\"M4 4l8 8M12 4l-8 8\"/>";
const TRIANGLE: &str = "<path d=\"M8 2l7 12H1z\"/>";
const ASKS: &str = "<path class=\"line\" d=\"M5.5 6a2.5 2.5 0 1 1 3.6 2.2C8.3 8.7 8 9.2 8 10M8 12.6v.6\"/>";
const BOX: &str = "<rect x=\"3\" y=\"3\" width=\"10\" height=\"10\" class=\"line\"/>";
const BLOCK: &str = "<rect x=\"3\" y=\"3\" width=\"10\" height=\"10\"/>";
const HALF: &str = "<circle cx=\"8\" cy=\"8\" r=\"5\" class=\"line\"/><path d=\"M8 3a5 5 0 0 1 0 10z\"/>";

/// The badge of a status of a session, a run, a call, a delivery, or a thing of the installation.
pub(crate) fn badge(status: &str) -> Badge {
    let (word, class, shape) = match status {
        "created" => ("created", "quiet", RING),
        "queued" => ("queued", "waits", RING),
        "running" => ("running", "runs", HALF),
        "waiting_input" => ("waiting for input", "asks", ASKS),
        "needs_attention" => ("needs attention", "alarm", TRIANGLE),
        "completed" => ("completed", "good", TICK),
        "failed" => ("failed", "bad", CROSS),
        "archived" => ("archived", "quiet", BOX),
        "terminated" => ("terminated", "quiet", BLOCK),
        "cancelled" => ("cancelled", "quiet", CROSS),
        "sent" => ("sent", "good", TICK),
        "sending" => ("sending", "runs", HALF),
        "uncertain" => ("uncertain", "alarm", TRIANGLE),
        "expired" => ("expired", "bad", CROSS),
        "done" => ("done", "good", TICK),
        "refused" => ("refused", "bad", CROSS),
        "invoked" => ("asked for", "waits", RING),
        "started" => ("started", "runs", HALF),
        "waiting" => ("waiting", "asks", ASKS),
        "unapproved" => ("waits for approval", "asks", ASKS),
        "alive" => ("alive", "good", DOT),
        "draining" => ("draining", "waits", HALF),
        "silent" => ("silent", "bad", TRIANGLE),
        "gone" => ("gone", "quiet", CROSS),
        "active" => ("active", "good", DOT),
        "paused" => ("paused", "waits", BOX),
        "shut" => ("shut", "bad", BLOCK),
        "opening" => ("opening", "waits", HALF),
        "dropped" => ("dropped", "bad", CROSS),
        "joined" => ("joined", "good", TICK),
        "in_force" => ("in force", "good", DOT),
        "revoked" => ("revoked", "quiet", CROSS),
        "skipped" => ("skipped", "waits", RING),
        "settled" => ("settled", "good", TICK),
        "resolved" => ("resolved", "good", TICK),
        "muted" => ("muted", "quiet", BOX),
        "proving" => ("proving", "runs", HALF),
        "pending" => ("pending", "waits", RING),
        "acted" => ("acted on", "good", TICK),
        "passed" => ("passed", "good", TICK),
        "failed_again" => ("failed again", "bad", CROSS),
        "resuming" => ("ending", "runs", HALF),
        _ => ("other", "quiet", RING),
    };
    Badge { word, class, shape }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_sums_and_numbers_are_short() {
        let spans = [0, 999, 1500, 61_000, 3_661_000, 90_000_000].map(span);
        assert_eq!(spans, ["0 ms", "999 ms", "1.5 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]);
        let sums = [0, 1, 50, 9_999, 1_234_567].map(dollars);
        assert_eq!(sums, ["$0", "<$0.0001", "$0.0001", "$0.0100", "$1.23"]);
        assert_eq!([7, 1234, -1_234_567].map(count), ["7", "1\u{2009}234", "−1\u{2009}234\u{2009}567"]);
    }

    #[test]
    fn ids_and_texts_are_cut_where_they_say_least() {
        assert_eq!(short("sess_01a20769cf0075568aefc8328e0b79bc"), "sess_…8e0b79bc");
        assert_eq!(short("sample-note"), "sample-note");
        assert_eq!(cut("a\n\n long   text", 6), "a long…");
        assert_eq!(cut("äöü", 3), "äöü");
    }
}
