//! Two sessions side by side: what was called before what was kept, and that before what was said.
//!
//! [`diff`] lays the turns of two sessions side by side and says of each what differs and how much that matters
//! ([`Level`]). It reads nothing and keeps no time, is symmetric, and its work is bounded whatever the transcripts hold.
//!
//! What is Wakeful's own never counts: the ids of sessions, runs and messages, the numbers of messages and steps, and
//! the ids of calls, as long as they stand for calls that stand side by side. Tokens, money, time, models and the hashes
//! of requests are shown and do not count: [`Report::requests`] is for whoever wants equal bytes.
//!
//! A report is JSON under the name [`FORMAT`]: fields may be added to it, and none is removed or changes its meaning.
#![doc = include_str!("README.md")]

mod align;
mod compare;
mod ids;
mod side;
mod turn;
mod value;
mod words;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use side::{Answer, Side, Step};
pub use value::ValueDifference;
pub use words::{Of, Piece};

use crate::record::Usage;
use compare::Comparison;
use serde::Serialize;
use turn::Turn;

/// What a report says it is.
pub const FORMAT: &str = "wakeful-diff/1";

/// How much a difference matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Equal,
    /// Only words differ: what was said, what a tool answered, why a model stopped.
    Prose,
    /// The state of the conversation differs, or whether a call succeeded.
    State,
    /// Another tool was called, or the same one with other arguments.
    Tools,
}

impl Level {
    /// The word that is shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Equal => "equal",
            Level::Prose => "prose",
            Level::State => "state",
            Level::Tools => "tools",
        }
    }
}

/// What came of laying two sessions side by side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: &'static str,
    /// The highest level of any difference.
    pub verdict: Level,
    pub left: Subject,
    pub right: Subject,
    /// What the two were given to begin with, where it differs. It does not count: a replay changes it on purpose.
    pub setup: Vec<SetupDifference>,
    /// The first turn that differs.
    pub first_divergence: Option<Divergence>,
    /// The first turn in which another tool was called, or the same one with other arguments.
    pub first_tool_divergence: Option<Divergence>,
    pub turns: Vec<TurnDiff>,
    /// Where the states at the end differ.
    pub state: Vec<ValueDifference>,
    pub requests: Requests,
    pub totals: Both<Totals>,
    /// Over the turns that stand side by side and were measured on both sides: what a copied beginning cost is known on
    /// one side only.
    pub compared: Both<Totals>,
}

/// The same thing of either side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Both<T> {
    pub left: T,
    pub right: T,
}

/// Whose transcript it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Subject {
    pub session_id: String,
    pub agent: String,
    pub model: String,
    pub status: String,
    pub messages: usize,
    pub turns: usize,
}

/// Something that the sessions were given to begin with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SetupDifference {
    /// `model`, `agent`, `system_prompt`, `tools` or `seeds`.
    pub what: &'static str,
    pub words: Vec<Piece>,
}

/// A turn that differs, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    /// Which of [`Report::turns`], from 1.
    pub turn: usize,
    pub level: Level,
    /// Numbers of the messages with which the turn begins.
    pub left_message: Option<i64>,
    pub right_message: Option<i64>,
    pub what: String,
}

/// One turn: what was said to the model, what it answered, and what became of the calls that it asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TurnDiff {
    /// From 1.
    pub turn: usize,
    pub level: Level,
    /// `None` where the other side alone has such a turn.
    pub left: Option<TurnView>,
    pub right: Option<TurnView>,
    pub request: RequestMatch,
    /// Calls before state before prose.
    pub differences: Vec<Difference>,
    /// Differences that are not listed, for there are too many.
    pub unlisted: usize,
}

/// A turn of one side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TurnView {
    pub first_message: i64,
    pub last_message: i64,
    /// Number of the model's message. `None` while it has not answered.
    pub answer_message: Option<i64>,
    /// Names of the tools that it called.
    pub calls: Vec<String>,
    /// The beginning of what was said to the model, and of what it said.
    pub input: String,
    pub text: String,
    pub finish_reason: Option<&'static str>,
    /// What it took, where that is known.
    pub answer: Option<Answer>,
}

