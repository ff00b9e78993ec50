//! Anthropic's Messages API, as documented at <https://docs.claude.com/en/api/messages>.

use super::repair::{self, Dialect};
use super::{Repairs, Request};
use crate::context::{Context, Message};
use crate::record::{Block, Role, ToolResult};
use serde_json::{Map, Value, json};

/// The part of a model's name before the slash, and of [`Block::Provider`]'s `provider`.
pub const PROVIDER: &str = "anthropic";

/// Settings of a request, in addition to the context.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The model's name without the provider.
    pub model: String,
    /// Output tokens at most. The protocol demands a number.
    pub max_tokens: u32,
    /// Mark what the provider should cache: the system prompt with the tools, and the last two user messages.
    pub cache_prompt: bool,
    /// Whether the model continues a final assistant message. Models up to 4.5 do; later ones refuse it.
    pub prefill: bool,
    /// Further fields of the body, for example `thinking` or `temperature`. They never replace a field that
    /// the projection writes.
    pub extra: Map<String, Value>,
}

impl Options {
    /// Options of `model`: the prompt is cached, nothing is prefilled.
    pub fn new(model: impl Into<String>, max_tokens: u32) -> Options {
        Options { model: model.into(), max_tokens, cache_prompt: true, prefill: false, extra: Map::new() }
    }
}

/// The streaming request for `context`. A strict server accepts it, whatever the transcript holds.
pub fn project(context: &Context, options: &Options) -> Request {
    let (context, repairs) = normal_form(context, options);
    let mut messages = messages(&context.messages);
    let mut tools: Vec<Value> = context.tools.iter().map(tool).collect();
    let mut system = Vec::new();
    if !repair::is_blank(&context.system) {
        system.push(json!({"type": "text", "text": context.system}));
    }
    if options.cache_prompt {
        mark(&mut messages, &mut tools, &mut system);
    }

    if let Some(prefill) = &context.prefill {
        // Add the prefill after the cache breakpoints, because the provider should not cache it.
        messages.push(json!({"role": "assistant", "content": [{"type": "text", "text": prefill}]}));
    }

    let mut body = options.extra.clone();
    body.insert("model".into(), options.model.as_str().into());
    body.insert("max_tokens".into(), options.max_tokens.into());
    body.insert("stream".into(), true.into());
    body.insert("messages".into(), messages.into());
    for (field, list) in [("system", system), ("tools", tools)] {
        body.remove(field);
        if !list.is_empty() {
            body.insert(field.into(), list.into());
        }
    }
    let body = repair::sorted(&Value::Object(body));
    Request { body: body.to_string().into_bytes(), repairs, prefill: context.prefill }
}

pub(super) fn normal_form(context: &Context, options: &Options) -> (Context, Repairs) {
    let dialect = Dialect {
        provider: PROVIDER,
        carries,
        max_id_bytes: 64,
        // The API merges turns of one role itself, but not every server that speaks its protocol does.
        merge_turns: true,
        prefill: options.prefill,
    };
    repair::repair(context, &dialect)
}

fn carries(role: Role, kind: &str) -> bool {
    let media = matches!(kind, "image" | "document");
    match role {
        // Accepts thinking, server tools and future kinds. Refuses raw forms of kinds that have their own
        // [`Block`], because they would escape the pairing of calls and results.
        Role::Assistant => !media && !matches!(kind, "text" | "tool_use" | "tool_result"),
        Role::User | Role::Tool => media,
        Role::System => false,
    }
}

fn tool(tool: &crate::agent::ToolDefinition) -> Value {
    let mut out = json!({"name": tool.name, "input_schema": repair::parameters(&tool.parameters)});
    if !repair::is_blank(&tool.description) {
        out["description"] = tool.description.as_str().into();
    }
    out
}

/// Joins tool messages and the user's text after them into one user message, results first.
fn messages(normal: &[Message]) -> Vec<Value> {
    let mut turns: Vec<(&'static str, Vec<Value>)> = Vec::new();
    for message in normal {
        let role = match message.role {
            Role::Assistant => "assistant",
            Role::System | Role::User | Role::Tool => "user",
        };
        let blocks = message.content.iter().map(block);
        match turns.last_mut() {
            Some((last, content)) if *last == role => content.extend(blocks),
            _ => turns.push((role, blocks.collect())),
        }
    }
    turns.into_iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
}

fn block(block: &Block) -> Value {
    match block {
        Block::Text { text } => json!({"type": "text", "text": text}),
        Block::ToolCall(call) => json!({
            "type": "tool_use",
            "id": call.call_id,
            "name": call.name,
            "input": repair::arguments(call),
        }),
        Block::ToolResult(result) => tool_result(result),
        Block::Provider { raw, .. } => raw.clone(),
    }
}

fn tool_result(result: &ToolResult) -> Value {
    let mut out = json!({
        "type": "tool_result",
        "tool_use_id": result.call_id,
        "content": repair::result_text(result),
    });
    if result.is_error {
        out["is_error"] = true.into();
    }
    out
}

/// Sets the cache breakpoints: tools, system prompt, and the last block of the last two user messages. A
/// request may have four. The older of the two user messages is where the previous request ended. A provider
/// searches back only a limited number of blocks for a cached prefix. This breakpoint lets it find the prefix
/// even if the step since then has more blocks than that.
fn mark(messages: &mut [Value], tools: &mut [Value], system: &mut [Value]) {
    let users = messages.iter_mut().rev().filter(|message| message["role"] == "user").take(2);
    let ends = users.filter_map(|message| message["content"].as_array_mut()?.last_mut());
    for block in ends.chain(tools.last_mut()).chain(system.last_mut()) {
        block["cache_control"] = json!({"type": "ephemeral"});
    }
}
