//! Ids that are ours, read as what they stand for: two sessions never share one, and that is no difference.

use super::side::Side;
use crate::id::CallId;
use crate::record::{Block, Record, ToolResult};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;

/// Shorter ids are words that a text may hold by chance: they are read as ids only where nothing else can stand.
const TELLING: usize = 8;

/// The ids of one side and what they stand for.
pub(super) struct Ids<'a> {
    calls: HashMap<&'a str, String>,
    others: HashMap<&'a str, &'static str>,
}

impl<'a> Ids<'a> {
    /// Every call of `side` alike: for finding turns that may stand side by side.
    pub fn blind(side: &'a Side) -> Ids<'a> {
        let mut ids = Ids::of(side);
        let calls = side.records.iter().flat_map(Record::tool_calls);
        ids.calls = calls.map(|call| (call.call_id.as_str(), "call".to_owned())).collect();
        ids
    }

    /// No call yet: [`Ids::call`] says what each stands for.
    pub fn of(side: &'a Side) -> Ids<'a> {
        let mut others = HashMap::from([(side.session_id.as_str(), "session")]);
        others.extend(side.records.iter().map(|record| (record.run_id.as_str(), "run")));
        Ids { calls: HashMap::new(), others }
    }

    pub fn call(&mut self, call_id: &'a CallId, stands_for: String) {
        self.calls.insert(call_id.as_str(), stands_for);
    }

    /// What a call's id stands for, where nothing but such an id can stand.
    fn call_id(&self, id: &str) -> String {
        self.calls
            .get(id)
            .map_or_else(|| "\u{1}no call".to_owned(), |stands_for| format!("\u{1}{stands_for}"))
    }

    /// What a word stands for, if it is one of ours.
    pub fn word(&self, word: &str) -> Option<&str> {
        if word.len() < TELLING {
            return None;
        }
        self.calls.get(word).map(String::as_str).or_else(|| self.others.get(word).copied())
    }

    /// `text` with its ids read.
    pub fn text<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut read = String::new();
        let mut kept = 0;
        for (start, word) in words(text) {
            if let Some(stands_for) = self.word(word) {
                read.push_str(&text[kept..start]);
                // No text of a transcript holds NUL (Postgres refuses it), and hardly one this.
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

    /// `value` with the ids in its strings read, keys included.
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

    /// A state's key. Those that end in a call's id are read also where the id is short.
    pub fn key(&self, key: &str) -> String {
        match key.split_once('/') {
            Some((prefix, id)) if self.calls.contains_key(id) => format!("{prefix}/{}", self.call_id(id)),
            Some(_) | None => self.text(key).into_owned(),
        }
    }

    /// Whatever of `record` counts, with its ids read.
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

/// What is known about a message, without what it cost and where it came from.
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
