//! Redacts a bundle: replaces every text by its size and the beginning of its hash.
//!
//! The structure stays: who spoke, which tools were called, how often, how long and at what cost. Equal texts
//! stay equal, so two runs can still be compared. A short text can be guessed from its hash, so a redacted
//! bundle is not anonymous. State is redacted in the same way as the message details that produce it, so it
//! still follows from them.

use super::{CallRow, EventRow, Line, RecordRow, SessionRow};
use crate::derive::FILE_PREFIX;
use crate::prefix::Prefix;
use crate::record::{Attachment, Block, OutputPointer};
use crate::session::CallOutcome;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// A blob's new name and size, by its old name.
pub type Renamed = BTreeMap<String, (String, i64)>;

/// Redacts a row. `renamed` must contain every blob that the row refers to.
pub fn redact(line: Line, renamed: &Renamed) -> Line {
    match line {
        Line::Session(row) => Line::Session(Box::new(session(*row, renamed))),
        Line::Seed(mut row) => {
            row.content = text(&row.content);
            row.details = row.details.map(value);
            Line::Seed(row)
        }
        Line::Run(mut row) => {
            row.error = row.error.map(|error| reason(&error));
            Line::Run(row)
        }
        Line::Record(row) => Line::Record(record(row, renamed)),
        Line::Step(row) => Line::Step(row),
        Line::Event(row) => Line::Event(event(row, renamed)),
        Line::Call(row) => Line::Call(call(row)),
        Line::Delivery(mut row) => {
            row.content = value(row.content);
            row.receipt = row.receipt.map(value);
            row.resolution = row.resolution.map(resolution);
            row.last_error = row.last_error.map(|error| reason(&error));
            row.undelivered = row.undelivered.into_iter().map(missed).collect();
            Line::Delivery(row)
        }
        Line::Inbox(mut row) => {
            row.content = text(&row.content);
            row.sender = row.sender.map(|sender| text(&sender));
            row.attachments.iter_mut().for_each(|file| attachment(file, renamed));
            Line::Inbox(row)
        }
        Line::Blob(part) => Line::Blob(part),
    }
}

/// Redacts the bytes of a blob. JSON stays JSON, and a prefix keeps its tools.
pub fn blob(bytes: &[u8]) -> Vec<u8> {
    if let Ok(prefix) = serde_json::from_slice::<Prefix>(bytes) {
        return Prefix { system: text(&prefix.system), tools: prefix.tools }.blob().bytes;
    }
    match serde_json::from_slice::<Value>(bytes) {
        // A state, whose keys may name files, or one value of a state.
        Ok(Value::Object(state)) => Value::Object(self::state(state)).to_string().into_bytes(),
        Ok(other) => value(other).to_string().into_bytes(),
        Err(_) => marker(bytes).into_bytes(),
    }
}

fn session(row: SessionRow, renamed: &Renamed) -> SessionRow {
    SessionRow {
        initial_state: state(row.initial_state),
        state: state(row.state),
        error: row.error.map(|error| reason(&error)),
        cancel_reason: row.cancel_reason.map(|why| reason(&why)),
        prefix_sha256: row.prefix_sha256.map(|old| name(&old, renamed).0),
        policy: row.policy.map(policy),
        ..row
    }
}

/// Redacts participants and recipients. The names of the rules stay.
fn policy(mut policy: Map<String, Value>) -> Map<String, Value> {
    for key in ["participants", "recipients", "loop_suspicion"] {
        if let Some(list) = policy.remove(key) {
            policy.insert(key.to_owned(), value(list));
        }
    }
    if let Some(Value::Object(route)) = policy.get_mut("reply")
        && let Some(to) = route.remove("to")
    {
        route.insert("to".to_owned(), value(to));
    }
    policy
}

fn attachment(file: &mut Attachment, renamed: &Renamed) {
    let (sha256, bytes) = name(&file.sha256, renamed);
    file.file_name = text(&file.file_name);
    (file.sha256, file.bytes) = (sha256, usize::try_from(bytes).unwrap_or(0));
}

fn record(mut row: RecordRow, renamed: &Renamed) -> RecordRow {
    row.content = row.content.into_iter().map(|of| block(of, renamed)).collect();
    if let Some(files) = row.details.get("attachments").cloned()
        && let Ok(mut files) = serde_json::from_value::<Vec<Attachment>>(files)
    {
        files.iter_mut().for_each(|file| attachment(file, renamed));
        row.details.insert("attachments".to_owned(), json!(files));
    }
    row
}

