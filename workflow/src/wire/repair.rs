//! Turns any context into one that every protocol can render block by block.
//!
//! The result is in normal form:
//! - It starts with a user message and ends with a message for the model to reply to.
//! - One tool message per call directly follows each assistant message with calls.
//! - Ids are unique and within the protocol's alphabet.
//! - No text is blank.
//!
//! A context in normal form comes out unchanged.
//!
//! A repair looks only at earlier messages, except for the results of an open turn. So a transcript that only
//! grows gives a request that only grows. Prompt caches of providers rely on that.

use super::Repairs;
use crate::agent::ToolDefinition;
#[cfg(test)]
use crate::context::Context;
use crate::context::Message;
use crate::id::CallId;
use crate::record::{Block, Role, ToolCall, ToolResult};
use serde_json::Value;
use sha2::Digest;
use std::collections::BTreeSet;

/// The differences between protocols that matter to a repair.
#[derive(Clone, Copy)]
pub(super) struct Dialect {
    /// The `provider` whose [`Block::Provider`] blocks are kept.
    pub provider: &'static str,
    /// Whether the protocol takes a provider block of this `type` in a message of this role.
    pub carries: fn(Role, &str) -> bool,
    pub max_id_bytes: usize,
    /// Whether roles must alternate, so that consecutive turns of one role are merged.
    pub merge_turns: bool,
    /// Whether the model continues an assistant text at the end of the request.
    pub prefill: bool,
}

const OPENING: &str = "(The conversation begins here.)";
const CONTINUE: &str = "Continue.";
const NO_RESULT: &str = "The result of this call is not known.";
const MAX_NAME_BYTES: usize = 64;

/// Returns a copy of `context` in normal form, and counts the changes.
#[cfg(test)]
pub(super) fn repair(context: &Context, dialect: Dialect) -> (Context, Repairs) {
    let mut turns = Turns::new(dialect, &context.system);
    context.messages.iter().for_each(|message| turns.add(message));
    let (messages, mut repairs) = turns.rest();
    let tools = tools(&context.tools, &mut repairs);
    let prefill = turns.prefill(context.prefill.as_deref(), &mut repairs);
    (Context { system: turns.system, tools: tools.into(), messages, prefill }, repairs)
}

/// The name of a tool as a provider sees it: letters, digits, `_` and `-`, at most 64 bytes.
///
/// Keeps a name that already fits. Any other name gets a suffix from its hash, so that two tools never share
/// a name.
pub fn tool_name(name: &str) -> String {
    if is_word(name, MAX_NAME_BYTES) {
        return name.to_owned();
    }
    let word: String =
        name.chars().map(|c| if c.is_ascii() && in_word(c as u8) { c } else { '_' }).take(50).collect();
    format!("{word}_{}", &hex::encode(sha2::Sha256::digest(name))[..12])
}

/// Returns whether `text` has no visible character. Providers refuse such blocks.
pub(super) fn is_blank(text: &str) -> bool {
    text.chars().all(is_invisible)
}

/// Servers strip by different alphabets (Python also U+001C to U+001F, JavaScript also U+FEFF), so we take the union.
fn is_invisible(c: char) -> bool {
    c.is_whitespace() || c.is_control() || matches!(c, '\u{feff}' | '\u{200b}')
}

/// `text` without the invisible characters at its end. Providers refuse a prefill that ends in white space.
pub(crate) fn without_blank_end(text: &str) -> &str {
    text.trim_end_matches(is_invisible)
}

/// The arguments of a call as they are sent: an object with sorted keys. Malformed arguments become an empty
/// object.
pub(super) fn arguments(call: &ToolCall) -> Value {
    match (&call.malformed, &call.arguments) {
        (None, Value::Object(_)) => sorted(call.arguments.clone()),
        _ => Value::Object(serde_json::Map::new()),
    }
}

/// The JSON schema of a tool's input: always of type object, with `properties`.
pub(super) fn parameters(schema: &Value) -> Value {
    let mut schema = sorted(schema.clone());
    if !schema.is_object() {
        schema = Value::Object(serde_json::Map::new());
    }
    schema["type"] = Value::from("object");
    if !schema["properties"].is_object() {
        schema["properties"] = Value::Object(serde_json::Map::new());
    }
    schema
}

