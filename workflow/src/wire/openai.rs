//! OpenAI's Chat Completions, as documented at <https://platform.openai.com/docs/api-reference/chat>, and the many
//! servers that speak the same.

use super::repair::{self, Dialect, Turns};
use super::{End, Frame, Protocol, Repairs, Request, Transcript};
use crate::agent::ToolDefinition;
use crate::context::{Context, Message};
use crate::record::{Block, Role, ToolCall, ToolResult};
use serde_json::{Map, Value, json};

/// The part of a model's name before the slash, and of [`Block::Provider`]'s `provider`.
pub const PROVIDER: &str = "openai";

/// Settings of a request, in addition to the context.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The model's name without the provider.
    pub model: String,
    /// Output tokens at most.
    pub max_tokens: u32,
    /// Send the limit as `max_tokens`, which older servers expect, and not as `max_completion_tokens`.
    pub legacy_max_tokens: bool,
    /// Merge consecutive turns of one role: chat templates of local models often demand alternation.
    pub merge_turns: bool,
    /// Further fields of the body, for example `reasoning_effort`. They never replace a field that the
    /// projection writes.
    pub extra: Map<String, Value>,
}

impl Options {
    /// Options of `model` at the official API.
    pub fn new(model: impl Into<String>, max_tokens: u32) -> Options {
        Options {
            model: model.into(),
            max_tokens,
            legacy_max_tokens: false,
            merge_turns: false,
            extra: Map::new(),
        }
    }
}

/// The streaming request for `context`. A strict server accepts it, whatever the transcript holds.
pub fn project(context: &Context, options: &Options) -> Request {
    Request::of(options, context)
}

impl Protocol for Options {
    fn transcript(&self, system: &str) -> Box<dyn Transcript> {
        Box::new(Messages { turns: Turns::new(self.dialect(), system), begun: false })
    }

    fn frame(&self, _: &str, tools: &[ToolDefinition]) -> Frame {
        let mut repairs = Repairs::default();
        let tools: Vec<Value> = repair::tools(tools, &mut repairs).iter().map(tool).collect();
        let mut body = self.extra.clone();
        let limit = if self.legacy_max_tokens { "max_tokens" } else { "max_completion_tokens" };
        body.insert("model".into(), self.model.as_str().into());
        body.insert(limit.into(), self.max_tokens.into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        body.remove("tools");
        if !tools.is_empty() {
            body.insert("tools".into(), tools.into());
        }
        Frame::of(body, repairs)
    }
}

impl Options {
    fn dialect(&self) -> Dialect {
        Dialect {
            provider: PROVIDER,
            carries,
            max_id_bytes: 40,
            merge_turns: self.merge_turns,
            // The protocol has no prefill: it treats a final assistant message as a complete turn.
            prefill: false,
        }
    }
}

/// The request's messages. The first one is the system prompt, if there is one.
struct Messages {
    turns: Turns,
    /// Whether a message was given out.
    begun: bool,
}

impl Messages {
    fn give(&self, normal: &[Message], out: &mut Vec<Vec<u8>>) {
        if !self.begun && !repair::is_blank(self.turns.system()) {
            out.push(repair::bytes(json!({"role": "system", "content": self.turns.system()})));
        }
        out.extend(normal.iter().map(|one| repair::bytes(message(one))));
    }
}

impl Transcript for Messages {
    fn add(&mut self, message: &Message, settled: &mut Vec<Vec<u8>>) {
        self.turns.add(message);
        let normal = self.turns.settled();
        if !normal.is_empty() {
            self.give(&normal, settled);
            self.begun = true;
        }
    }

    fn end(&self, prefill: Option<&str>) -> End {
        let (normal, mut repairs) = self.turns.rest();
        let prefill = self.turns.prefill(prefill, &mut repairs);
        let mut messages = Vec::new();
        self.give(&normal, &mut messages);
        End { messages, repairs, prefill }
    }

    fn system(&self) -> &str {
        self.turns.system()
    }
}

#[cfg(test)]
pub(super) fn normal_form(context: &Context, options: &Options) -> (Context, Repairs) {
    repair::repair(context, options.dialect())
}

fn carries(role: Role, kind: &str) -> bool {
    match role {
        Role::User | Role::Tool => matches!(kind, "image_url" | "input_audio" | "file"),
        Role::Assistant => kind == "refusal",
        Role::System => false,
    }
}

fn tool(tool: &ToolDefinition) -> Value {
    let mut function = json!({"name": tool.name, "parameters": repair::parameters(&tool.parameters)});
    if !repair::is_blank(&tool.description) {
        function["description"] = tool.description.as_str().into();
    }
    json!({"type": "function", "function": function})
}

fn message(message: &Message) -> Value {
    match message.role {
        Role::Assistant => assistant(&message.content),
        Role::System | Role::User => json!({"role": "user", "content": content(&message.content)}),
        Role::Tool => tool_message(&message.content),
    }
}

fn assistant(blocks: &[Block]) -> Value {
    let calls: Vec<Value> = blocks.iter().filter_map(as_call).map(call).collect();
    let mut out = json!({"role": "assistant", "content": content(blocks)});
    if !calls.is_empty() {
        out["tool_calls"] = calls.into();
    }
    out
}

/// A string for a single text, because the oldest servers accept nothing else. Otherwise a list of parts, or
/// null if there are no parts.
fn content(blocks: &[Block]) -> Value {
    let mut parts: Vec<Value> = Vec::new();
    for block in blocks {
        match block {
            Block::Text { text } => parts.push(json!({"type": "text", "text": text})),
            Block::Provider { raw, .. } => parts.push(raw.clone()),
            Block::ToolCall(_) | Block::ToolResult(_) => {}
        }
    }
    match parts.as_slice() {
        [] => Value::Null,
        [one] if one["type"] == "text" => one["text"].clone(),
        _ => parts.into(),
    }
}

fn as_call(block: &Block) -> Option<&ToolCall> {
    match block {
        Block::ToolCall(call) => Some(call),
        Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => None,
    }
}

fn call(call: &ToolCall) -> Value {
    json!({
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": repair::arguments(call).to_string()},
    })
}

fn tool_message(blocks: &[Block]) -> Value {
    let result = blocks.iter().find_map(|block| match block {
        Block::ToolResult(result) => Some(result),
        Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => None,
    });
    match result {
        Some(result) => json!({
            "role": "tool",
            "tool_call_id": result.call_id,
            "content": result_content(result),
        }),
        // Cannot happen in normal form, where each tool message has one result.
        None => json!({"role": "user", "content": content(blocks)}),
    }
}

/// The protocol has no field for an error, so the text says it.
fn result_content(result: &ToolResult) -> String {
    let text = repair::result_text(result);
    let says_so = text.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("error"));
    if result.is_error && !says_so { format!("Error: {text}") } else { text.to_owned() }
}