fn block(block: Block, renamed: &Renamed) -> Block {
    match block {
        Block::Text { text: said } => Block::Text { text: text(&said) },
        Block::ToolCall(mut call) => {
            call.arguments = value(call.arguments);
            call.malformed = call.malformed.map(|said| text(&said));
            Block::ToolCall(call)
        }
        Block::ToolResult(mut result) => {
            result.content = text(&result.content);
            result.details = result.details.map(value);
            result.output = result.output.map(|output| {
                let (sha256, bytes) = name(&output.sha256, renamed);
                OutputPointer { sha256, bytes: usize::try_from(bytes).unwrap_or(0) }
            });
            Block::ToolResult(result)
        }
        Block::Provider { provider, raw } => Block::Provider { provider, raw: value(raw) },
    }
}

fn event(mut row: EventRow, renamed: &Renamed) -> EventRow {
    let Value::Object(payload) = &mut row.payload else { return row };
    for key in ["reason", "error", "by"] {
        // GEN_COMPLETE's reason is one of Wakeful's own words.
        if let Some(Value::String(why)) = payload.get_mut(key)
            && row.kind != "GEN_COMPLETE"
        {
            *why = reason(why);
        }
    }
    match row.kind.as_str() {
        "DELIVERY_BOUNCED" => {
            if let Some(Value::String(recipient)) = payload.get_mut("recipient") {
                *recipient = text(recipient);
            }
        }
        "context_update" => {
            if let Some(Value::String(key)) = payload.get_mut("key") {
                *key = state_key(key);
            }
            if let Some(inline) = payload.remove("value") {
                payload.insert("value".to_owned(), value(inline));
            }
            if let Some(Value::String(old)) = payload.get("value_sha256") {
                let (sha256, bytes) = name(old, renamed);
                payload.insert("value_sha256".to_owned(), json!(sha256));
                payload.insert("bytes".to_owned(), json!(bytes));
            }
        }
        "TOOL_RESULT" => {
            if let Some(Value::String(old)) = payload.get("output_sha256") {
                payload.insert("output_sha256".to_owned(), json!(name(old, renamed).0));
            }
        }
        "checkpoint" => {
            if let Some(Value::String(old)) = payload.get("state_sha256") {
                payload.insert("state_sha256".to_owned(), json!(name(old, renamed).0));
            }
        }
        _ => {}
    }
    row
}

fn call(row: CallRow) -> CallRow {
    CallRow {
        outcome: row.outcome.map(|outcome| CallOutcome {
            content: text(&outcome.content),
            is_error: outcome.is_error,
            details: outcome.details.map(value),
        }),
        receipt: row.receipt.map(value),
        resolution: row.resolution.map(resolution),
        ..row
    }
}

/// A person's decision. Keeps the outcome and the id of the run that continued.
fn resolution(decision: Value) -> Value {
    match decision {
        Value::Object(fields) => {
            let kept = |key: &str| key == "outcome" || key == "run_id";
            fields
                .into_iter()
                .map(|(key, of)| if kept(&key) { (key, of) } else { (key, value(of)) })
                .collect()
        }
        other => value(other),
    }
}

/// A recipient that a delivery did not reach. Keeps `how` and the status code.
fn missed(of: Value) -> Value {
    match of {
        Value::Object(fields) => {
            let kept = |key: &str| key == "how" || key == "status";
            fields
                .into_iter()
                .map(|(key, of)| if kept(&key) { (key, of) } else { (key, value(of)) })
                .collect()
        }
        other => value(other),
    }
}

fn state(state: Map<String, Value>) -> Map<String, Value> {
    state.into_iter().map(|(key, of)| (state_key(&key), value(of))).collect()
}

/// Redacts the path in a key in the same way as the path in the details.
fn state_key(key: &str) -> String {
    match key.strip_prefix(FILE_PREFIX) {
        Some(path) => format!("{FILE_PREFIX}{}", text(path)),
        None => key.to_owned(),
    }
}

/// Redacts every text in a value, except those under the key `type`.
fn value(of: Value) -> Value {
    match of {
        Value::String(said) => Value::String(text(&said)),
        Value::Array(items) => items.into_iter().map(value).collect(),
        Value::Object(fields) => fields
            .into_iter()
            .map(|(key, of)| if key == "type" && of.is_string() { (key, of) } else { (key, value(of)) })
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) => of,
    }
}

/// Why something ended. Keeps the words that programs look for.
fn reason(why: &str) -> String {
    if matches!(why, "cancelled" | "archived" | "terminated" | "healed" | "resolved") {
        why.to_owned()
    } else {
        text(why)
    }
}

fn text(said: &str) -> String {
    if said.is_empty() { String::new() } else { marker(said.as_bytes()) }
}

fn marker(bytes: &[u8]) -> String {
    let hash = hex::encode(Sha256::digest(bytes));
    format!("[redacted: {} bytes, sha256 {}]", bytes.len(), &hash[..16])
}

fn name(old: &str, renamed: &Renamed) -> (String, i64) {
    renamed.get(old).cloned().unwrap_or_else(|| (old.to_owned(), 0))
}
