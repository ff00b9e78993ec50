//! The transcript: one [`Record`] for each message, append-only, numbered within its conversation.
//!
//! Records are never rewritten. If a provider needs another shape, [`crate::wire`] changes the copy in the
//! request.
#![deny(missing_docs)]

mod block;
mod content;
mod outline;

pub use block::{Block, OutputPointer, ToolCall, ToolResult};
pub use content::Content;
pub(crate) use outline::READ_OUTPUT;
pub use outline::{Outline, Outlined};

use crate::id::RunId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Seeds only: the rendered system prompt.
    System,
    /// A person, or a program that writes to the session.
    User,
    /// The model.
    Assistant,
    /// The result of one tool call.
    Tool,
}

impl Role {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<Role> {
        Some(match word {
            "system" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            _ => return None,
        })
    }
}

/// Tokens and money of one model call. Counts are the provider's; `input_tokens` includes the cached ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Usage {
    /// Tokens of the request, the cached ones included.
    pub input_tokens: i64,
    /// Tokens of the model's reply.
    pub output_tokens: i64,
    /// Input tokens that were read from the provider's prompt cache.
    pub cached_tokens: i64,
    /// Input tokens that were written to it.
    #[serde(default)]
    pub cache_write_tokens: i64,
    /// Millionths of a dollar. Most steps cost less than a cent.
    #[serde(default)]
    pub cost_micros: i64,
}

impl Usage {
    /// Returns the sum of both. Token counts are capped at what a step's row can hold (32 bits).
    pub fn plus(&self, other: &Usage) -> Usage {
        let tokens = |one: i64, other: i64| one.saturating_add(other).min(i64::from(i32::MAX));
        Usage {
            input_tokens: tokens(self.input_tokens, other.input_tokens),
            output_tokens: tokens(self.output_tokens, other.output_tokens),
            cached_tokens: tokens(self.cached_tokens, other.cached_tokens),
            cache_write_tokens: tokens(self.cache_write_tokens, other.cache_write_tokens),
            cost_micros: self.cost_micros.saturating_add(other.cost_micros),
        }
    }
}

/// Why the model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The reply is complete.
    Stop,
    /// The model waits for the results of its calls.
    ToolCalls,
    /// The output limit was reached. The text so far is kept.
    Length,
    /// The provider withheld the rest.
    ContentFilter,
    /// A cancel cut the call off before the reply. Its usage is what was seen of it, or an estimate.
    Cancelled,
}

impl FinishReason {
    /// Returns whether the reply may end in the middle of a call's arguments.
    pub fn may_cut(self) -> bool {
        matches!(self, FinishReason::Length | FinishReason::ContentFilter)
    }

    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::Length => "length",
            FinishReason::ContentFilter => "content_filter",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// The reply of a finished model call. The step's commit turns it into a [`Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Reply {
    /// Text, calls and the provider's own blocks, in the order of the reply.
    pub content: Vec<Block>,
    /// Why the model stopped.
    pub finish_reason: FinishReason,
    /// What the call used. The engine fills in [`Usage::cost_micros`] from the configured prices.
    pub usage: Usage,
}

impl Reply {
    /// Creates the reply of a model call.
    pub fn new(content: Vec<Block>, finish_reason: FinishReason, usage: Usage) -> Reply {
        Reply { content, finish_reason, usage }
    }

    /// Returns whether the model asked for tools. Do not rely on the finish reason for this: some servers say
    /// `stop`.
    pub fn has_tool_calls(&self) -> bool {
        self.content.iter().any(|block| matches!(block, Block::ToolCall(_)))
    }

    /// Returns whether the model asked for the tool called `name`.
    pub fn calls(&self, name: &str) -> bool {
        self.content.iter().any(|block| matches!(block, Block::ToolCall(call) if call.name == name))
    }

    /// Returns whether there is nothing to keep: no tool call, and no text except white space.
    pub fn is_empty(&self) -> bool {
        !self.has_tool_calls() && text_of(&self.content).trim().is_empty()
    }
}

/// One message of the transcript.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Numbered within the conversation without gaps, after the numbers of the first session's seeds.
    pub message_number: i64,
    /// The run that wrote it.
    pub run_id: RunId,
    /// The step that committed it.
    pub step_number: i64,
    /// Who speaks.
    pub role: Role,
    /// In the order in which it was said.
    pub content: Content,
    /// Bookkeeping of the agent. The user does not see it, the model does.
    pub internal: bool,
    /// Metadata. Never sent to a model.
    pub details: Details,
}

