//! Messages as a person reads them: who said what, which tools were called, and what came of it.

use crate::model::{Detail, Message};
use crate::text::{Moment, cut};
use serde_json::Value;

/// What a tool's result shows before it is opened.
const GLANCE: usize = 110;

/// One message.
pub(crate) struct Said {
    pub number: i64,
    pub step: i64,
    /// `user`, `assistant`, `tool` or `system`.
    pub role: String,
    pub at: Moment,
    pub internal: bool,
    pub blocks: Vec<Block>,
    /// A fork may begin here.
    pub is_of_user: bool,
}

pub(crate) enum Block {
    Text(String),
    Call {
        name: String,
        arguments: String,
        glance: String,
        id: String,
    },
    Result {
        name: String,
        text: String,
        glance: String,
        details: String,
        is_error: bool,
        id: String,
        /// What a rehearsal says of it: “dry: not carried out”.
        rehearsed: &'static str,
    },
    /// What only its provider reads.
    Provider(String),
}

/// The messages of a page.
pub(crate) fn said(messages: Vec<Message>) -> Vec<Said> {
    messages.into_iter().map(one).collect()
}

/// The messages of a page of this session. The results of its own calls say so if they are a rehearsal's; those of the messages
/// that a fork copied are real.
pub(crate) fn said_in(messages: Vec<Message>, of: &Detail) -> Vec<Said> {
    let mut said = said(messages);
    for block in said.iter_mut().flat_map(|message| &mut message.blocks) {
        if let Block::Result { id, rehearsed, .. } = block
            && let Some(call) = of.tool_calls.iter().find(|call| call.call_id == *id)
        {
            *rehearsed = of.session.rehearsed(call);
        }
    }
    said
}

fn one(message: Message) -> Said {
    let mut blocks: Vec<Block> = message
        .content
        .as_array()
        .map(|blocks| blocks.iter().filter_map(block).collect())
        .unwrap_or_default();
    if blocks.is_empty() && !message.text.is_empty() {
        blocks.push(Block::Text(message.text));
    }
    Said {
        number: message.message_number,
        step: message.step_number,
        is_of_user: message.role == "user",
        role: message.role,
        at: message.created_at,
        internal: message.internal,
        blocks,
    }
}

fn block(block: &Value) -> Option<Block> {
    let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
    match block["type"].as_str()? {
        "text" => Some(Block::Text(text("text")))
            .filter(|block| !matches!(block, Block::Text(text) if text.is_empty())),
        "tool_call" => {
            let arguments = &block["arguments"];
            Some(Block::Call {
                name: text("name"),
                glance: glance(arguments),
                arguments: format!("{arguments:#}"),
                id: text("call_id"),
            })
        }
        "tool_result" => {
            let content = text("content");
            let details = &block["details"];
            Some(Block::Result {
                name: text("name"),
                glance: cut(&content, GLANCE),
                text: content,
                details: if details.is_null() { String::new() } else { format!("{details:#}") },
                is_error: block["is_error"] == true,
                id: text("call_id"),
                rehearsed: "",
            })
        }
        kind => Some(Block::Provider(format!("{kind}: {:#}", block["raw"]))),
    }
}

/// Arguments on one line.
fn glance(arguments: &Value) -> String {
    let Value::Object(fields) = arguments else { return cut(&arguments.to_string(), GLANCE) };
    let pairs = fields.iter().map(|(name, value)| match value {
        Value::String(text) => format!("{name}: {}", cut(text, 48)),
        other => format!("{name}: {other}"),
    });
    cut(&pairs.collect::<Vec<_>>().join(", "), GLANCE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_message_has_its_blocks_in_their_order() {
        let message: Message = serde_json::from_value(json!({
            "message_number": 3, "step_number": 1, "role": "assistant", "text": "I look.",
            "created_at": "2026-11-23T07:58:24Z",
            "content": [{"type": "text", "text": "I look."}, {"type": "text", "text": ""},
                {"type": "tool_call", "call_id": "c", "name": "read_file", "arguments": {"path": "a", "n": 3}},
                {"type": "tool_result", "call_id": "c", "name": "read_file", "content": "no\nfile", "is_error": true},
                {"type": "provider", "provider": "x", "raw": {"a": 1}}],
        }))
        .unwrap();
        let said = said(vec![message]).remove(0);
        let shown: Vec<String> = said
            .blocks
            .iter()
            .map(|block| match block {
                Block::Text(text) => format!("text {text}"),
                Block::Call { name, glance, .. } => format!("call {name} {glance}"),
                Block::Result { glance, is_error, .. } => format!("result {glance} {is_error}"),
                Block::Provider(text) => format!("provider {}", cut(text, 20)),
            })
            .collect();
        assert_eq!(
            shown,
            [
                "text I look.",
                "call read_file n: 3, path: a",
                "result no file true",
                "provider provider: { \"a\": 1 }"
            ]
        );
    }
}
