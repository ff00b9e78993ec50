//! Shapes: which checkpoints of a task hold messages, and where in them.

use super::declared::Declared;
use super::message::{finish_of, usage_of};
use super::names::{self, Name};
use super::{Listed, TaskState};
use crate::record::{FinishReason, Usage};
use serde_json::Value;

const LOOP: &str = "agent-loop";
const INITIAL: &str = "initial-message";
const MESSAGE: &str = "message";

/// Where the messages of a task are.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// `agent-loop[#n]`: `{appendedMessages, finishReason, usage, executedLocalToolCount, conversationUpdates?}`, or
    /// the slim one: `{toMessageNumber, …}`, whose messages are in the program's own `conversation_records`.
    AgentLoop,
    /// `initial-message`, then `agent-loop[#n]`: `{newMessages, finishReason}`.
    NewMessages,
    /// `message[#n]`: `{message}`, one checkpoint for each message.
    MessageLog,
    /// As the configuration says.
    Declared(Box<Declared>),
}

/// What one checkpoint says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    pub messages: Vec<Value>,
    pub finish: Option<FinishReason>,
    pub usage: Option<Usage>,
    pub tools: Option<i64>,
    /// Updates of the program's state, in order.
    pub updates: Vec<(String, Value)>,
    /// The slim shape: number of the last message of the step, which is elsewhere.
    pub to_message_number: Option<i64>,
    /// Names of fields that mean nothing here.
    pub left_out: Vec<String>,
}

/// The checkpoints of a task: those with messages in their order, and the others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sorted {
    pub said: Vec<Listed>,
    pub others: Vec<Listed>,
}

impl Shape {
    /// The word for people and for the configuration's `shape`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Shape::AgentLoop => "agent-loop",
            Shape::NewMessages => "new-messages",
            Shape::MessageLog => "messages",
            Shape::Declared(_) => "declared",
        }
    }

    /// Reads the word of a built-in shape.
    pub fn built_in(word: &str) -> Option<Shape> {
        [Shape::AgentLoop, Shape::NewMessages, Shape::MessageLog]
            .into_iter()
            .find(|shape| shape.as_str() == word)
    }

    /// Tells the shape by a checkpoint's name and result.
    pub fn of(name: &str, state: &Value) -> Option<Shape> {
        match Name::of(name).base {
            LOOP if state["appendedMessages"].is_array() || state["toMessageNumber"].is_i64() => {
                Some(Shape::AgentLoop)
            }
            LOOP if state["newMessages"].is_array() => Some(Shape::NewMessages),
            INITIAL if state["role"].is_string() => Some(Shape::NewMessages),
            MESSAGE if state["message"]["role"].is_string() => Some(Shape::MessageLog),
            _ => None,
        }
    }

    /// Returns whether a checkpoint of this name can tell the shape.
    pub fn is_telling(name: &str) -> bool {
        matches!(Name::of(name).base, LOOP | INITIAL | MESSAGE)
    }

    /// Names of the steps that hold messages, in the order in which the program runs them.
    fn bases(&self) -> Vec<&str> {
        match self {
            Shape::AgentLoop => vec![LOOP],
            Shape::NewMessages => vec![INITIAL, LOOP],
            Shape::MessageLog => vec![MESSAGE],
            Shape::Declared(declared) => declared.steps.iter().map(String::as_str).collect(),
        }
    }

    /// Sorts the checkpoints that count for `attempt`.
    pub fn sort(&self, listed: Vec<Listed>, attempt: i64) -> Sorted {
        let bases = self.bases();
        let mut groups: Vec<Vec<Listed>> = vec![Vec::new(); bases.len()];
        let mut others = Vec::new();
        for one in listed.into_iter().filter(|one| one.counts(attempt)) {
            match bases.iter().position(|base| *base == Name::of(&one.name).base) {
                Some(at) => groups[at].push(one),
                None => others.push(one),
            }
        }
        groups.iter_mut().for_each(|group| names::sort(group));
        others.sort_by(|a, b| (&a.updated_at, &a.name).cmp(&(&b.updated_at, &b.name)));
        Sorted { said: groups.concat(), others }
    }

    /// Returns whether one checkpoint is one step, so that its messages are committed together.
    pub fn steps_are_checkpoints(&self) -> bool {
        !matches!(self, Shape::MessageLog)
    }

    /// Returns whether this checkpoint holds the user's first message and no step.
    pub fn is_opening(&self, name: &str) -> bool {
        *self == Shape::NewMessages && Name::of(name).base == INITIAL
    }

    /// Reads a checkpoint.
    ///
    /// # Errors
    /// Why it does not have this shape, for people.
    pub fn read(&self, name: &str, state: &Value) -> Result<Reading, String> {
        let unfit = |what: &str| Err(format!("the checkpoint {name:?} has no {what}"));
        match self {
            Shape::AgentLoop => match (&state["appendedMessages"], state["toMessageNumber"].as_i64()) {
                (Value::Array(messages), _) => Ok(of_loop(messages.clone(), state, &["appendedMessages"])),
                (_, Some(to)) => {
                    Ok(Reading { to_message_number: Some(to), ..of_loop(Vec::new(), state, &[]) })
                }
                _ => unfit("appendedMessages, and no toMessageNumber"),
            },
            Shape::NewMessages if self.is_opening(name) => {
                Ok(Reading { messages: vec![state.clone()], ..Reading::default() })
            }
            Shape::NewMessages => match &state["newMessages"] {
                Value::Array(messages) => Ok(of_loop(messages.clone(), state, &["newMessages"])),
                _ => unfit("newMessages"),
            },
            Shape::MessageLog => match &state["message"] {
                message @ Value::Object(_) => Ok(Reading {
                    messages: vec![message.clone()],
                    left_out: left_out(state, &["message"]),
                    ..Reading::default()
                }),
                _ => unfit("message"),
            },
            Shape::Declared(declared) => declared.read(name, state),
        }
    }
}

