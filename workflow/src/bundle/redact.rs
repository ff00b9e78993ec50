//! Redacts a bundle: replaces every text by its size and a keyed hash.
//!
//! The structure stays: who spoke, how many tools were called, how often, how long and at what cost. Equal
//! texts stay equal within one export, so its parts can be compared. The key is made for that export and kept
//! nowhere, so no text can be guessed from its hash, and two exports have no hash in common. What names a
//! person, a customer or a program goes too: ids from outside, the keys of arguments, the names of tools that
//! are not Wakeful's own. State is redacted in the same way as the message details that produce it, so it
//! still follows from them.

mod types;

pub use types::media_type;

use super::{CallRow, EventRow, Line, RecordRow, SessionRow};
use crate::absurd::TRIGGER_PREFIX;
use crate::agent::ToolDefinition;
use crate::derive::FILE_PREFIX;
use crate::prefix::Prefix;
use crate::record::{Attachment, Block, OutputPointer};
use crate::session::CallOutcome;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Map, Value, json};
use sha2::Sha256;
use std::collections::BTreeMap;

/// Length of an export's key.
pub const KEY_BYTES: usize = 32;

/// The tools that every Wakeful has. Their names tell nothing about the installation.
pub const OWN_TOOLS: [&str; 10] = [
    "ask_user",
    "compose_email",
    "current_time",
    "edit_file",
    "list_files",
    "read_attachment",
    "read_file",
    "read_output",
    "search_files",
    "write_file",
];

/// A blob's new name and size, by its old name.
pub type Renamed = BTreeMap<String, (String, i64)>;

/// Redacts the rows of one export.
#[derive(Clone)]
pub struct Redaction {
    key: [u8; KEY_BYTES],
    /// The blobs that the rows refer to.
    pub renamed: Renamed,
}

impl Redaction {
    /// `key` is random, and made for this export.
    pub fn new(key: [u8; KEY_BYTES]) -> Redaction {
        Redaction { key, renamed: Renamed::new() }
    }

    /// Redacts a row. `renamed` must contain every blob that the row refers to.
    pub fn redact(&self, line: Line) -> Line {
        match line {
            Line::Session(row) => Line::Session(Box::new(self.session(*row))),
            Line::Seed(mut row) => {
                row.content = self.text(&row.content);
                row.details = row.details.map(|of| self.value(of));
                Line::Seed(row)
            }
            Line::Run(mut row) => {
                row.error = row.error.map(|error| self.reason(&error));
                Line::Run(row)
            }
            Line::Record(row) => Line::Record(self.record(row)),
            Line::Step(mut row) => {
                row.workspace_sha256 = row.workspace_sha256.map(|tree| self.hash(tree.as_bytes()));
                Line::Step(row)
            }
            Line::Event(row) => Line::Event(self.event(row)),
            Line::Call(row) => Line::Call(self.call(row)),
            Line::Delivery(mut row) => {
                row.content = self.value(row.content);
                row.receipt = row.receipt.map(|of| self.value(of));
                row.resolution = row.resolution.map(|of| self.resolution(of));
                row.last_error = row.last_error.map(|error| self.reason(&error));
                row.undelivered = row.undelivered.into_iter().map(|of| self.missed(of)).collect();
                Line::Delivery(row)
            }
            Line::Inbox(mut row) => {
                row.client_key = self.word(&row.client_key);
                row.content_sha256 = self.hash(row.content_sha256.as_bytes());
                row.content = self.text(&row.content);
                row.sender = row.sender.map(|sender| self.text(&sender));
                row.attachments.iter_mut().for_each(|file| self.attachment(file));
                Line::Inbox(row)
            }
            Line::Blob(part) => Line::Blob(part),
        }
    }

    /// Redacts the bytes of a blob. JSON stays JSON, and a prefix stays one.
    pub fn blob(&self, bytes: &[u8]) -> Vec<u8> {
        if let Ok(prefix) = serde_json::from_slice::<Prefix>(bytes) {
            let tools = prefix.tools.iter().cloned().map(|tool| self.tool(tool)).collect();
            return Prefix { system: self.text(&prefix.system), tools }.blob().bytes;
        }
        match serde_json::from_slice::<Value>(bytes) {
            // A state, whose keys may name files, or one value of a state.
            Ok(Value::Object(state)) => Value::Object(self.state(state)).to_string().into_bytes(),
            Ok(other) => self.value(other).to_string().into_bytes(),
            Err(_) => self.marker(bytes).into_bytes(),
        }
    }

