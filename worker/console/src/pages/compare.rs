//! Two sessions side by side: where they part, and in what.

use crate::api::part;
use crate::frame::{Frame, Nav, page};
use crate::refusal::Refusal;
use crate::text::{count, dollars};
use crate::visit::Visit;
use askama::Template;
use axum::extract::Query;
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;

/// The turns and differences that are shown at most, and the longest text of one.
const TURNS: usize = 300;
const TEXT: usize = 4000;

#[derive(Template)]
#[template(path = "compare.html")]
struct Compare {
    frame: Frame,
    asked: Asked,
    found: Option<Found>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    left: String,
    right: String,
}

struct Found {
    is_equal: bool,
    verdict: &'static str,
    first: String,
    sides: [Side; 2],
    turns: Vec<Turn>,
    unshown: usize,
}

struct Side {
    name: &'static str,
    id: String,
    about: Vec<(&'static str, String)>,
}

struct Turn {
    number: i64,
    level: String,
    word: &'static str,
    sentences: Vec<String>,
    left: Vec<(String, String)>,
    right: Vec<(String, String)>,
}

pub(crate) async fn show(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let frame = Frame::of(&visit, Nav::Sessions, "Compare").await?;
    let (left, right) = (asked.left.trim(), asked.right.trim());
    let found = if left.is_empty() || right.is_empty() {
        None
    } else {
        let report: Value =
            visit.api.get(&format!("/v1/sessions/{}/diff/{}", part(left), part(right))).await?;
        Some(read(&report))
    };
    Ok(page(&Compare { frame, asked, found }))
}

fn read(report: &Value) -> Found {
    let turns = report["turns"].as_array().map_or(&[][..], Vec::as_slice);
    let first = &report["first_divergence"];
    let first = match first["what"].as_str() {
        Some(what) => format!("They part in turn {}: {what}", first["turn"]),
        None => "They are the same.".to_owned(),
    };
    Found {
        is_equal: report["verdict"] == "equal",
        verdict: match report["verdict"].as_str() {
            Some("equal") => "Nothing differs",
            Some(level) => in_words(level),
            None => "It is not known what differs",
        },
        first,
        sides: [
            side("Left", &report["left"], &report["totals"]["left"]),
            side("Right", &report["right"], &report["totals"]["right"]),
        ],
        unshown: turns.len().saturating_sub(TURNS),
        turns: turns.iter().take(TURNS).map(turn).collect(),
    }
}

fn side(name: &'static str, one: &Value, totals: &Value) -> Side {
    let number = |value: &Value| value.as_i64().map(count).unwrap_or_default();
    Side {
        name,
        id: text(&one["session_id"]),
        about: vec![
            ("agent", text(&one["agent"])),
            ("model", text(&one["model"])),
            ("status", text(&one["status"])),
            ("turns", number(&one["turns"])),
            ("tokens in", number(&totals["input_tokens"])),
            ("tokens out", number(&totals["output_tokens"])),
            ("cost", totals["cost_micros"].as_i64().map(dollars).unwrap_or_default()),
        ],
    }
}

fn turn(turn: &Value) -> Turn {
    let differences = turn["differences"].as_array().map_or(&[][..], Vec::as_slice);
    let level = text(&turn["level"]);
    // What was done stands before what was said.
    let with_values = |side: &str| -> Vec<(String, String)> {
        let view = &turn[side];
        let calls = view["calls"].as_array().map_or(&[][..], Vec::as_slice);
        let calls = calls.iter().map(text).collect::<Vec<_>>().join("\n");
        let named = |name: &str, text: String| (name.to_owned(), text.chars().take(TEXT).collect::<String>());
        let done = [named("said to the model", text(&view["input"])), named("calls", calls)];
        let says = named("says", text(&view["text"]));
        let values = differences.iter().flat_map(|one| values(one, side));
        done.into_iter().chain(values).chain([says]).filter(|(_, text)| !text.is_empty()).collect()
    };
    Turn {
        number: turn["turn"].as_i64().unwrap_or_default(),
        word: in_words(&level),
        sentences: differences.iter().map(sentence).collect(),
        left: with_values("left"),
        right: with_values("right"),
        level,
    }
}

/// The gravest kind of difference, for people.
fn in_words(level: &str) -> &'static str {
    match level {
        "equal" => "equal",
        "prose" => "other words",
        "state" => "another state",
        "tools" => "other tool calls",
        _ => "differs",
    }
}

/// What one side has where the arguments of a call, or the state, differ.
fn values(difference: &Value, side: &str) -> Vec<(String, String)> {
    let (of, places) = match (&difference["arguments"], &difference["changes"]) {
        (Value::Array(places), _) => (text(&difference["name"][side]), places),
        (_, Value::Array(places)) => ("state".to_owned(), places),
        _ => return Vec::new(),
    };
    let value = |place: &Value| match text(&place[side]) {
        none if none.is_empty() => "-".to_owned(),
        some => some.chars().take(TEXT).collect(),
    };
    places.iter().map(|place| (format!("{of}: {}", steps(&text(&place["path"]))), value(place))).collect()
}

/// A JSON pointer as a person reads it: `/files/a~1b` is “files › a/b”.
fn steps(pointer: &str) -> String {
    let parts = pointer.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~"));
    parts.collect::<Vec<_>>().join(" › ")
}

/// What a difference is about.
fn sentence(difference: &Value) -> String {
    let part = text(&difference["part"]);
    let name = match &difference["name"] {
        Value::Object(sides) if sides.get("left") == sides.get("right") => {
            sides.get("left").map(text).unwrap_or_default()
        }
        Value::Object(sides) => sides.values().map(text).collect::<Vec<_>>().join(" / "),
        name => text(name),
    };
    match name.as_str() {
        "" => part.replace('_', " "),
        name => format!("{}: {name}", part.replace('_', " ")),
    }
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| if value.is_null() { String::new() } else { value.to_string() }, str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_turn_shows_what_each_side_has_where_its_calls_and_its_state_differ() {
        let turn = turn(&json!({
            "turn": 1,
            "level": "tools",
            "left": {"calls": ["charge"], "text": "Paid."},
            "right": {"calls": ["charge"]},
            "differences": [
                {"part": "call", "name": {"left": "charge", "right": "charge"},
                    "arguments": [{"path": "/cents", "left": 500, "right": 700}]},
                {"part": "state", "changes": [{"path": "/files/bill~1may", "left": true, "right": null}]},
                {"part": "result", "name": {"left": "charge", "right": "charge"}},
            ],
        }));
        let pairs = |all: &[(&str, &str)]| -> Vec<(String, String)> {
            all.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
        };
        assert_eq!(
            turn.left,
            pairs(&[
                ("calls", "charge"),
                ("charge: cents", "500"),
                ("state: files › bill/may", "true"),
                ("says", "Paid.")
            ])
        );
        let right = [("calls", "charge"), ("charge: cents", "700"), ("state: files › bill/may", "-")];
        assert_eq!(turn.right, pairs(&right));
        assert_eq!(
            (turn.word, turn.sentences.join(", ")),
            ("other tool calls", "call: charge, state, result: charge".to_owned())
        );
    }
}
