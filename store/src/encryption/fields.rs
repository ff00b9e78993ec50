//! Which parts of a row's JSON are sealed: what people and models wrote, and what tools were asked and answered.
//!
//! Types of blocks, ids of calls, names of tools, numbers and hashes stay in clear, so SQL that looks at the structure of a
//! message goes on working.

use super::token::{DataKey, Kind};
use serde_json::Value;

/// Texts.
const TEXTS: [&str; 7] = ["text", "content", "malformed", "file_name", "body", "html", "subject"];

/// Values that are sealed whole, because their inner names say something too.
const WHOLE: [&str; 2] = ["arguments", "raw"];

/// Objects with a `type` and perhaps pointers to blobs, whose other texts are sealed.
const DETAILS: &str = "details";

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
fn leaves(key: &DataKey, value: &mut Value) {
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