    fn session(&self, row: SessionRow) -> SessionRow {
        SessionRow {
            initial_state: self.state(row.initial_state),
            state: self.state(row.state),
            error: row.error.map(|error| self.reason(&error)),
            cancel_reason: row.cancel_reason.map(|why| self.reason(&why)),
            prefix_sha256: row.prefix_sha256.map(|old| self.name(&old).0),
            conversation_id: self.conversation(&row.conversation_id),
            parent_conversation_id: row.parent_conversation_id.map(|id| self.conversation(&id)),
            // A mailbox's id is its address.
            mailbox_id: if row.mailbox_id.contains('@') {
                self.word(&row.mailbox_id)
            } else {
                row.mailbox_id
            },
            trigger_type: self.trigger_type(&row.trigger_type),
            trigger_id: self.word(&row.trigger_id),
            repository_id: row.repository_id.map(|id| self.word(&id)),
            tool_names: row.tool_names.map(|names| names.iter().map(|name| self.tool_name(name)).collect()),
            policy: row.policy.map(|of| self.policy(of)),
            ..row
        }
    }

    /// Redacts participants, recipients, hosts, tools, and what this version does not know. The names of the rules stay.
    fn policy(&self, mut policy: Map<String, Value>) -> Map<String, Value> {
        const SHOWN: [&str; 5] = ["model", "tool_mode", "replies_as", "reply", "replay"];
        for (key, value) in policy.iter_mut().filter(|(key, _)| !SHOWN.contains(&key.as_str())) {
            *value = match (key.as_str(), value.take()) {
                ("tools", Value::Array(names)) => {
                    let shown = |name: &Value| name.as_str().map(|name| self.tool_name(name));
                    names.iter().map(shown).collect()
                }
                (_, value) => self.value(value),
            };
        }
        if let Some(Value::String(of)) = policy.get_mut("replies_as") {
            *of = self.trigger_type(of);
        }
        if let Some(Value::Object(route)) = policy.get_mut("reply")
            && let Some(to) = route.remove("to")
        {
            route.insert("to".to_owned(), self.value(to));
        }
        policy
    }

    fn attachment(&self, file: &mut Attachment) {
        let (sha256, bytes) = self.name(&file.sha256);
        file.file_name = self.text(&file.file_name);
        file.media_type = media_type(&file.media_type).to_owned();
        (file.sha256, file.bytes) = (sha256, usize::try_from(bytes).unwrap_or(0));
    }

    fn record(&self, mut row: RecordRow) -> RecordRow {
        row.content = row.content.into_iter().map(|of| self.block(of)).collect();
        if let Some(files) = row.details.get("attachments").cloned()
            && let Ok(mut files) = serde_json::from_value::<Vec<Attachment>>(files)
        {
            files.iter_mut().for_each(|file| self.attachment(file));
            row.details.insert("attachments".to_owned(), json!(files));
        }
        row.details = self.details(row.details);
        row
    }

    /// Redacts what other programs left with a message, such as the parts of a task of Absurd that no block shows.
    fn details(&self, mut details: Map<String, Value>) -> Map<String, Value> {
        const SHOWN: [&str; 7] = [
            "usage",
            "finish_reason",
            "inbox_id",
            "attachments",
            "origin_message_id",
            "summary",
            "asks_again",
        ];
        for (_, value) in details.iter_mut().filter(|(key, _)| !SHOWN.contains(&key.as_str())) {
            *value = self.value(value.take());
        }
        details
    }

    fn block(&self, block: Block) -> Block {
        match block {
            Block::Text { text: said } => Block::Text { text: self.text(&said) },
            Block::ToolCall(mut call) => {
                call.name = self.tool_name(&call.name);
                call.arguments = self.arguments(call.arguments);
                call.malformed = call.malformed.map(|said| self.text(&said));
                Block::ToolCall(call)
            }
            Block::ToolResult(mut result) => {
                result.name = self.tool_name(&result.name);
                result.content = self.text(&result.content);
                result.details = result.details.map(|of| self.value(of));
                result.output = result.output.map(|output| {
                    let (sha256, bytes) = self.name(&output.sha256);
                    OutputPointer { sha256, bytes: usize::try_from(bytes).unwrap_or(0) }
                });
                Block::ToolResult(result)
            }
            Block::Provider { provider, raw } => Block::Provider { provider, raw: self.value(raw) },
        }
    }

