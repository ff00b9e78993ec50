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
    verdict: String,
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
        verdict: text(&report["verdict"]),
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
    let view = |view: &Value| -> Vec<(String, String)> {
        let calls = view["calls"].as_array().map_or(&[][..], Vec::as_slice);
        let calls = calls.iter().map(text).collect::<Vec<_>>().join("\n");
        [("said to the model", text(&view["input"])), ("calls", calls), ("says", text(&view["text"]))]
            .into_iter()
            .filter(|(_, text)| !text.is_empty())
            .map(|(name, text)| (name.to_owned(), text.chars().take(TEXT).collect()))
            .collect()
    };
    Turn {
        number: turn["turn"].as_i64().unwrap_or_default(),
        level: text(&turn["level"]),
        sentences: differences.iter().map(sentence).collect(),
        left: view(&turn["left"]),
        right: view(&turn["right"]),
    }
}

/// What a difference is about.
fn sentence(difference: &Value) -> String {
    let (part, name) = (text(&difference["part"]), text(&difference["name"]));
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
