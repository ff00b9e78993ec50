//! The report: its types, which are its JSON.

use super::side::Answer;
use super::sides::Sides;
use super::value::ValueDifference;
use super::words::{Piece, WhichSide};
use crate::record::Usage;
use serde::Serialize;

/// How much a difference matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// The level's name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Equal => "equal",
            Level::Prose => "prose",
            Level::State => "state",
            Level::Tools => "tools",
        }
    }
}

/// The result of comparing two sessions.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report {
    /// [`FORMAT`](super::FORMAT).
    pub format: &'static str,
    /// The highest level of any difference.
    pub verdict: Level,
    pub left: Subject,
    pub right: Subject,
    /// Differences in what the two sessions started with. They do not count, because a replay changes this on
    /// purpose.
    pub setup: Vec<SetupDifference>,
    /// The first turn that differs.
    pub first_divergence: Option<Divergence>,
    /// The first turn in which another tool was called, or the same one with other arguments.
    pub first_tool_divergence: Option<Divergence>,
    pub turns: Vec<TurnDiff>,
    /// Differences between the final states.
    pub state: Vec<ValueDifference>,
    pub requests: Requests,
    pub totals: Sides<Totals>,
    /// Sums over the paired turns that both sides measured. The cost of a copied beginning is known on one
    /// side only.
    pub compared: Sides<Totals>,
}

/// One of the two sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Subject {
    pub session_id: String,
    pub agent: String,
    pub model: String,
    pub status: String,
    pub messages: usize,
    pub turns: usize,
}

/// A difference in what the sessions started with.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SetupDifference {
    /// `model`, `agent`, `system_prompt`, `tools` or `seeds`.
    pub what: &'static str,
    pub words: Vec<Piece>,
}

/// The first turn that differs, with a sentence about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Divergence {
    /// Which of [`Report::turns`], from 1.
    pub turn: usize,
    pub level: Level,
    /// Number of the turn's first message on each side.
    pub left_message: Option<i64>,
    pub right_message: Option<i64>,
    pub what: String,
}

/// One turn: the input of the model, its answer, and the results of its calls.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TurnDiff {
    /// From 1.
    pub turn: usize,
    pub level: Level,
    /// `None` if only the other side has this turn.
    pub left: Option<TurnView>,
    pub right: Option<TurnView>,
    pub request: RequestMatch,
    /// Sorted: calls, then state, then prose.
    pub differences: Vec<Difference>,
    /// Number of further differences that are not listed.
    pub unlisted: usize,
}

/// A turn of one side.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TurnView {
    pub first_message: i64,
    pub last_message: i64,
    /// Number of the model's message. `None` while it has not answered.
    pub answer_message: Option<i64>,
    /// Names of the tools that it called.
    pub calls: Vec<String>,
    /// Excerpts of the model's input (`input`) and of its answer (`text`).
    pub input: String,
    pub text: String,
    pub finish_reason: Option<&'static str>,
    /// Usage and time of the answer, if known.
    pub answer: Option<Answer>,
}

/// Whether both sides sent the model the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RequestMatch {
    Equal,
    Differs,
    /// At least one side's request hash is not known.
    Unknown,
}

/// How many turns sent the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Requests {
    pub equal: usize,
    pub differ: usize,
    pub unknown: usize,
    /// The first turn that sent other bytes.
    pub first_that_differs: Option<usize>,
}

/// One difference within a turn.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Difference {
    pub level: Level,
    #[serde(flatten)]
    pub part: Part,
}

/// The part of a turn that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "part", rename_all = "snake_case")]
pub enum Part {
    /// The whole turn is on one side only.
    Turn {
        on: WhichSide,
    },
    /// A call that one side alone made.
    CallOnly {
        on: WhichSide,
        name: String,
        arguments: serde_json::Value,
    },
    /// A call of another tool, or with other arguments. A path is a JSON pointer into the arguments.
    Call {
        /// Which call of the turn, from 1, on either side.
        position: Sides<usize>,
        name: Sides<String>,
        arguments: Vec<ValueDifference>,
        /// Whether the calls differ in argument text that is not a JSON object.
        malformed: bool,
    },
    /// The turn changed the state in another way. A path begins with the state's key.
    State {
        changes: Vec<ValueDifference>,
    },
    /// The result of a call.
    Result {
        name: Sides<Option<String>>,
        /// Whether it failed.
        is_error: Sides<Option<bool>>,
        words: Vec<Piece>,
        /// Differences in the details, which no model sees.
        details: Vec<ValueDifference>,
    },
    /// The input of the model.
    Input {
        words: Vec<Piece>,
    },
    /// The text of the model's answer.
    Text {
        words: Vec<Piece>,
    },
    FinishReason {
        left: Option<&'static str>,
        right: Option<&'static str>,
    },
    /// Anything else: a provider's own blocks, the order of blocks, the visibility of a message.
    Shape {
        what: String,
    },
}

/// Sums over turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Totals {
    pub turns: i64,
    pub tool_calls: i64,
    #[serde(flatten)]
    pub usage: Usage,
    /// From the start of each step until its commit.
    pub time_ms: i64,
}

impl Totals {
    pub(super) fn add(&mut self, turn: &TurnView) {
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
                format!("{} is called on the left, and {} on the right", name.left, name.right)
            }
            Part::Call { name, malformed: true, .. } => {
                format!("{} is called with arguments that are not a JSON object", name.left)
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
                    format!("{name} returns another result")
                } else {
                    format!("{name} {}, and {} on the right", word(is_error.left), word(is_error.right))
                }
            }
            Part::Input { .. } => "the model gets another input".to_owned(),
            Part::Text { .. } => "the model answers in other words".to_owned(),
            Part::FinishReason { left, right } => {
                format!(
                    "the model stops for {}, and for {} on the right",
                    left.unwrap_or("nothing"),
                    right.unwrap_or("nothing")
                )
            }
            Part::Shape { what } => what.clone(),
        }
    }
}