    fn event(&self, mut row: EventRow) -> EventRow {
        row.dedupe_key = row.dedupe_key.map(|key| self.dedupe_key(&key));
        let Value::Object(payload) = &mut row.payload else { return row };
        for key in ["reason", "error", "by"] {
            // GEN_COMPLETE's reason is one of Wakeful's own words.
            if let Some(Value::String(why)) = payload.get_mut(key)
                && row.kind != "GEN_COMPLETE"
            {
                *why = self.reason(why);
            }
        }
        match row.kind.as_str() {
            "DELIVERY_BOUNCED" => {
                if let Some(Value::String(recipient)) = payload.get_mut("recipient") {
                    *recipient = self.text(recipient);
                }
            }
            "context_update" => {
                if let Some(Value::String(key)) = payload.get_mut("key") {
                    *key = self.state_key(key);
                }
                if let Some(inline) = payload.remove("value") {
                    payload.insert("value".to_owned(), self.value(inline));
                }
                if let Some(Value::String(old)) = payload.get("value_sha256") {
                    let (sha256, bytes) = self.name(old);
                    payload.insert("value_sha256".to_owned(), json!(sha256));
                    payload.insert("bytes".to_owned(), json!(bytes));
                }
            }
            "LLM_CALLED" | "SESSION_FORKED" => {
                if let Some(Value::String(hash)) = payload.get_mut("request_sha256") {
                    *hash = self.hash(hash.as_bytes());
                }
                if let Some(Value::String(id)) = payload.get_mut("parent_conversation_id") {
                    *id = self.conversation(id);
                }
            }
            "PERSON_TOLD" => {
                if let Some(Value::String(text)) = payload.get_mut("text") {
                    *text = self.text(text);
                }
            }
            "SESSION_IMPORTED" => {
                for key in ["task_id", "task_name"] {
                    if let Some(Value::String(word)) = payload.get_mut(key) {
                        *word = self.word(word);
                    }
                }
                if let Some(Value::String(of)) = payload.get_mut("source") {
                    *of = self.trigger_type(of);
                }
            }
            "trigger_event" => {
                if let Some(Value::String(of)) = payload.get_mut("trigger_type") {
                    *of = self.trigger_type(of);
                }
                if let Some(Value::String(id)) = payload.get_mut("trigger_id") {
                    *id = self.word(id);
                }
            }
            "TOOL_INVOKED" | "TOOL_FAILED_UNCERTAIN" => {
                if let Some(Value::String(name)) = payload.get_mut("name") {
                    *name = self.tool_name(name);
                }
            }
            "TOOL_RESULT" => {
                if let Some(Value::String(old)) = payload.get("output_sha256") {
                    payload.insert("output_sha256".to_owned(), json!(self.name(old).0));
                }
            }
            "WORKSPACE_SNAPSHOT" => {
                // The files stay behind. The tree's name stays, to tell equal from changed.
                payload.insert("packs".to_owned(), json!([]));
                if let Some(Value::String(tree)) = payload.get_mut("tree_sha256") {
                    *tree = self.hash(tree.as_bytes());
                }
            }
            "checkpoint" => {
                if let Some(Value::String(old)) = payload.get("state_sha256") {
                    payload.insert("state_sha256".to_owned(), json!(self.name(old).0));
                }
            }
            _ => {}
        }
        row
    }

