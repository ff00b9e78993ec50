//! Two sessions side by side: where they part, and in what.

mod turn;

use crate::api::{part, query};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::{Event, Session};
use crate::refusal::Refusal;
use crate::text::{count, dollars, span};
use crate::visit::Visit;
use askama::Template;
use axum::extract::Query;
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;
use turn::{Turn, turn};

/// The turns and differences that are shown at most, and how many of them come before the first difference in a longer comparison.
const TURNS: usize = 300;
const LEAD: usize = 5;
/// How many sessions a person may pick from.
const OFFERED: usize = 30;

#[derive(Template)]
#[template(path = "compare.html")]
struct Compare {
    frame: Frame,
    asked: Asked,
    found: Option<Found>,
    /// The newest sessions, while one is still to be picked.
    offered: Vec<Session>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    left: String,
    right: String,
}

impl Compare {
    /// The comparison with this one more.
    fn with(&self, one: &Session) -> String {
        match self.asked.left.trim() {
            "" => query(&[("left", &one.session_id)]),
            left => query(&[("left", left), ("right", &one.session_id)]),
        }
    }
}

struct Found {
    is_equal: bool,
    /// What was changed on purpose, as far as it is known.
    causes: String,
    verdict: &'static str,
    first: String,
    /// The turn with the first difference, if it is on the page.
    first_turn: Option<i64>,
    sides: [Side; 2],
    turns: Vec<Turn>,
    /// Turns before and after those that are shown.
    before: usize,
    after: usize,
}

struct Side {
    name: &'static str,
    id: String,
    about: Vec<(&'static str, String)>,
}

/// One of the two, and its first entry of the journal: that of a fork says what it was forked from.
struct Origin {
    session: Session,
    first: Option<Event>,
}

impl Origin {
    async fn of(visit: &Visit, id: &str) -> Result<Origin, Refusal> {
        let path = format!("/v1/sessions/{}", part(id));
        let first: List<Event> = visit.api.get(&format!("{path}/events?limit=1")).await?;
        Ok(Origin { session: visit.api.get(&path).await?, first: first.items.into_iter().next() })
    }

