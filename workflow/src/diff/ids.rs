//! Replaces Wakeful's own ids by what they stand for. Two sessions never share an id, and that must not count
//! as a difference.

use super::side::Side;
use crate::id::CallId;
use crate::record::{Block, Record, ToolResult};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;

/// Minimum length of an id within a text. A shorter one may be an ordinary word, so it counts as an id only
/// in a field that always holds an id.
const TELLING: usize = 8;

/// The ids of one side, and what they stand for.
pub(super) struct Ids<'a> {
    calls: HashMap<&'a str, String>,
    others: HashMap<&'a str, &'static str>,
}

impl<'a> Ids<'a> {
    /// Treats all calls of `side` as the same. Used to pair turns.
    pub fn blind(side: &'a Side) -> Ids<'a> {
        let mut ids = Ids::of(side);
        let calls = side.records.iter().flat_map(Record::tool_calls);
        ids.calls = calls.map(|call| (call.call_id.as_str(), "call".to_owned())).collect();
        ids
    }

    /// Contains no calls yet; [`Ids::call`] adds them.
    pub fn of(side: &'a Side) -> Ids<'a> {
        let mut others = HashMap::from([(side.session_id.as_str(), "session")]);
        others.extend(side.records.iter().map(|record| (record.run_id.as_str(), "run")));
        Ids { calls: HashMap::new(), others }
    }

    pub fn call(&mut self, call_id: &'a CallId, stands_for: String) {
        self.calls.insert(call_id.as_str(), stands_for);
    }

    /// The meaning of a call id in a field that always holds a call id.
    fn call_id(&self, id: &str) -> String {
        self.calls
            .get(id)
            .map_or_else(|| "\u{1}no call".to_owned(), |stands_for| format!("\u{1}{stands_for}"))
    }

    /// The meaning of a word, if it is one of Wakeful's ids.
    pub fn word(&self, word: &str) -> Option<&str> {
        if word.len() < TELLING {
            return None;
        }
        self.calls.get(word).map(String::as_str).or_else(|| self.others.get(word).copied())
    }

    /// `text` with each id replaced by its meaning.
    pub fn text<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut read = String::new();
        let mut kept = 0;
        for (start, word) in words(text) {
            if let Some(stands_for) = self.word(word) {
                read.push_str(&text[kept..start]);
                // Marks a replaced id. A transcript hardly ever contains U+0001.
                read.push('\u{1}');
                read.push_str(stands_for);
                kept = start + word.len();
            }
        }
        if kept == 0 {
            return Cow::Borrowed(text);
        }
        read.push_str(&text[kept..]);
        Cow::Owned(read)
    }

    /// `value` with each id in its strings and keys replaced by its meaning.
    pub fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text).into_owned()),
            Value::Array(items) => Value::Array(items.iter().map(|item| self.value(item)).collect()),
            Value::Object(map) => Value::Object(
                map.iter().map(|(key, value)| (self.text(key).into_owned(), self.value(value))).collect(),
            ),
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    /// A key of the state. Replaces a call id after the slash even if the id is short.
    pub fn key(&self, key: &str) -> String {
        match key.split_once('/') {
            Some((prefix, id)) if self.calls.contains_key(id) => format!("{prefix}/{}", self.call_id(id)),
            Some(_) | None => self.text(key).into_owned(),
        }
    }

    /// The parts of `record` that count, with each id replaced by its meaning.
    pub fn record(&self, record: &Record) -> Value {
        let content: Vec<Value> = record
            .content
            .iter()
            .map(|block| match block {
                Block::Text { text } => Value::from(self.text(text)),
                Block::ToolCall(call) => Value::Array(vec![
                    self.call_id(call.call_id.as_str()).into(),
                    call.name.as_str().into(),
                    self.value(&call.arguments),
                    call.malformed.as_deref().into(),
                ]),
                Block::ToolResult(result) => self.result(result),
                Block::Provider { provider, raw } => {
                    Value::Object(Map::from_iter([(provider.clone(), self.value(raw))]))
                }
            })
            .collect();
        Value::Array(vec![
            record.role.as_str().into(),
            content.into(),
            record.internal.into(),
            self.value(&details(record)),
        ])
    }

    fn result(&self, result: &ToolResult) -> Value {
        Value::Array(vec![
            self.call_id(result.call_id.as_str()).into(),
            result.name.as_str().into(),
            self.text(&result.content).into(),
            result.is_error.into(),
            result.details.as_ref().map_or(Value::Null, |details| self.value(details)),
        ])
    }
}

/// A message's details without usage, inbox id and origin.
fn details(record: &Record) -> Value {
    let Ok(Value::Object(mut details)) = serde_json::to_value(&record.details) else {
        return Value::Null;
    };
    details.retain(|key, _| !matches!(key.as_str(), "usage" | "inbox_id" | "origin_message_id"));
    Value::Object(details)
}

/// The words of `text` that could be ids, with where they begin.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let in_id = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + text[at..].find(in_id)?;
        let rest = &text[start..];
        let end = rest.find(|c| !in_id(c)).unwrap_or(rest.len());
        at = start + end;
        Some((start, &rest[..end]))
    })
}
