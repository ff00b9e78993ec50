//! Which parts of a row's JSON are sealed: what people and models wrote, and what tools were asked and answered.
//!
//! Types of blocks, ids of calls, names of tools, numbers and hashes stay in clear, so SQL that looks at the structure of a
//! message goes on working.

use super::seal::SEALED;
use super::token::{DataKey, Kind};
use serde_json::{Map, Value};

/// Texts.
const TEXTS: [&str; 7] = ["text", "content", "malformed", "file_name", "body", "html", "subject"];

/// Values that are sealed whole, because their inner names say something too.
const WHOLE: [&str; 2] = ["arguments", "raw"];

/// Objects with a `type` and perhaps pointers to blobs, whose other texts are sealed.
const DETAILS: &str = "details";

/// Words of operators, tools and servers in a row beside its messages: why something failed, was cancelled, or is said to have
/// happened.
const REASONS: [&str; 5] = ["error", "last_error", "reason", "cancel_reason", "result"];

/// Seals the words of a receipt, of what did not arrive, of a person's decision. Ids, statuses and addresses stay in clear.
pub(super) fn reasons(key: &DataKey, value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| reasons(key, value)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text)
                        if REASONS.contains(&name.as_str()) || TEXTS.contains(&name.as_str()) =>
                    {
                        *text = key.seal(Kind::Text, text);
                    }
                    value => reasons(key, value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Seals the words of a journal entry's payload. Two reasons are words of ours that statements look for: why a model's reply ended,
/// and of what a person was told.
pub(super) fn entry(key: &DataKey, kind: &str, payload: &mut Value) {
    let Value::Object(fields) = payload else { return };
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("reason", _) if matches!(kind, "PERSON_TOLD" | "GEN_COMPLETE") => {}
            ("reason" | "error" | "text", Value::String(text)) => *text = key.seal(Kind::Text, text),
            ("key", Value::String(text)) if kind == "context_update" => *text = key.seal(Kind::Text, text),
            ("value", value) => whole(key, value),
            _ => {}
        }
    }
}

/// Returns whether [`entry`] would seal something. The sign that stands in the place of sealed words is not sealed again.
pub(super) fn has_words(kind: &str, payload: &Value) -> bool {
    let Value::Object(fields) = payload else { return false };
    fields.iter().any(|(name, value)| match name.as_str() {
        "reason" => !matches!(kind, "PERSON_TOLD" | "GEN_COMPLETE") && value.is_string() && value != SEALED,
        "error" | "text" => value.is_string() && value != SEALED,
        "value" => !value.is_null(),
        "key" => kind == "context_update",
        _ => false,
    })
}

/// Seals the names and the values of a state: a name may have that of a file in it. The same name is sealed alike, so a commit
/// replaces each value by its name.
pub(super) fn state(key: &DataKey, state: Map<String, Value>) -> Map<String, Value> {
    let sealed = state.into_iter().map(|(name, mut value)| {
        whole(key, &mut value);
        (key.seal(Kind::Text, &name), value)
    });
    sealed.collect()
}

/// Seals what stands in the fields of `value` that hold texts.
pub(super) fn seal(key: &DataKey, value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| seal(key, value)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if TEXTS.contains(&name.as_str()) => {
                        *text = key.seal(Kind::Text, text);
                    }
                    value if WHOLE.contains(&name.as_str()) => whole(key, value),
                    value if name == DETAILS => leaves(key, value),
                    value => seal(key, value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Seals a whole value.
pub(super) fn whole(key: &DataKey, value: &mut Value) {
    if !value.is_null() {
        *value = Value::String(key.seal(Kind::Json, &value.to_string()));
    }
}

/// Seals every text except types and hashes: an erasure finds the blobs of a row by the hashes that stand in it.
pub(super) fn leaves(key: &DataKey, value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| leaves(key, value)),
        Value::Object(fields) => {
            for (name, value) in fields {
                if name != "type" || !value.is_string() {
                    leaves(key, value);
                }
            }
        }
        Value::String(text) if !is_hash(text) => *text = key.seal(Kind::Text, text),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}
