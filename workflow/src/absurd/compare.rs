//! Compares the messages of a task's checkpoints with those of its session.
//!
//! Both sides become canonical JSON, with sorted keys and without spaces, and its hash. [`super::message::restore`] turns a
//! record back into the format of the checkpoint, whose own message is taken as it is. So whatever the mapping lost, changed
//! or moved shows as a difference.

use super::message::restore;
use super::rows::said_of;
use super::shape::Shape;
use crate::record::{Block, Role};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use similar::{Algorithm, DiffOp, capture_diff_slices};

/// Characters of a message that a difference shows.
const SHOWN: usize = 400;

/// A message as the comparison has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canonical {
    /// Where it is: a checkpoint's name, or a message number.
    pub place: String,
    pub sha256: String,
    /// The beginning of the canonical text.
    pub shown: String,
    /// Ids of calls and results, in order.
    pub call_ids: Vec<String>,
}

/// One difference, with both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `missing`, `extra`, `differs`, `order`, `call ids`, `count`, or the name of a part of the state.
    pub what: String,
    pub in_absurd: Option<String>,
    pub here: Option<String>,
}

/// The canonical text of a value. `serde_json` keeps the keys of an object sorted.
pub fn canonical(value: &Value) -> String {
    value.to_string()
}

fn of(place: String, value: &Value, call_ids: Vec<String>) -> Canonical {
    let text = canonical(value);
    let shown = match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.clone(),
    };
    Canonical { place, sha256: hex::encode(Sha256::digest(text.as_bytes())), shown, call_ids }
}

/// A message of a checkpoint.
///
/// # Errors
/// Why it is not a message, as a text for people.
pub fn in_absurd(shape: &Shape, checkpoint: &str, raw: &Value) -> Result<Canonical, String> {
    let said = said_of(shape, raw)?;
    let ids = ids_of(&said.content);
    let declared = said.rest["form"] == "declared";
    let value = if declared { projected(said.role, &said.content) } else { raw.clone() };
    Ok(of(checkpoint.to_owned(), &value, ids))
}

/// A message that the session hydrates to. `origin`: the part of its details that says where it comes from.
pub fn here(number: i64, role: Role, content: &[Block], origin: &Value) -> Canonical {
    let value = match origin["form"].as_str() {
        Some("declared") => Ok(projected(role, content)),
        Some(_) => restore(content, origin),
        None => Err("it does not say where it comes from".to_owned()),
    };
    let value = value.unwrap_or_else(|why| json!({"unreadable": why, "content": content}));
    of(format!("message {number}"), &value, ids_of(content))
}

/// What a declared shape says of a message.
fn projected(role: Role, content: &[Block]) -> Value {
    let parts: Vec<Value> = content
        .iter()
        .map(|block| match block {
            Block::Text { text } => json!({"text": text}),
            Block::ToolCall(call) => {
                json!({"call": call.call_id, "name": call.name, "with": call.arguments, "malformed": call.malformed})
            }
            Block::ToolResult(result) => json!({"result": result.call_id, "content": result.content}),
            Block::Provider { raw, .. } => json!({"raw": raw}),
        })
        .collect();
    json!({"role": role, "parts": parts})
}

fn ids_of(content: &[Block]) -> Vec<String> {
    let id = |block: &Block| match block {
        Block::ToolCall(call) => Some(call.call_id.to_string()),
        Block::ToolResult(result) => Some(result.call_id.to_string()),
        Block::Text { .. } | Block::Provider { .. } => None,
    };
    content.iter().filter_map(id).collect()
}

/// Compares the messages: count, order, each by its hash, and the ids of calls.
pub fn messages(theirs: &[Canonical], ours: &[Canonical]) -> Vec<Difference> {
    let mut differences = Vec::new();
    if theirs.len() != ours.len() {
        differences.push(Difference {
            what: "count".to_owned(),
            in_absurd: Some(theirs.len().to_string()),
            here: Some(ours.len().to_string()),
        });
    }
    let hashes = |side: &[Canonical]| side.iter().map(|one| one.sha256.clone()).collect::<Vec<_>>();
    let (a, b) = (hashes(theirs), hashes(ours));
    if a == b {
        return differences;
    }
    let (mut sorted_a, mut sorted_b) = (a.clone(), b.clone());
    sorted_a.sort();
    sorted_b.sort();
    let moved = sorted_a == sorted_b;
    for op in capture_diff_slices(Algorithm::Myers, &a, &b) {
        let (DiffOp::Delete { .. } | DiffOp::Insert { .. } | DiffOp::Replace { .. }) = op else { continue };
        let (old, new) = (op.old_range(), op.new_range());
        for at in 0..old.len().max(new.len()) {
            let (their, our) = (
                theirs.get(old.start + at).filter(|_| at < old.len()),
                ours.get(new.start + at).filter(|_| at < new.len()),
            );
            let what = match (their, our) {
                _ if moved => "order",
                (Some(their), Some(our)) if their.call_ids != our.call_ids => "call ids",
                (Some(_), Some(_)) => "differs",
                (Some(_), None) => "missing",
                (None, Some(_) | None) => "extra",
            };
            let side = |one: &Canonical| format!("{}: {}", one.place, one.shown);
            differences.push(Difference {
                what: what.to_owned(),
                in_absurd: their.map(side),
                here: our.map(side),
            });
        }
    }
    differences
}

/// Compares two values of the state, or of the ledger.
pub fn value(what: &str, in_absurd: &Value, here: &Value) -> Option<Difference> {
    if crate::state::same_value(in_absurd, here) {
        return None;
    }
    let side = |value: &Value| Some(of(String::new(), value, Vec::new()).shown);
    Some(Difference { what: what.to_owned(), in_absurd: side(in_absurd), here: side(here) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(texts: &[&str]) -> Vec<Canonical> {
        texts
            .iter()
            .map(|text| of((*text).to_owned(), &json!({"role": "user", "content": text}), Vec::new()))
            .collect()
    }

    fn found(theirs: &[&str], ours: &[&str]) -> Vec<String> {
        messages(&side(theirs), &side(ours)).into_iter().map(|one| one.what).collect()
    }

    #[test]
    fn each_kind_of_damage_is_named() {
        assert!(found(&["a", "b", "c"], &["a", "b", "c"]).is_empty());
        assert_eq!(found(&["a", "b", "c"], &["a", "c"]), ["count", "missing"]);
        assert_eq!(found(&["a", "c"], &["a", "b", "c"]), ["count", "extra"]);
        assert!(found(&["a", "b", "c"], &["a", "c", "b"]).iter().all(|what| what == "order"));
        assert_eq!(found(&["a", "b"], &["a", "x"]), ["differs"]);
    }

    #[test]
    fn another_call_id_is_named_as_such() {
        let raw = |id: &str| json!({"role": "assistant", "content": [{"type": "tool-call", "toolCallId": id, "toolName": "t", "input": {}}]});
        let theirs = in_absurd(&Shape::NewMessages, "agent-loop", &raw("a")).unwrap();
        let said = said_of(&Shape::NewMessages, &raw("a")).unwrap();
        assert!(
            messages(std::slice::from_ref(&theirs), &[here(1, said.role, &said.content, &said.rest)])
                .is_empty()
        );
        let other = said_of(&Shape::NewMessages, &raw("b")).unwrap();
        let differences = messages(&[theirs], &[here(1, other.role, &other.content, &said.rest)]);
        assert_eq!(differences[0].what, "call ids");
    }
}
