//! Forks: where a session may be cut, and what the copy starts with.
//!
//! A cut is a message number. The fork gets all messages up to and including that one. A cut never lies
//! inside a tool turn, because the model would see calls without results. A cut only ever moves back, so a
//! fork never contains anything later than requested.
#![doc = include_str!("fork.md")]

use crate::agent::ToolDefinition;
use crate::id::CallId;
use crate::prefix::{Prefix, system_of};
use crate::record::{Record, Role};
use crate::seed::Seed;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Where to cut a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutPoint {
    /// Before its first message. Copies only the seeds.
    Start,
    /// After its last message.
    End,
    /// After the message of this number.
    Message(i64),
    /// After the message of this id.
    MessageId(String),
    /// After the last message of a user.
    LastUser,
    /// After the last result of a tool.
    LastTool,
    /// After the last message of this step.
    Step(i64),
    /// After the last message that existed when the journal entry of this number was written.
    Event(i64),
}

impl fmt::Display for CutPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CutPoint::Start => f.write_str("start"),
            CutPoint::End => f.write_str("end"),
            CutPoint::Message(number) => write!(f, "{number}"),
            CutPoint::MessageId(id) => f.write_str(id),
            CutPoint::LastUser => f.write_str("last-user"),
            CutPoint::LastTool => f.write_str("last-tool"),
            CutPoint::Step(number) => write!(f, "step:{number}"),
            CutPoint::Event(seq) => write!(f, "event:{seq}"),
        }
    }
}

/// A text that names no place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no place: a message's number or its id, start, end, last-user, last-tool, step:N or event:N"
)]
pub struct InvalidCutPoint(String);

impl FromStr for CutPoint {
    type Err = InvalidCutPoint;

    fn from_str(text: &str) -> Result<CutPoint, InvalidCutPoint> {
        let number = |text: &str| text.parse::<i64>().ok().filter(|number| *number >= 0);
        let place = match text {
            "start" => Some(CutPoint::Start),
            "end" => Some(CutPoint::End),
            "last-user" => Some(CutPoint::LastUser),
            "last-tool" => Some(CutPoint::LastTool),
            _ if text.starts_with("msg_") => Some(CutPoint::MessageId(text.to_owned())),
            _ => match text.split_once(':') {
                Some(("step", step)) => number(step).map(CutPoint::Step),
                Some(("event", seq)) => number(seq).map(CutPoint::Event),
                Some(_) => None,
                None => number(text).map(CutPoint::Message),
            },
        };
        place.ok_or_else(|| InvalidCutPoint(text.chars().take(80).collect()))
    }
}

/// The parts of a message that a cut needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    pub message_number: i64,
    pub message_id: String,
    pub step_number: i64,
    pub role: Role,
    /// Whether it is a summary. A summary is not a reply.
    #[serde(default)]
    pub summary: bool,
    /// The calls that it asks for.
    #[serde(default)]
    pub asks: Vec<CallId>,
    /// The calls whose results it has.
    #[serde(default)]
    pub answers: Vec<CallId>,
    /// Number of the journal entry that records the message. `None` if the message is older than the journal,
    /// as the messages are that a fork copied.
    pub seq: Option<i64>,
}

/// A cut, and what is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The requested message, or the session's base if the place is the start.
    pub asked_message_number: i64,
    /// The last message that is copied, or the session's base if none is.
    pub at_message_number: i64,
    /// Number of copied messages.
    pub kept: usize,
    /// The last step that is copied. The fork's own steps follow it.
    pub last_step_number: i64,
    /// Why the cut is not at the requested place.
    pub moved: Option<String>,
    /// Whether the model still has to reply to the last copied message.
    pub awaits_model: bool,
}

/// Why a session cannot be cut at a place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CannotCut(String);

/// Finds the cut in `lines`, the session's messages in order. `base_message_number` is the number before the
/// first message. With `edited`, the place must be a user's message. That message is not copied, because
/// another text replaces it.
///
/// # Errors
/// [`CannotCut`] if the message does not exist or cannot be edited, or if nothing would be left before a tool
/// turn.
pub fn cut(lines: &[Line], base_message_number: i64, at: &CutPoint, edited: bool) -> Result<Cut, CannotCut> {
    // How many messages are kept.
    let asked = place(lines, base_message_number, at)?;
    let number = |kept: usize| match kept.checked_sub(1) {
        Some(last) => lines[last].message_number,
        None => base_message_number,
    };
    let wanted = if edited {
        let Some(message) = asked.checked_sub(1).map(|last| &lines[last]) else {
            return Err(CannotCut("the start is not a message, so it has no text to replace".to_owned()));
        };
        if message.role != Role::User {
            return Err(CannotCut(format!(
                "message {} is the {}'s: only the text of a user's message can be replaced{}",
                message.message_number,
                message.role.as_str(),
                users(lines)
            )));
        }
        asked - 1
    } else {
        asked
    };
    let kept = outside_of_turns(lines, wanted);
    if kept == 0 && wanted > 0 && !edited {
        return Err(CannotCut(format!(
            "message {} is inside of the tool turn that the session begins with: nothing stands before it",
            number(wanted)
        )));
    }
    let moved = (kept < wanted).then(|| {
        format!(
            "message {} is inside of a tool turn, whose calls are not all answered there: cut before the turn",
            number(wanted)
        )
    });
    let kept_lines = &lines[..kept];
    Ok(Cut {
        asked_message_number: number(asked),
        at_message_number: number(kept),
        kept,
        // A step has one reply of the model, and outside of tool turns it is complete.
        last_step_number: kept_lines
            .iter()
            .filter(|line| line.is_reply())
            .map(|line| line.step_number)
            .max()
            .unwrap_or(0),
        moved,
        awaits_model: kept_lines
            .iter()
            .rev()
            .find(|line| !line.summary)
            .is_some_and(|line| matches!(line.role, Role::User | Role::Tool)),
    })
}