fn of_loop(messages: Vec<Value>, state: &Value, own: &[&str]) -> Reading {
    const KNOWN: [&str; 5] =
        ["finishReason", "usage", "executedLocalToolCount", "conversationUpdates", "toMessageNumber"];
    let known: Vec<&str> = KNOWN.iter().chain(own).copied().collect();
    Reading {
        messages,
        finish: state["finishReason"].as_str().and_then(finish_of),
        usage: usage_of(&state["usage"]),
        tools: state["executedLocalToolCount"].as_i64(),
        updates: state["conversationUpdates"].as_array().into_iter().flatten().filter_map(update).collect(),
        to_message_number: None,
        left_out: left_out(state, &known),
    }
}

/// An update of the state: its `key` and `value`, or the whole under its `type`.
pub(super) fn update(item: &Value) -> Option<(String, Value)> {
    match (item["key"].as_str(), item["type"].as_str()) {
        (Some(key), _) => Some((key.to_owned(), item["value"].clone())),
        (None, Some(kind)) => Some((kind.to_owned(), item.clone())),
        (None, None) => None,
    }
}

fn left_out(state: &Value, known: &[&str]) -> Vec<String> {
    let keys = state.as_object().into_iter().flat_map(|fields| fields.keys());
    keys.filter(|key| !known.contains(&key.as_str())).cloned().collect()
}

/// Why a task stays in Absurd for now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stays {
    /// A worker of Absurd has it.
    Runs,
    /// Absurd may still run it: only `take` brings it over.
    Open,
}

/// Whether a task may be imported. `stopped`: Absurd's workers are gone for good, somebody says.
pub fn stays(state: TaskState, parked: bool, stopped: bool) -> Option<Stays> {
    match state {
        TaskState::Completed | TaskState::Failed | TaskState::Cancelled => None,
        TaskState::Pending | TaskState::Sleeping if parked || stopped => None,
        TaskState::Pending | TaskState::Sleeping => Some(Stays::Open),
        TaskState::Running => Some(Stays::Runs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn listed(name: &str, attempt: i64, status: &str) -> Listed {
        Listed {
            name: name.to_owned(),
            attempt: Some(attempt),
            status: status.to_owned(),
            ..Listed::default()
        }
    }

    #[test]
    fn a_shape_is_told_by_name_and_result() {
        for (name, state, shape) in [
            ("agent-loop", json!({"appendedMessages": []}), Some(Shape::AgentLoop)),
            ("agent-loop#3", json!({"toMessageNumber": 3}), Some(Shape::AgentLoop)),
            ("agent-loop", json!({"newMessages": []}), Some(Shape::NewMessages)),
            ("initial-message", json!({"role": "user", "content": "Hi"}), Some(Shape::NewMessages)),
            ("message#2", json!({"message": {"role": "user"}}), Some(Shape::MessageLog)),
            ("message", json!("text"), None),
            ("send-mail", json!({"newMessages": []}), None),
        ] {
            assert_eq!(Shape::of(name, &state), shape, "{name} {state}");
        }
    }

    #[test]
    fn what_absurd_hides_does_not_count_and_the_opening_comes_first() {
        let all = vec![
            listed("agent-loop#10", 1, "committed"),
            listed("agent-loop#9", 1, "committed"),
            listed("agent-loop#11", 3, "committed"),
            listed("agent-loop", 1, "pending"),
            listed("initial-message", 1, "committed"),
            Listed { attempt: None, ..listed("send", 1, "committed") },
        ];
        let sorted = Shape::NewMessages.sort(all, 2);
        let names = |listed: &[Listed]| listed.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&sorted.said), ["initial-message", "agent-loop#9", "agent-loop#10"]);
        assert_eq!(names(&sorted.others), ["send"]);
    }

    #[test]
    fn a_step_gives_its_messages_usage_and_updates() {
        let state = json!({"appendedMessages": [{"role": "assistant", "content": "Hi"}], "finishReason": "tool-calls",
            "usage": {"inputTokens": 10, "outputTokens": 2, "cachedInputTokens": 4, "costCents": 1.5},
            "executedLocalToolCount": 2, "conversationUpdates": [{"key": "name", "value": "Ann"}, {"type": "seen"}],
            "debug": 1});
        let reading = Shape::AgentLoop.read("agent-loop", &state).unwrap();
        assert_eq!((reading.finish, reading.tools), (Some(FinishReason::ToolCalls), Some(2)));
        let usage = reading.usage.unwrap();
        assert_eq!((usage.input_tokens, usage.cached_tokens, usage.cost_micros), (10, 4, 15_000));
        assert_eq!(reading.updates[0], ("name".to_owned(), json!("Ann")));
        assert_eq!(reading.updates[1].0, "seen");
        assert_eq!(reading.left_out, ["debug"]);
        assert!(Shape::AgentLoop.read("agent-loop", &json!({"newMessages": []})).is_err());
    }

    #[test]
    fn a_task_that_absurd_may_run_stays() {
        use TaskState::{Completed, Pending, Running, Sleeping};
        assert_eq!(stays(Completed, false, false), None);
        assert_eq!(stays(Sleeping, false, false), Some(Stays::Open));
        assert_eq!(stays(Sleeping, true, false), None);
        assert_eq!(stays(Pending, false, true), None);
        assert_eq!(stays(Running, true, true), Some(Stays::Runs));
    }
}