/// A file that came with a message. Its bytes are the blob `sha256`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Attachment {
    /// The sender's name for the file. Never used as a path.
    pub file_name: String,
    /// As the sender declared it, such as `text/plain`.
    pub media_type: String,
    /// Size of the file.
    pub bytes: usize,
    /// SHA-256 of the file, in lower-case hex.
    pub sha256: String,
}

/// Metadata of a message. Never sent to a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Details {
    /// On assistant messages: the usage of the model call, until its step commits and counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// On assistant messages: why the model stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<FinishReason>,
    /// The inbox row that a user's message came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inbox_id: Option<i64>,
    /// On a user's message: the files that came with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
    /// On messages that a fork copied: the id of the original message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_message_id: Option<String>,
    /// The message summarises the messages before it. A context shows it only where a rebase points at it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub summary: bool,
    /// Wakeful wrote it, and no person: it asks the model again, because its last reply was empty.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub asks_again: bool,
}

impl Record {
    /// Returns whether the message is a summary, which needs no reply.
    pub fn is_summary(&self) -> bool {
        self.details.summary
    }

    /// Returns whether the message is a reply of the model.
    pub fn is_reply(&self) -> bool {
        self.role == Role::Assistant && !self.is_summary()
    }

    /// The plain text of the message: text blocks and tool results, joined by blank lines.
    pub fn text(&self) -> String {
        text_of(&self.content)
    }

    /// The tool calls that the message asks for, in order.
    pub fn tool_calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.content.iter().filter_map(|block| match block {
            Block::ToolCall(call) => Some(call),
            Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => None,
        })
    }

    /// The tool results that the message holds (one, as Wakeful writes them).
    pub fn tool_results(&self) -> impl Iterator<Item = &ToolResult> {
        self.content.iter().filter_map(|block| match block {
            Block::ToolResult(result) => Some(result),
            Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => None,
        })
    }
}

/// The plain text of `content`: text blocks and tool results, joined by blank lines.
pub fn text_of(content: &[Block]) -> String {
    let parts: Vec<&str> = content
        .iter()
        .filter_map(|block| match block {
            Block::Text { text } => Some(text.as_str()),
            Block::ToolResult(result) => Some(result.content.as_str()),
            Block::ToolCall(_) | Block::Provider { .. } => None,
        })
        .collect();
    parts.join("\n\n")
}

/// Replaces NUL, which Postgres text cannot hold, by U+FFFD.
pub fn without_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// How deep arrays and objects are nested in a stored value at most. It is stored within others, and `serde_json` reads 127
/// levels back, a bundle 64.
pub const DEPTH: usize = 48;

/// Returns whether arrays and objects in `value` are nested deeper than [`DEPTH`].
pub fn is_too_deep(value: &Value) -> bool {
    fn is_deeper(value: &Value, than: usize) -> bool {
        match value {
            Value::Array(items) => than == 0 || items.iter().any(|item| is_deeper(item, than - 1)),
            Value::Object(map) => than == 0 || map.values().any(|value| is_deeper(value, than - 1)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
        }
    }
    is_deeper(value, DEPTH)
}

/// A value from outside as it can be stored and read again: without NUL in any string or key, and with a note in place of what is
/// nested deeper than [`DEPTH`].
pub fn storable(value: Value) -> Value {
    fn clean(value: Value, depth: usize) -> Value {
        match value {
            Value::String(text) => Value::String(without_nul(text)),
            Value::Array(_) | Value::Object(_) if depth == DEPTH => {
                Value::String("(left out: it is nested too deep)".to_owned())
            }
            Value::Array(items) => {
                Value::Array(items.into_iter().map(|item| clean(item, depth + 1)).collect())
            }
            Value::Object(map) => Value::Object(
                map.into_iter().map(|(key, value)| (without_nul(key), clean(value, depth + 1))).collect(),
            ),
            Value::Null | Value::Bool(_) | Value::Number(_) => value,
        }
    }
    clean(value, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nested(depth: usize) -> Value {
        (1..depth).fold(Value::Array(Vec::new()), |inner, _| Value::Array(vec![inner]))
    }

    #[test]
    fn what_is_nested_too_deep_is_left_out_with_a_note() {
        assert!(!is_too_deep(&nested(DEPTH)) && is_too_deep(&nested(DEPTH + 1)));
        assert_eq!(storable(nested(DEPTH)), nested(DEPTH));
        let stored = storable(nested(100));
        assert!(!is_too_deep(&stored));
        assert!(stored.to_string().contains("nested too deep"));
    }
}
