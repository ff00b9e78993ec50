//! The transcript: one [`Record`] a message, append-only, numbered within its conversation.
//!
//! Records say what was said and nothing else. They are never rewritten: what a provider needs to be different
//! is made different on the request's copy, in [`crate::wire`].

use crate::id::{CallId, RunId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Seeds only: the rendered system prompt.
    System,
    User,
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

/// One part of a message. The order of blocks is meaning: providers reject thinking that moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    Text {
        text: String,
    },
    ToolCall(ToolCall),
    ToolResult(ToolResult),
    /// A block of one provider (signed thinking, server tool use): sent back verbatim to that provider and dropped for any
    /// other. `provider` is the part of the model's name before the slash.
    Provider {
        provider: String,
        raw: Value,
    },
}

/// What the model asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    pub call_id: CallId,
    pub name: String,
    /// Always an object. Empty where the model's text was no JSON object; then [`ToolCall::malformed`] has it.
    pub arguments: Value,
    /// The raw argument text when it did not parse: the call is answered with an error and never runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub malformed: Option<String>,
}

/// What the model is told about one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    pub call_id: CallId,
    pub name: String,
    pub content: String,
    #[serde(default)]
    pub is_error: bool,
    /// For [`mod@crate::derive`] and for operators, never for the model: an object with a `type`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
    /// Where the whole output is, when `content` is only its beginning and its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<OutputPointer>,
}

/// The blob that holds a tool's whole output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputPointer {
    pub sha256: String,
    pub bytes: usize,
}

/// Tokens and money of one model call. Counts are the provider's; `input_tokens` includes the cached ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub input_tokens: i64,
    pub output_tokens: i64,
    /// Input tokens that were read from the provider's prompt cache.
    pub cached_tokens: i64,
    /// Input tokens that were written to it.
    #[serde(default)]
    pub cache_write_tokens: i64,
    /// Millionths of a dollar; whole cents would lose most steps (they cost less than one).
    #[serde(default)]
    pub cost_micros: i64,
}

/// Why the model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    ToolCalls,
    /// The output limit was reached: the text is kept as it is.
    Length,
    /// The provider withheld the rest.
    ContentFilter,
}

impl FinishReason {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::Length => "length",
            FinishReason::ContentFilter => "content_filter",
        }
    }
}

/// A finished model call: what [`crate::record::Record`] is made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    pub content: Vec<Block>,
    pub finish_reason: FinishReason,
    pub usage: Usage,
}

impl Reply {
    /// Whether the model asked for tools, whatever its finish reason says (some servers say `stop`).
    pub fn has_tool_calls(&self) -> bool {
        self.content.iter().any(|block| matches!(block, Block::ToolCall(_)))
    }

    /// Whether there is anything to keep: text that is not blank, or a tool call.
    pub fn is_empty(&self) -> bool {
        !self.has_tool_calls() && text_of(&self.content).trim().is_empty()
    }
}

/// One message of the transcript.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Dense within the conversation, from `seed_count + 1` on.
    pub message_number: i64,
    pub run_id: RunId,
    pub step_number: i64,
    pub role: Role,
    pub content: Vec<Block>,
    /// Bookkeeping of the agent that its user is not shown; the model still sees it.
    pub internal: bool,
    pub details: Details,
}

/// A file that came with a message: a pointer, for its bytes are a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// As the sender named it. Never a path of ours.
    pub file_name: String,
    pub media_type: String,
    pub bytes: usize,
    pub sha256: String,
}

/// Metadata of a message. Never sent to a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Details {
    /// On assistant messages: what the call cost, kept here until its step commits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<FinishReason>,
    /// The inbox row that a user's message came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inbox_id: Option<i64>,
    /// On a user's message: the files that came with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
    /// On messages that a fork copied: the id under which it was first said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_message_id: Option<String>,
    /// The message summarises the messages before it. A context shows it only where a rebase points at it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub summary: bool,
}

impl Record {
    /// Whether it is a summary, which needs no answer.
    pub fn is_summary(&self) -> bool {
        self.details.summary
    }

    /// Whether it is an answer of the model.
    pub fn is_answer(&self) -> bool {
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

/// Replaces NUL in every string inside `value`, keys included.
pub fn value_without_nul(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(without_nul(text)),
        Value::Array(items) => Value::Array(items.into_iter().map(value_without_nul).collect()),
        Value::Object(map) => Value::Object(
            map.into_iter().map(|(key, value)| (without_nul(key), value_without_nul(value))).collect(),
        ),
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
    }
}