/// Names the newest user messages, for an error text.
fn users(lines: &[Line]) -> String {
    let said = lines.iter().filter(|line| line.role == Role::User);
    let numbers: Vec<String> = said.map(|line| line.message_number.to_string()).collect();
    let newest = numbers.len().saturating_sub(10);
    match numbers.len() {
        0 => String::new(),
        1 => format!(", here that of message {} (last-user)", numbers[0]),
        _ => {
            let before = if newest > 0 { "…, " } else { "" };
            format!(
                ", here one of the messages {before}{} (last-user is the last)",
                numbers[newest..].join(", ")
            )
        }
    }
}

/// Number of messages up to and including the place.
fn place(lines: &[Line], base_message_number: i64, at: &CutPoint) -> Result<usize, CannotCut> {
    let after = |found: Option<usize>, missing: &dyn Fn() -> String| {
        found.map(|index| index + 1).ok_or_else(|| CannotCut(missing()))
    };
    match at {
        CutPoint::Start => Ok(0),
        CutPoint::End => Ok(lines.len()),
        CutPoint::Message(number) if *number == base_message_number => Ok(0),
        CutPoint::Message(number) => {
            after(lines.iter().position(|line| line.message_number == *number), &|| {
                let (first, last) = (lines.first(), lines.last());
                match (first, last) {
                    (Some(first), Some(last)) => format!(
                        "it has no message {number}: its messages are {} to {}",
                        first.message_number, last.message_number
                    ),
                    _ => format!("it has no message {number}: it has none yet"),
                }
            })
        }
        CutPoint::MessageId(id) => {
            after(lines.iter().position(|line| line.message_id == *id), &|| format!("it has no message {id}"))
        }
        CutPoint::LastUser => after(lines.iter().rposition(|line| line.role == Role::User), &|| {
            "no user has said anything in it".to_owned()
        }),
        CutPoint::LastTool => after(lines.iter().rposition(|line| line.role == Role::Tool), &|| {
            "no tool was called in it".to_owned()
        }),
        CutPoint::Step(number) => after(lines.iter().rposition(|line| line.step_number == *number), &|| {
            format!("it has no step {number}")
        }),
        CutPoint::Event(seq) => {
            let said = lines.iter().take_while(|line| line.seq.is_none_or(|said| said <= *seq)).count();
            after(said.checked_sub(1), &|| format!("nothing had been said at its entry {seq}"))
        }
    }
}

/// The largest number of messages, at most `wanted`, that splits no tool turn.
fn outside_of_turns(lines: &[Line], wanted: usize) -> usize {
    let mut kept = wanted;
    // A reply of the model ends the turn before it, even if that turn has calls without a result.
    while let Some(turn) = lines[..kept].iter().rposition(Line::is_reply) {
        let answered: Vec<&CallId> = lines[turn + 1..kept].iter().flat_map(|line| &line.answers).collect();
        if lines[turn].asks.iter().all(|call| answered.contains(&call)) {
            break;
        }
        kept = turn;
    }
    kept
}

impl Line {
    /// Returns whether it is a reply of the model. A summary is not.
    fn is_reply(&self) -> bool {
        self.role == Role::Assistant && !self.summary
    }

    /// The line of `record`.
    pub fn of(record: &Record, message_id: String, seq: Option<i64>) -> Line {
        Line {
            message_number: record.message_number,
            message_id,
            step_number: record.step_number,
            role: record.role,
            summary: record.is_summary(),
            asks: record.tool_calls().map(|call| call.call_id.clone()).collect(),
            answers: record.tool_results().map(|result| result.call_id.clone()).collect(),
            seq,
        }
    }
}

/// A change of the parent's system prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SystemPromptPatch {
    Replace(String),
    /// Adds the text after the parent's prompt, with a blank line between.
    Append(String),
}

/// `seeds` with the changed system prompt.
pub fn patched(seeds: Vec<Seed>, patch: &SystemPromptPatch) -> Vec<Seed> {
    let (mut system, others): (Vec<Seed>, Vec<Seed>) =
        seeds.into_iter().partition(|seed| seed.role == Role::System);
    match patch {
        SystemPromptPatch::Replace(text) => {
            system = vec![Seed { role: Role::System, content: text.clone(), is_new: true }];
        }
        // Add no seed if there is one to extend: the session's message numbers start after its seeds.
        SystemPromptPatch::Append(text) => match system.last_mut() {
            Some(last) => last.content = format!("{}\n\n{text}", last.content),
            None => system.push(Seed { role: Role::System, content: text.clone(), is_new: true }),
        },
    }
    system.into_iter().chain(others).collect()
}

/// The prefix of a fork with other seeds or tools than its parent. `None` if it has the parent's: it then
/// keeps the parent's bytes, so that the provider's cache still matches.
pub fn prefix(
    parent: Option<&Prefix>,
    seeds: Option<&[Seed]>,
    tools: Option<Vec<ToolDefinition>>,
) -> Option<Prefix> {
    let parent = parent.filter(|_| seeds.is_some() || tools.is_some())?;
    let mut tools = tools.unwrap_or_else(|| parent.tools.to_vec());
    tools.sort_by(|a, b| a.name.cmp(&b.name));
    Some(Prefix { system: seeds.map_or_else(|| parent.system.clone(), system_of), tools: tools.into() })
}

#[cfg(test)]
mod tests;
