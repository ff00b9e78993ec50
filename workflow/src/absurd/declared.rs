//! A shape that the configuration declares, by paths of JSONPath (RFC 9535).
//!
//! Paths below `messages` begin at one message. A declared part replaces what [`super::message`] would read; without any
//! declared part, the message must be in one of the formats known there.

use super::message::{self, Said};
use super::shape::{Reading, update};
use super::usage::{finish_of, usage_of};
use crate::record::{Block, Role, ToolCall, ToolResult, Usage};
use serde_json::{Value, json};
use serde_json_path::JsonPath;
use std::collections::BTreeMap;

/// The keys of `[absurd.tasks."NAME"]` that are paths, and what they find.
pub const PATHS: [(&str, &str); 21] = [
    ("messages", "in a step's result: its messages"),
    ("role", "in a message: user, assistant or tool"),
    ("content", "in a message: its text"),
    ("calls", "in a message: the tool calls"),
    ("call_id", "in a call: its id"),
    ("call_name", "in a call: the tool"),
    ("call_arguments", "in a call: the arguments"),
    ("results", "in a message: the results of tool calls"),
    ("result_call_id", "in a result: the id of its call"),
    ("result_content", "in a result: the text"),
    ("finish_reason", "in a step's result"),
    ("usage", "in a step's result: an object of token counts in one of the usual spellings"),
    ("input_tokens", "in a step's result"),
    ("output_tokens", "in a step's result"),
    ("updates", "in a step's result: updates of the state"),
    ("update_key", "in an update"),
    ("update_value", "in an update"),
    ("system", "in the task's params: the system prompt"),
    ("prompt", "in the task's params: the user's message"),
    ("conversation", "in the task's params: the conversation's id"),
    ("trigger", "in the task's params: the id of what started it"),
];

/// A declared shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Declared {
    /// Names of the steps that hold messages, in order.
    pub steps: Vec<String>,
    paths: BTreeMap<String, JsonPath>,
}

/// Parses one path.
///
/// # Errors
/// What is wrong with it.
pub fn parse(path: &str) -> Result<JsonPath, String> {
    JsonPath::parse(path).map_err(|error| error.to_string())
}

impl Declared {
    /// Declares a shape.
    ///
    /// # Errors
    /// What is wrong with the first path that does not parse.
    pub fn new(steps: Vec<String>, paths: &BTreeMap<String, String>) -> Result<Declared, String> {
        let paths = paths.iter().map(|(key, path)| Ok((key.clone(), parse(path)?)));
        Ok(Declared { steps, paths: paths.collect::<Result<_, String>>()? })
    }

