//! What is said in messages, as far as a search finds it.

use crate::encryption::may_be_sealed;
use crate::json;
use serde_json::Value;
use std::collections::BTreeSet;
use wakeful_workflow::record::Block;

/// The bytes of the words of one row.
const PART_BYTES: usize = 128 * 1024;

/// The texts of these messages, a part each, and the tools that they ask for.
pub(super) fn words(read: &[(i64, String)], is_sealed: bool) -> (Vec<String>, Vec<String>) {
    let (mut parts, mut tools) = (Vec::new(), BTreeSet::new());
    let mut part = String::new();
    for (_, content) in read {
        let mut add = |text: &str| {
            // What is encrypted is not searched: the index would be the texts in clear.
            if is_sealed && may_be_sealed(text) {
                return;
            }
            part.push_str(&text.replace('\0', " "));
            part.push('\n');
        };
        // A long message was cut, so it is not JSON any more. Its words are words all the same.
        let Ok(blocks) = json::from_text::<Vec<Block>>("message", content) else {
            add(&content.replace("\\n", " ").replace("\\t", " "));
            continue;
        };
        for block in blocks {
            match block {
                Block::Text { text } => add(&text),
                Block::ToolCall(call) => {
                    add(&call.name);
                    strings(&call.arguments, &mut add);
                    tools.insert(call.name);
                }
                Block::ToolResult(result) => add(&result.content),
                Block::Provider { .. } => {}
            }
        }
        if part.len() >= PART_BYTES {
            parts.push(std::mem::take(&mut part));
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    (parts, tools.into_iter().map(|name| name.replace('\0', " ")).collect())
}

/// The texts and numbers of a call's arguments.
fn strings(value: &Value, add: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => add(text),
        Value::Number(number) => add(&number.to_string()),
        Value::Array(values) => values.iter().for_each(|value| strings(value, add)),
        Value::Object(fields) => fields.values().for_each(|value| strings(value, add)),
        Value::Null | Value::Bool(_) => {}
    }
}