/// Whether the model was asked with the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestMatch {
    Equal,
    Differs,
    /// One of the two was not made here, or is not known.
    Unknown,
}

/// How many turns asked with the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    pub equal: usize,
    pub differ: usize,
    pub unknown: usize,
    /// The first turn that asked with other bytes.
    pub first_that_differs: Option<usize>,
}

/// One difference within a turn.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    pub level: Level,
    #[serde(flatten)]
    pub part: Part,
}

/// What of a turn differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "part", rename_all = "snake_case")]
pub enum Part {
    /// The whole turn is on one side only.
    Turn {
        on: Of,
    },
    /// A call that one side alone made.
    CallOnly {
        on: Of,
        name: String,
        arguments: serde_json::Value,
    },
    /// A call of another tool, or with other arguments. A path is a JSON pointer into the arguments.
    Call {
        /// Which call of the turn, from 1, on either side.
        position: Both<usize>,
        name: Both<String>,
        arguments: Vec<ValueDifference>,
        /// Argument text that was no JSON object.
        malformed: bool,
    },
    /// What the turn did to the state. A path begins with the state's key.
    State {
        changes: Vec<ValueDifference>,
    },
    /// What a call gave.
    Result {
        name: Both<Option<String>>,
        /// Whether it failed.
        is_error: Both<Option<bool>>,
        words: Vec<Piece>,
        /// In the details, which no model sees.
        details: Vec<ValueDifference>,
    },
    /// What was said to the model.
    Input {
        words: Vec<Piece>,
    },
    /// What the model said.
    Text {
        words: Vec<Piece>,
    },
    FinishReason {
        left: Option<&'static str>,
        right: Option<&'static str>,
    },
    /// What no other part shows: blocks of a provider's own, the order of blocks, who may see a message.
    Shape {
        what: String,
    },
}

/// Sums over turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    pub turns: i64,
    pub tool_calls: i64,
    #[serde(flatten)]
    pub usage: Usage,
    /// From the beginning of each step until its commit.
    pub time_ms: i64,
}

impl Totals {
    fn add(&mut self, turn: &TurnView) {
        self.turns += i64::from(turn.answer_message.is_some());
        self.tool_calls += turn.calls.len() as i64;
        if let Some(answer) = &turn.answer {
            let usage = &mut self.usage;
            usage.input_tokens = usage.input_tokens.saturating_add(answer.usage.input_tokens);
            usage.output_tokens = usage.output_tokens.saturating_add(answer.usage.output_tokens);
            usage.cached_tokens = usage.cached_tokens.saturating_add(answer.usage.cached_tokens);
            usage.cache_write_tokens =
                usage.cache_write_tokens.saturating_add(answer.usage.cache_write_tokens);
            usage.cost_micros = usage.cost_micros.saturating_add(answer.usage.cost_micros);
            self.time_ms = self.time_ms.saturating_add(answer.time_ms.unwrap_or(0));
        }
    }
}