    /// Everything that `key`'s path finds in `value`. `None`: the key has no path.
    fn all<'v>(&self, key: &str, value: &'v Value) -> Option<Vec<&'v Value>> {
        Some(self.paths.get(key)?.query(value).all())
    }

    fn one<'v>(&self, key: &str, value: &'v Value) -> Option<&'v Value> {
        self.all(key, value)?.into_iter().next().filter(|found| !found.is_null())
    }

    /// A text, or anything else as JSON.
    pub(super) fn text(&self, key: &str, value: &Value) -> Option<String> {
        self.one(key, value).map(plain)
    }

    pub(super) fn read(&self, name: &str, state: &Value) -> Result<Reading, String> {
        let messages = match self.all("messages", state) {
            // If a path finds one list, the messages are its items.
            Some(found) => match found.as_slice() {
                [Value::Array(items)] => items.clone(),
                found => found.iter().copied().cloned().collect(),
            },
            None => {
                return Err(format!("`messages` is not declared, so the checkpoint {name:?} cannot be read"));
            }
        };
        let count = |key: &str| self.one(key, state).and_then(Value::as_i64);
        let usage = match (count("input_tokens"), count("output_tokens")) {
            (None, None) => self.one("usage", state).and_then(usage_of),
            (input, output) => Some(Usage {
                input_tokens: input.unwrap_or(0).clamp(0, i64::from(i32::MAX)),
                output_tokens: output.unwrap_or(0).clamp(0, i64::from(i32::MAX)),
                ..Usage::default()
            }),
        };
        Ok(Reading {
            messages,
            finish: self.text("finish_reason", state).as_deref().and_then(finish_of),
            usage,
            updates: self.updates(state),
            ..Reading::default()
        })
    }

    fn updates(&self, state: &Value) -> Vec<(String, Value)> {
        let found = self.all("updates", state).unwrap_or_default();
        let items = found.into_iter().flat_map(|one| match one {
            // A list of updates, unless the list itself is an update.
            Value::Array(items) if self.text("update_key", one).is_none() => items.iter().collect(),
            other => vec![other],
        });
        items
            .filter_map(|item| match self.text("update_key", item) {
                Some(key) => Some((key, self.one("update_value", item).cloned().unwrap_or(Value::Null))),
                None => update(item),
            })
            .collect()
    }

    /// Returns whether the parts of a message are declared. If not, it is in a known format.
    pub fn declares_messages(&self) -> bool {
        ["role", "content", "calls", "results"].iter().any(|key| self.paths.contains_key(*key))
    }

    /// Reads a message by the declared paths.
    ///
    /// # Errors
    /// What it lacks.
    pub fn message(&self, raw: &Value) -> Result<Said, String> {
        if !self.declares_messages() {
            return message::read(raw);
        }
        let word = match self.paths.contains_key("role") {
            true => self.text("role", raw),
            false => raw["role"].as_str().map(str::to_owned),
        };
        let role = match word.as_deref() {
            Some("user" | "human" | "system" | "developer") => Role::User,
            Some("assistant" | "ai" | "model" | "agent") => Role::Assistant,
            Some("tool" | "toolResult" | "function") => Role::Tool,
            Some(other) => return Err(format!("a message has the role {other:?}")),
            None => return Err("a message has no role where `role` looks".to_owned()),
        };
        let mut content = Vec::new();
        if let Some(text) = self.text("content", raw).filter(|text| !text.is_empty()) {
            content.push(Block::Text { text });
        }
        for call in self.all("calls", raw).unwrap_or_default() {
            let lacks = |what: &str| format!("a call has no {what}");
            content.push(Block::ToolCall(ToolCall {
                call_id: self.text("call_id", call).ok_or_else(|| lacks("id"))?.into(),
                name: self.text("call_name", call).ok_or_else(|| lacks("name"))?,
                arguments: self
                    .one("call_arguments", call)
                    .filter(|of| of.is_object())
                    .cloned()
                    .unwrap_or_else(|| json!({})),
                malformed: self.one("call_arguments", call).filter(|of| !of.is_object()).map(plain),
            }));
        }
        for result in self.all("results", raw).unwrap_or_default() {
            content.push(Block::ToolResult(ToolResult {
                call_id: self.text("result_call_id", result).ok_or("a result has no id of its call")?.into(),
                name: String::new(),
                content: self.text("result_content", result).unwrap_or_default(),
                is_error: false,
                details: None,
                output: None,
            }));
        }
        let results = content.iter().any(|block| matches!(block, Block::ToolResult(_)));
        let role = if results { Role::Tool } else { role };
        Ok(Said { role, content, rest: json!({"form": "declared"}), usage: None, finish: None })
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(paths: &[(&str, &str)]) -> Declared {
        let paths = paths.iter().map(|(key, path)| ((*key).to_owned(), (*path).to_owned())).collect();
        Declared::new(vec!["turn".to_owned()], &paths).unwrap()
    }

    #[test]
    fn a_shape_of_ones_own_is_read_by_its_paths() {
        let own = declared(&[
            ("messages", "$.out.said"),
            ("role", "$.who"),
            ("content", "$.text"),
            ("calls", "$.asks[*]"),
            ("call_id", "$.no"),
            ("call_name", "$.tool"),
            ("call_arguments", "$.with"),
            ("results", "$.got[*]"),
            ("result_call_id", "$.no"),
            ("result_content", "$.said"),
            ("input_tokens", "$.out.spent[0]"),
            ("output_tokens", "$.out.spent[1]"),
            ("updates", "$.out.facts[*]"),
            ("update_key", "$[0]"),
            ("update_value", "$[1]"),
        ]);
        let state = json!({"out": {"said": [
            {"who": "ai", "text": "Let me look.", "asks": [{"no": 7, "tool": "look", "with": {"at": "it"}}]},
            {"who": "tool", "got": [{"no": 7, "said": {"seen": true}}]}],
            "spent": [10, 3], "facts": [["name", "Ann"]]}});
        let reading = own.read("turn", &state).unwrap();
        assert_eq!(reading.usage.map(|usage| (usage.input_tokens, usage.output_tokens)), Some((10, 3)));
        assert_eq!(reading.updates, [("name".to_owned(), json!("Ann"))]);
        let said: Vec<Said> = reading.messages.iter().map(|raw| own.message(raw).unwrap()).collect();
        assert_eq!((said[0].role, said[1].role), (Role::Assistant, Role::Tool));
        let Block::ToolCall(call) = &said[0].content[1] else { panic!("no call: {said:?}") };
        assert_eq!(
            (call.call_id.as_str(), call.name.as_str(), &call.arguments),
            ("7", "look", &json!({"at": "it"}))
        );
        let Block::ToolResult(result) = &said[1].content[0] else { panic!("no result: {said:?}") };
        assert_eq!((result.call_id.as_str(), result.content.as_str()), ("7", r#"{"seen":true}"#));
    }

    #[test]
    fn a_path_that_is_none_is_named() {
        assert!(parse("$.a[").is_err());
        assert!(parse("messages").is_err());
    }
}