    /// Keeps what an import renames: the kind and the delivery in `sent/dlv_…` and `refused/dlv_…/…`.
    fn dedupe_key(&self, key: &str) -> String {
        let mut parts = key.splitn(3, '/');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(kind), Some(id), None) if id.starts_with("dlv_") => format!("{kind}/{id}"),
            (Some(kind), Some(id), Some(rest)) if id.starts_with("dlv_") => {
                format!("{kind}/{id}/{}", self.word(rest))
            }
            _ => self.word(key),
        }
    }

    fn call(&self, row: CallRow) -> CallRow {
        CallRow {
            name: self.tool_name(&row.name),
            args_sha256: self.hash(row.args_sha256.as_bytes()),
            outcome: row.outcome.map(|outcome| CallOutcome {
                content: self.text(&outcome.content),
                is_error: outcome.is_error,
                details: outcome.details.map(|of| self.value(of)),
            }),
            receipt: row.receipt.map(|of| self.value(of)),
            resolution: row.resolution.map(|of| self.resolution(of)),
            ..row
        }
    }

    /// A person's decision. Keeps the outcome and the id of the run that continued.
    fn resolution(&self, decision: Value) -> Value {
        match decision {
            Value::Object(fields) => {
                let kept = |key: &str| key == "outcome" || key == "run_id";
                fields
                    .into_iter()
                    .map(|(key, of)| if kept(&key) { (key, of) } else { (key, self.value(of)) })
                    .collect()
            }
            other => self.value(other),
        }
    }

    /// A recipient that a delivery did not reach. Keeps `how` and the status code.
    fn missed(&self, of: Value) -> Value {
        match of {
            Value::Object(fields) => {
                let kept = |key: &str| key == "how" || key == "status";
                fields
                    .into_iter()
                    .map(|(key, of)| if kept(&key) { (key, of) } else { (key, self.value(of)) })
                    .collect()
            }
            other => self.value(other),
        }
    }

    fn state(&self, state: Map<String, Value>) -> Map<String, Value> {
        state.into_iter().map(|(key, of)| (self.state_key(&key), self.value(of))).collect()
    }

    /// Redacts the path in a key in the same way as the path in the details.
    fn state_key(&self, key: &str) -> String {
        match key.strip_prefix(FILE_PREFIX) {
            Some(path) => format!("{FILE_PREFIX}{}", self.text(path)),
            None => key.to_owned(),
        }
    }

    /// Redacts every text in a value, except those under the key `type`.
    fn value(&self, of: Value) -> Value {
        match of {
            Value::String(said) => Value::String(self.text(&said)),
            Value::Array(items) => items.into_iter().map(|of| self.value(of)).collect(),
            Value::Object(fields) => fields
                .into_iter()
                .map(
                    |(key, of)| {
                        if key == "type" && of.is_string() { (key, of) } else { (key, self.value(of)) }
                    },
                )
                .collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) => of,
        }
    }

    /// Why something ended. Keeps the words that programs look for.
    fn reason(&self, why: &str) -> String {
        if matches!(why, "cancelled" | "archived" | "terminated" | "healed" | "resolved") {
            why.to_owned()
        } else {
            self.text(why)
        }
    }

    fn text(&self, said: &str) -> String {
        if said.is_empty() { String::new() } else { self.marker(said.as_bytes()) }
    }

    fn marker(&self, bytes: &[u8]) -> String {
        format!("[redacted: {} bytes, hash {}]", bytes.len(), &self.hash(bytes)[..16])
    }

    /// What takes the place of an id or a name, which has to stay one.
    fn word(&self, said: &str) -> String {
        if said.is_empty() {
            String::new()
        } else {
            format!("redacted-{}", &self.hash(said.as_bytes())[..16])
        }
    }

    /// A conversation's id in its space.
    fn conversation(&self, id: &str) -> String {
        match id.split_once('/') {
            Some((space, id)) => format!("{space}/{}", self.word(id)),
            None => self.word(id),
        }
    }

    /// The trigger of a task of Absurd has the name of its queue, which is the installation's own.
    fn trigger_type(&self, of: &str) -> String {
        match of.strip_prefix(TRIGGER_PREFIX) {
            Some(queue) => format!("{TRIGGER_PREFIX}{}", self.word(queue)),
            None => of.to_owned(),
        }
    }

    fn tool_name(&self, name: &str) -> String {
        if OWN_TOOLS.contains(&name) { name.to_owned() } else { self.word(name) }
    }

    fn tool(&self, tool: ToolDefinition) -> ToolDefinition {
        if OWN_TOOLS.contains(&tool.name.as_str()) {
            return tool;
        }
        ToolDefinition {
            name: self.word(&tool.name),
            description: self.text(&tool.description),
            parameters: json!({ "type": "object" }),
            ..tool
        }
    }

    /// Redacts the keys of a call's arguments too, at any depth: a schema may name a customer's fields.
    fn arguments(&self, of: Value) -> Value {
        match of {
            Value::Object(fields) => {
                fields.into_iter().map(|(key, of)| (self.word(&key), self.arguments(of))).collect()
            }
            Value::Array(items) => items.into_iter().map(|of| self.arguments(of)).collect(),
            other => self.value(other),
        }
    }

    /// A hash that only this export's key gives.
    fn hash(&self, bytes: &[u8]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("a key of any length will do");
        mac.update(bytes);
        hex::encode(mac.finalize().into_bytes())
    }

    fn name(&self, old: &str) -> (String, i64) {
        self.renamed.get(old).cloned().unwrap_or_else(|| (old.to_owned(), 0))
    }
}

#[cfg(test)]
mod tests;
