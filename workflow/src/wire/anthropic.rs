//! Anthropic's Messages API, as documented at <https://docs.claude.com/en/api/messages>.

use super::repair::{self, Dialect, Turns};
use super::{End, Frame, Protocol, Repairs, Request, Transcript};
use crate::agent::ToolDefinition;
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
    Request::of(options, context)
}

impl Protocol for Options {
    fn transcript(&self, system: &str) -> Box<dyn Transcript> {
        let turns = Turns::new(self.dialect(), system);
        Box::new(Messages { turns, joined: Vec::new(), cache_prompt: self.cache_prompt })
    }

    fn frame(&self, system: &str, tools: &[ToolDefinition]) -> Frame {
        let mut repairs = Repairs::default();
        let mut tools: Vec<Value> = repair::tools(tools, &mut repairs).iter().map(tool).collect();
        let mut system_blocks = Vec::new();
        if !repair::is_blank(system) {
            system_blocks.push(json!({"type": "text", "text": system}));
        }
        if self.cache_prompt {
            tools.last_mut().into_iter().chain(system_blocks.last_mut()).for_each(mark);
        }
        let mut body = self.extra.clone();
        body.insert("model".into(), self.model.as_str().into());
        body.insert("max_tokens".into(), self.max_tokens.into());
        body.insert("stream".into(), true.into());
        for (field, list) in [("system", system_blocks), ("tools", tools)] {
            body.remove(field);
            if !list.is_empty() {
                body.insert(field.into(), list.into());
            }
        }
        Frame::of(body, repairs)
    }
}

impl Options {
    fn dialect(&self) -> Dialect {
        Dialect {
            provider: PROVIDER,
            carries,
            max_id_bytes: 64,
            // The API merges turns of one role itself, but not every server that speaks its protocol does.
            merge_turns: true,
            prefill: self.prefill,
        }
    }
}

/// A user's or an assistant's message of the request.
#[derive(Clone)]
struct Joined {
    role: &'static str,
    blocks: Vec<Value>,
}

/// The request's messages.
struct Messages {
    turns: Turns,
    /// Those that a later message can still change: it can join the last one, and the last two of the user have
    /// breakpoints.
    joined: Vec<Joined>,
    cache_prompt: bool,
}

impl Messages {
    /// Returns how many of `joined` no later message changes.
    fn settled(&self) -> usize {
        let all_but_last = self.joined.len().saturating_sub(1);
        if !self.cache_prompt {
            return all_but_last;
        }
        let users = self.joined.iter().enumerate().filter(|(_, one)| one.role == "user");
        users.map(|(at, _)| at).rev().nth(1).unwrap_or(0).min(all_but_last)
    }
}

impl Transcript for Messages {
    fn add(&mut self, message: &Message, settled: &mut Vec<Vec<u8>>) {
        self.turns.add(message);
        join(&mut self.joined, &self.turns.settled());
        let count = self.settled();
        settled.extend(self.joined.drain(..count).map(|one| repair::bytes(one.value())));
    }

    fn end(&self, prefill: Option<&str>) -> End {
        let (normal, mut repairs) = self.turns.rest();
        let prefill = self.turns.prefill(prefill, &mut repairs);
        let mut joined = self.joined.clone();
        join(&mut joined, &normal);
        if self.cache_prompt {
            // The older of the two user messages is where the previous request ended. A provider searches back
            // only a limited number of blocks for a cached prefix. This breakpoint lets it find the prefix even
            // if the step since then has more blocks than that.
            let users = joined.iter_mut().rev().filter(|one| one.role == "user").take(2);
            users.filter_map(|one| one.blocks.last_mut()).for_each(mark);
        }
        if let Some(prefill) = &prefill {
            // Add the prefill after the cache breakpoints, because the provider should not cache it.
            let blocks = vec![json!({"type": "text", "text": prefill})];
            joined.push(Joined { role: "assistant", blocks });
        }
        let messages = joined.into_iter().map(|one| repair::bytes(one.value())).collect();
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
    let media = matches!(kind, "image" | "document");
    match role {
        // Accepts thinking, server tools and future kinds. Refuses raw forms of kinds that have their own
        // [`Block`], because they would escape the pairing of calls and results.
        Role::Assistant => !media && !matches!(kind, "text" | "tool_use" | "tool_result"),
        Role::User | Role::Tool => media,
        Role::System => false,
    }
}

fn tool(tool: &ToolDefinition) -> Value {
    let mut out = json!({"name": tool.name, "input_schema": repair::parameters(&tool.parameters)});
    if !repair::is_blank(&tool.description) {
        out["description"] = tool.description.as_str().into();
    }
    out
}

/// Joins tool messages and the user's text after them into one user message, results first.
fn join(turns: &mut Vec<Joined>, normal: &[Message]) {
    for message in normal {
        let role = match message.role {
            Role::Assistant => "assistant",
            Role::System | Role::User | Role::Tool => "user",
        };
        let blocks = message.content.iter().map(block);
        match turns.last_mut() {
            Some(last) if last.role == role => last.blocks.extend(blocks),
            _ => turns.push(Joined { role, blocks: blocks.collect() }),
        }
    }
}

impl Joined {
    fn value(self) -> Value {
        json!({"role": self.role, "content": self.blocks})
    }
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

/// Sets a cache breakpoint. A request may have four: tools, system prompt, and the last block of the last two user
/// messages.
fn mark(block: &mut Value) {
    block["cache_control"] = json!({"type": "ephemeral"});
}