/// Lays `right` beside `left`.
pub fn diff(left: &Side, right: &Side) -> Report {
    let turns = Both { left: Turn::of(&left.records), right: Turn::of(&right.records) };
    let rows = align::turns(left, &turns.left, right, &turns.right);
    let mut comparison = Comparison::new(left, right, &turns.left, &turns.right, &rows);
    let setup = comparison.setup();
    let rows: Vec<TurnDiff> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| {
            comparison.turn(
                index + 1,
                row.left.map(|at| &turns.left[at]),
                row.right.map(|at| &turns.right[at]),
            )
        })
        .collect();
    let state = comparison.state();
    let in_state = if state.is_empty() { Level::Equal } else { Level::State };
    let verdict = rows.iter().map(|row| row.level).max().unwrap_or(Level::Equal).max(in_state);
    let (mut totals, mut compared) = (Both::default(), Both::default());
    let mut requests = Requests::default();
    for row in &rows {
        add(&mut totals, row.left.as_ref(), row.right.as_ref());
        match (&row.left, &row.right) {
            (Some(one), Some(other)) if one.answer.is_some() && other.answer.is_some() => {
                add(&mut compared, Some(one), Some(other));
            }
            (_, _) => {}
        }
        match row.request {
            RequestMatch::Equal => requests.equal += 1,
            RequestMatch::Differs => {
                requests.differ += 1;
                requests.first_that_differs.get_or_insert(row.turn);
            }
            RequestMatch::Unknown => requests.unknown += 1,
        }
    }
    let first = |least: Level| rows.iter().find(|row| row.level >= least).map(divergence);
    Report {
        format: FORMAT,
        verdict,
        left: subject(left, turns.left.len()),
        right: subject(right, turns.right.len()),
        setup,
        first_divergence: first(Level::Prose),
        first_tool_divergence: first(Level::Tools),
        state,
        requests,
        totals,
        compared,
        turns: rows,
    }
}

fn add(totals: &mut Both<Totals>, left: Option<&TurnView>, right: Option<&TurnView>) {
    if let Some(turn) = left {
        totals.left.add(turn);
    }
    if let Some(turn) = right {
        totals.right.add(turn);
    }
}

fn subject(side: &Side, turns: usize) -> Subject {
    Subject {
        session_id: side.session_id.to_string(),
        agent: side.agent.clone(),
        model: side.model.clone(),
        status: side.status.clone(),
        messages: side.records.len(),
        turns,
    }
}

fn divergence(row: &TurnDiff) -> Divergence {
    let first = |turn: &Option<TurnView>| turn.as_ref().map(|turn| turn.first_message);
    Divergence {
        turn: row.turn,
        level: row.level,
        left_message: first(&row.left),
        right_message: first(&row.right),
        what: row.differences.first().map_or_else(String::new, |difference| difference.part.sentence()),
    }
}

impl Part {
    /// The difference in a few words, without the texts.
    pub fn sentence(&self) -> String {
        let paths = |changes: &[ValueDifference]| {
            let paths: Vec<&str> = changes.iter().take(3).map(|change| change.path.as_str()).collect();
            let more = if changes.len() > paths.len() { ", …" } else { "" };
            format!("{}{more}", paths.join(", "))
        };
        match self {
            Part::Turn { on } => format!("only on the {}", on.as_str()),
            Part::CallOnly { on, name, .. } => format!("{name} is called only on the {}", on.as_str()),
            Part::Call { name, .. } if name.left != name.right => {
                format!("{} is called, and {} on the right", name.left, name.right)
            }
            Part::Call { name, malformed: true, .. } => {
                format!("{} is called with arguments that are no JSON object", name.left)
            }
            Part::Call { name, arguments, .. } => {
                format!("{} is called with another {}", name.left, paths(arguments))
            }
            Part::State { changes } => format!("another state: {}", paths(changes)),
            Part::Result { name, is_error, .. } => {
                let name = name.left.as_ref().or(name.right.as_ref()).map_or("", String::as_str);
                let word = |failed: Option<bool>| match failed {
                    Some(true) => "fails",
                    Some(false) => "succeeds",
                    None => "has no result",
                };
                if is_error.left == is_error.right {
                    format!("{name} gives something else")
                } else {
                    format!("{name} {}, and {} on the right", word(is_error.left), word(is_error.right))
                }
            }
            Part::Input { .. } => "something else is said to the model".to_owned(),
            Part::Text { .. } => "the model says it in other words".to_owned(),
            Part::FinishReason { left, right } => {
                format!(
                    "it stops for {}, and for {} on the right",
                    left.unwrap_or("nothing"),
                    right.unwrap_or("nothing")
                )
            }
            Part::Shape { what } => what.clone(),
        }
    }
}