    /// The entry that says that it is a fork of the other one.
    fn fork_of(&self, other: &Origin) -> Option<&Event> {
        let is_of = |first: &&Event| {
            first.kind == "SESSION_FORKED" && first.text("parent_session_id") == other.session.session_id
        };
        self.first.as_ref().filter(is_of)
    }
}

pub(crate) async fn show(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let frame = Frame::of(&visit, Nav::Sessions, "Compare").await?;
    let (left, right) = (asked.left.trim(), asked.right.trim());
    let (mut found, mut offered) = (None, Vec::new());
    if left.is_empty() || right.is_empty() {
        let newest: List<Session> = visit.api.get(&format!("/v1/sessions?limit={OFFERED}")).await?;
        offered = newest.items;
        offered.retain(|one| one.session_id != left);
    } else {
        let report: Value =
            visit.api.get(&format!("/v1/sessions/{}/diff/{}", part(left), part(right))).await?;
        found = Some(read(&report, &[Origin::of(&visit, left).await?, Origin::of(&visit, right).await?]));
    }
    Ok(page(&Compare { frame, asked, found, offered }))
}

fn read(report: &Value, [left, right]: &[Origin; 2]) -> Found {
    let turns = report["turns"].as_array().map_or(&[][..], Vec::as_slice);
    let first = &report["first_divergence"];
    let first_turn = first["turn"].as_i64();
    let at = turns.iter().position(|turn| turn["turn"].as_i64() == first_turn);
    let before = at.map_or(0, |at| at.saturating_sub(LEAD)).min(turns.len().saturating_sub(TURNS));
    let first = match first["what"].as_str() {
        Some(what) => format!("They part in turn {}: {what}", first["turn"]),
        None => "They are the same.".to_owned(),
    };
    let names = match (left.fork_of(right), right.fork_of(left)) {
        (None, None) => ["Left", "Right"],
        (Some(_), _) => ["Fork", "Parent"],
        (None, Some(_)) => ["Parent", "Fork"],
    };
    let side = |at: usize, key: &str, origin: &Origin| {
        side(names[at], &report[key], &report["totals"][key], origin.session.tool_mode())
    };
    Found {
        is_equal: report["verdict"] == "equal",
        causes: causes(report, left.fork_of(right).or(right.fork_of(left)), [left, right]),
        verdict: match report["verdict"].as_str() {
            Some("equal") => "Nothing differs",
            Some(level) => in_words(level),
            None => "It is not known what differs",
        },
        first,
        sides: [side(0, "left", left), side(1, "right", right)],
        first_turn: at.and(first_turn),
        before,
        after: (turns.len() - before).saturating_sub(TURNS),
        turns: turns.iter().skip(before).take(TURNS).map(turn).collect(),
    }
}

/// What was changed on purpose: in the message at which the fork begins, and in what the two began with.
fn causes(report: &Value, forked: Option<&Event>, [left, right]: [&Origin; 2]) -> String {
    let mut causes = Vec::new();
    // The message at which it was asked for is not copied only if another text replaces it, or if the cut was moved.
    if let Some(forked) = forked.filter(|forked| forked.payload["moved"].is_null())
        && let Some(asked) = forked.number("asked_message_number")
        && forked.number("at_message_number").is_some_and(|at| at < asked)
    {
        causes.push(format!("message {asked} was edited"));
    }
    for one in report["setup"].as_array().into_iter().flatten() {
        causes.push(match one["what"].as_str() {
            Some("system_prompt") => "the system prompt is another".to_owned(),
            Some("tools") => "the tools are others".to_owned(),
            Some("seeds") => "the first messages are others".to_owned(),
            Some(what) => format!("the {what} is another"),
            None => continue,
        });
    }
    let (one, other) = (left.session.tool_mode(), right.session.tool_mode());
    if one != other {
        causes.push(format!("tools are {one} on the left and {other} on the right"));
    }
    causes.join("; ")
}

fn side(name: &'static str, one: &Value, totals: &Value, tool_mode: &str) -> Side {
    let number = |value: &Value| value.as_i64().map(count).unwrap_or_default();
    Side {
        name,
        id: text(&one["session_id"]),
        about: vec![
            ("agent", text(&one["agent"])),
            ("model", text(&one["model"])),
            ("tools", tool_mode.to_owned()),
            ("status", text(&one["status"])),
            ("turns", number(&one["turns"])),
            ("took", totals["time_ms"].as_i64().map(span).unwrap_or_default()),
            ("tokens in", number(&totals["input_tokens"])),
            ("tokens out", number(&totals["output_tokens"])),
            ("cost", totals["cost_micros"].as_i64().map(dollars).unwrap_or_default()),
        ],
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

fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| if value.is_null() { String::new() } else { value.to_string() }, str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn origin(id: &str, mode: &str, first: Value) -> Origin {
        let session = json!({"session_id": id, "conversation_id": "c", "trigger_type": "chat", "agent": "a", "model_id": "m",
            "policy": {"tool_mode": mode}, "status": "completed", "total_turns": 1, "total_input_tokens": 0,
            "total_output_tokens": 0, "total_cached_tokens": 0, "total_cost_micros": 0,
            "started_at": "2026-11-25T10:00:00Z"});
        let first =
            json!({"seq": 1, "ts": "2026-11-25T10:00:00Z", "type": "SESSION_FORKED", "payload": first});
        Origin {
            session: serde_json::from_value(session).unwrap(),
            first: serde_json::from_value(first).ok(),
        }
    }

    #[test]
    fn a_fork_and_its_parent_are_named_and_what_was_done_to_it_is_said_first() {
        let report = json!({"verdict": "tools", "setup": [{"what": "model"}], "turns": [],
            "totals": {"left": {"time_ms": 1500}, "right": {"time_ms": 61_000}}});
        let forked = json!({"parent_session_id": "p", "at_message_number": 1, "asked_message_number": 2});
        let (parent, fork) = (origin("p", "live", json!({})), origin("f", "dry", forked.clone()));
        let found = read(&report, &[parent, fork]);
        assert_eq!(found.sides.each_ref().map(|side| side.name), ["Parent", "Fork"]);
        assert_eq!(
            found.causes,
            "message 2 was edited; the model is another; tools are live on the left and dry on the right"
        );
        let took = found.sides.each_ref().map(|side| {
            side.about.iter().find(|(name, _)| *name == "took").map(|(_, took)| took.clone()).unwrap()
        });
        assert_eq!(took, ["1.5 s", "1 min 1 s"]);
        // A cut that was moved is no edit, and two strangers are no parent and fork.
        let mut moved = forked;
        moved["moved"] = json!("message 2 is inside of a tool turn");
        let found = read(&json!({}), &[origin("f", "live", moved), origin("p", "live", json!({}))]);
        assert_eq!(found.sides.each_ref().map(|side| side.name), ["Fork", "Parent"]);
        assert_eq!(found.causes, "");
        let found = read(&json!({}), &[origin("a", "live", json!({})), origin("b", "live", json!({}))]);
        assert_eq!(found.sides.each_ref().map(|side| side.name), ["Left", "Right"]);
    }
}