/// The text of a result as it is sent. Never blank, because some servers refuse a blank result.
pub(super) fn result_text(result: &ToolResult) -> &str {
    if is_blank(&result.content) { "(no output)" } else { &result.content }
}

/// `value` with all keys sorted, so that equal values always give the same bytes. Otherwise the order of keys
/// would depend on the JSON column, and on whether a dependency turns on serde_json's `preserve_order`.
pub(super) fn sorted(mut value: Value) -> Value {
    value.sort_all_objects();
    value
}

/// The value's bytes in a request, with sorted keys.
pub(super) fn bytes(value: Value) -> Vec<u8> {
    sorted(value).to_string().into_bytes()
}

/// The tools under names that the provider takes, each name once.
pub(super) fn tools(given: &[ToolDefinition], repairs: &mut Repairs) -> Vec<ToolDefinition> {
    let mut names = BTreeSet::new();
    let mut tools = Vec::with_capacity(given.len());
    for tool in given {
        let name = tool_name(&tool.name);
        repairs.rewritten_ids += usize::from(name != tool.name);
        if names.insert(name.clone()) {
            tools.push(ToolDefinition { name, ..tool.clone() });
        } else {
            repairs.misplaced_blocks += 1;
        }
    }
    tools
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

fn is_word(text: &str, max_bytes: usize) -> bool {
    !text.is_empty() && text.len() <= max_bytes && text.bytes().all(in_word)
}

/// A call of the newest assistant message, until its turn closes.
#[derive(Clone)]
struct Open {
    stored: CallId,
    sent: CallId,
    name: String,
    answered: bool,
}

/// Repairs a transcript, message by message.
pub(super) struct Turns {
    dialect: Dialect,
    repairs: Repairs,
    system: String,
    /// Whether only system messages were added so far.
    leading: bool,
    /// Call ids that this request has already used.
    used: BTreeSet<String>,
    open: Vec<Open>,
    /// Results without a call, held back until the open turn's results are complete.
    notes: Vec<Block>,
    /// The normal form, without what [`Turns::settled`] has given out.
    messages: Vec<Message>,
    /// Whether [`Turns::settled`] has given out a message.
    begun: bool,
}

impl Turns {
    pub fn new(dialect: Dialect, system: &str) -> Turns {
        Turns {
            dialect,
            repairs: Repairs::default(),
            system: system.to_owned(),
            leading: true,
            used: BTreeSet::new(),
            open: Vec::new(),
            notes: Vec::new(),
            messages: Vec::new(),
            begun: false,
        }
    }

    /// Adds the next message of the transcript.
    pub fn add(&mut self, message: &Message) {
        self.leading &= message.role == Role::System;
        if self.leading {
            self.leading_system(message);
        } else {
            self.message(message);
        }
    }

    /// The system prompt, with the system messages that precede all others. It is complete when
    /// [`Turns::settled`] gives out the first message.
    pub fn system(&self) -> &str {
        &self.system
    }

    /// Takes the messages of the normal form that no later message of the transcript changes: all but the last.
    pub fn settled(&mut self) -> Vec<Message> {
        let count = if self.leading { 0 } else { self.messages.len().saturating_sub(1) };
        if count == 0 {
            return Vec::new();
        }
        self.open_with_user();
        self.begun = true;
        let count = self.messages.len() - 1;
        self.messages.drain(..count).collect()
    }

    /// Returns the other messages of the normal form, if the transcript ends here, and what was changed in all.
    pub fn rest(&self) -> (Vec<Message>, Repairs) {
        let end = Turns {
            dialect: self.dialect,
            repairs: self.repairs,
            system: String::new(),
            leading: self.leading,
            // Only calls of new messages need it.
            used: BTreeSet::new(),
            open: self.open.clone(),
            notes: self.notes.clone(),
            messages: self.messages.clone(),
            begun: self.begun,
        };
        end.finish()
    }

    /// Returns the text that the reply continues, as the provider takes it.
    pub fn prefill(&self, given: Option<&str>, repairs: &mut Repairs) -> Option<String> {
        let given = given?;
        if !self.dialect.prefill {
            repairs.misplaced_blocks += 1;
            return None;
        }
        let seen = without_blank_end(given);
        repairs.dropped_blanks += usize::from(seen.len() < given.len() || seen.is_empty());
        (!seen.is_empty()).then(|| seen.to_owned())
    }

    /// Adds a system message that precedes all others to the system prompt.
    fn leading_system(&mut self, message: &Message) {
        let mut rest = Vec::new();
        for block in &message.content {
            match block {
                Block::Text { text } if is_blank(text) => self.repairs.dropped_blanks += 1,
                Block::Text { text } => {
                    self.repairs.misplaced_blocks += 1;
                    if is_blank(&self.system) {
                        self.system.clone_from(text);
                    } else if *text != self.system {
                        self.system.push_str("\n\n");
                        self.system.push_str(text);
                    }
                }
                Block::ToolCall(_) | Block::ToolResult(_) | Block::Provider { .. } => {
                    rest.push(block.clone())
                }
            }
        }
        if !rest.is_empty() {
            self.message(&Message { role: Role::System, content: rest.into() });
        }
    }

    fn message(&mut self, message: &Message) {
        let (rest, results) = self.sort_out(message);
        match message.role {
            Role::Assistant => {
                self.close();
                if !rest.is_empty() {
                    self.assistant(rest);
                }
                for result in results {
                    self.result(result);
                }
            }
            Role::System | Role::User | Role::Tool => {
                let only_results = !results.is_empty() && results.len() == message.content.len();
                for result in results {
                    self.result(result);
                }
                // Every message except one of results ends the turn, even a blank one. Otherwise dropping a
                // blank message would change whether a later result counts as an answer.
                if !only_results {
                    self.close();
                }
                if !rest.is_empty() {
                    self.push(Role::User, rest);
                }
            }
        }
    }

    /// Splits a message into the blocks that may stay and the tool results. Counts and drops all other
    /// blocks.
    fn sort_out<'m>(&mut self, message: &'m Message) -> (Vec<Block>, Vec<&'m ToolResult>) {
        let role = message.role;
        // Only the user and the assistant say something in a request.
        let moves = matches!(role, Role::System | Role::Tool);
        let mut rest = Vec::new();
        let mut results = Vec::new();
        for block in &message.content {
            match block {
                Block::Text { text } if is_blank(text) => self.repairs.dropped_blanks += 1,
                Block::Text { .. } => {
                    self.repairs.misplaced_blocks += usize::from(moves);
                    rest.push(block.clone());
                }
                Block::ToolCall(_) if role == Role::Assistant => rest.push(block.clone()),
                Block::ToolCall(_) => self.repairs.misplaced_blocks += 1,
                Block::ToolResult(result) => {
                    let alone = role == Role::Tool && results.is_empty();
                    self.repairs.misplaced_blocks += usize::from(!alone);
                    results.push(result);
                }
                Block::Provider { provider, raw } => {
                    let kind = raw.get("type").and_then(Value::as_str).unwrap_or_default();
                    let fits = !kind.is_empty() && (self.dialect.carries)(role, kind);
                    if provider == self.dialect.provider && fits {
                        self.repairs.misplaced_blocks += usize::from(moves);
                        rest.push(block.clone());
                    } else {
                        self.repairs.misplaced_blocks += 1;
                    }
                }
            }
        }
        self.repairs.dropped_blanks += usize::from(message.content.is_empty());
        (rest, results)
    }

    fn assistant(&mut self, mut content: Vec<Block>) {
        // To the API, text after a call looks like a turn that continued without the result. So texts move
        // before the calls. Provider blocks keep their order after the calls, because a signature may cover
        // it.
        let is_call = |block: &Block| matches!(block, Block::ToolCall(_));
        if let Some(first_call) = content.iter().position(is_call) {
            let tail = content.split_off(first_call);
            let (texts, others): (Vec<_>, Vec<_>) =
                tail.into_iter().partition(|block| matches!(block, Block::Text { .. }));
            self.repairs.misplaced_blocks += texts.len();
            content.extend(texts);
            content.extend(others);
        }

        for block in &mut content {
            if let Block::ToolCall(call) = block {
                let sent = self.wire_id(&call.call_id);
                let name = tool_name(&call.name);
                self.repairs.rewritten_ids +=
                    usize::from(sent != call.call_id) + usize::from(name != call.name);
                self.open.push(Open {
                    stored: call.call_id.clone(),
                    sent: sent.clone(),
                    name: name.clone(),
                    answered: false,
                });
                call.call_id = sent;
                call.name = name;
            }
        }
        self.push(Role::Assistant, content);
    }

    /// Answers the open call with the result's id. If no such call is open, the result becomes a note in the
    /// user's voice.
    fn result(&mut self, result: &ToolResult) {
        let open = self.open.iter_mut().find(|open| !open.answered && open.stored == result.call_id);
        match open {
            Some(open) => {
                open.answered = true;
                let result = ToolResult { call_id: open.sent.clone(), ..result.clone() };
                self.messages
                    .push(Message { role: Role::Tool, content: vec![Block::ToolResult(result)].into() });
            }
            None => {
                self.repairs.orphan_results += 1;
                let outcome = if result.is_error { "error" } else { "result" };
                let text = format!("[Late {outcome} of the tool {}]\n{}", result.name, result_text(result));
                self.notes.push(Block::Text { text });
            }
        }
    }

    /// Ends the open turn. Gives each unanswered call a synthetic result, then adds the notes that were held
    /// back.
    fn close(&mut self) {
        for open in std::mem::take(&mut self.open).into_iter().filter(|open| !open.answered) {
            self.repairs.unanswered_calls += 1;
            let result = ToolResult {
                call_id: open.sent,
                name: open.name,
                content: NO_RESULT.to_owned(),
                is_error: true,
                details: None,
                output: None,
            };
            self.messages.push(Message { role: Role::Tool, content: vec![Block::ToolResult(result)].into() });
        }
        let notes = std::mem::take(&mut self.notes);
        if !notes.is_empty() {
            self.push(Role::User, notes);
        }
    }

    fn push(&mut self, role: Role, content: Vec<Block>) {
        match self.messages.last_mut() {
            Some(last) if self.dialect.merge_turns && last.role == role => {
                // Append blocks and never join strings, so that the previous request stays a prefix of this
                // one.
                last.content.to_mut().extend(content);
                self.repairs.merged_turns += 1;
            }
            _ => self.messages.push(Message { role, content: content.into() }),
        }
    }

    /// Keeps an id that fits and is new. Replaces any other id with a hash of the id and a counter.
    fn wire_id(&mut self, id: &CallId) -> CallId {
        let fits = is_word(id.as_str(), self.dialect.max_id_bytes);
        if fits && self.used.insert(id.as_str().to_owned()) {
            return id.clone();
        }
        let mut nth = 0_u64;
        loop {
            let digest = hex::encode(sha2::Sha256::digest(format!("{nth}:{id}")));
            let hashed = format!("call_{}", &digest[..24]);
            if self.used.insert(hashed.clone()) {
                return CallId::from(hashed);
            }
            nth += 1;
        }
    }

    /// Makes the first message the user's.
    fn open_with_user(&mut self) {
        if !self.begun && self.messages.first().is_none_or(|first| first.role != Role::User) {
            self.messages.insert(0, say(OPENING));
            self.repairs.added_turns += 1;
        }
    }

    fn finish(mut self) -> (Vec<Message>, Repairs) {
        self.close();
        self.open_with_user();
        if self.messages.last().is_some_and(|last| last.role == Role::Assistant) {
            self.messages.push(say(CONTINUE));
            self.repairs.added_turns += 1;
        }
        (self.messages, self.repairs)
    }
}

fn say(text: &str) -> Message {
    Message { role: Role::User, content: vec![Block::Text { text: text.to_owned() }].into() }
}
