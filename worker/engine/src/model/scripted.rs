//! `scripted/NAME`: an offline model whose replies are in a scenario file, for `wakeful dev`, demos and tests.
//!
//! It keeps no state between calls. The request alone decides the reply: the newest user text chooses the
//! turn, and the number of the model's replies since then chooses the reply within it. So the same request gets
//! the same reply in any process, before and after a crash.

use super::{Deltas, Model};
use async_trait::async_trait;
use body::{Body, Moment, estimate};
use scenario::{ReplyScript, Scenario};
use serde::Serialize;
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::context::{Context, Message};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::id::CallId;
use wakeful_workflow::record::{Block, FinishReason, Reply, Role, ToolCall, Usage};
use wakeful_workflow::wire::{End, Frame, Protocol, Repairs, Request, Transcript};

mod body;
pub mod scenario;
mod template;

/// The scenarios that come with Wakeful.
const BUILT_IN: &[(&str, &str)] = &[("demo", include_str!("../../scenarios/demo.toml"))];

/// A model that takes its replies from a scenario.
#[derive(Clone, Debug)]
pub struct Scripted {
    name: String,
    scenario: Scenario,
}

/// Why a scripted model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    #[error("the scenario name {name:?} is not 1 to 64 letters, digits, `_` or `-`")]
    BadName { name: String },
    #[error("there is no scenario `{name}`: {}; built in: {built_in}", match path {
        Some(path) => format!("no file {}", path.display()),
        None => "no directory of scenarios is configured ([scripted] dir)".to_owned(),
    })]
    Unknown { name: String, path: Option<PathBuf>, built_in: String },
    #[error("{} could not be read", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{file}, line {line}: {message}")]
    Invalid { file: String, line: usize, message: String },
}

impl Scripted {
    /// Loads the model `scripted/{name}` from `{name}.toml` in `dir` if that file exists, else from the
    /// built-in scenarios. The file is read only once, now.
    ///
    /// # Errors
    /// [`ScenarioError`], which says what to look at.
    pub fn load(dir: Option<&Path>, name: &str) -> Result<Self, ScenarioError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        // The name becomes part of a path.
        if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
            return Err(ScenarioError::BadName { name: name.to_owned() });
        }
        let path = dir.map(|dir| dir.join(format!("{name}.toml")));
        if let Some(path) = &path {
            match std::fs::read_to_string(path) {
                Ok(text) => return Self::parse(name, &path.display().to_string(), &text),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(ScenarioError::Unreadable { path: path.clone(), source }),
            }
        }
        match BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            Some((_, text)) => Self::parse(name, &format!("scenario {name} (built in)"), text),
            None => {
                let built_in = Self::built_in().collect::<Vec<_>>().join(", ");
                Err(ScenarioError::Unknown { name: name.to_owned(), path, built_in })
            }
        }
    }

    /// Parses a scenario. `file` is its name in errors.
    ///
    /// # Errors
    /// [`ScenarioError::Invalid`].
    pub fn parse(name: &str, file: &str, text: &str) -> Result<Self, ScenarioError> {
        match Scenario::parse(text) {
            Ok(scenario) => Ok(Scripted { name: name.to_owned(), scenario }),
            Err((line, message)) => Err(ScenarioError::Invalid { file: file.to_owned(), line, message }),
        }
    }

    /// Returns the names of the scenarios that come with Wakeful.
    pub fn built_in() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }
}

/// A request's body, without its messages. With them it holds only what a model may see: no details of tool results, and no
/// blocks of other providers. [`body::Body`] reads it.
#[derive(Serialize)]
struct Frameless<'a> {
    model: String,
    system: &'a str,
    tools: Vec<&'a str>,
    messages: [(); 0],
}

#[derive(Serialize)]
struct BodyMessage<'a> {
    role: Role,
    content: Vec<BodyPart<'a>>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum BodyPart<'a> {
    Text { text: &'a str },
    ToolCall { call_id: &'a CallId, name: &'a str, arguments: Value },
    ToolResult { call_id: &'a CallId, name: &'a str, content: &'a str, is_error: bool },
}

#[async_trait]
impl Model for Scripted {
    fn request(&self, context: &Context) -> Request {
        Request::of(self, context)
    }

    fn protocol(&self) -> Option<&dyn Protocol> {
        Some(self)
    }

    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault> {
        let body: Body<'_> = serde_json::from_slice(&request.body).map_err(|error| Fault::Internal {
            message: format!("no request of a scripted model: {error}"),
        })?;
        let moment = Moment::of(&body);
        let Some(script) = self.script(&moment) else {
            let text = self.silence(&moment);
            stream(&text, self.scenario.chunk_ms, deltas).await;
            let content = vec![Block::Text { text }];
            let usage = estimate(&body, &content);
            return Ok(Reply::new(content, FinishReason::Stop, usage));
        };
        pause(script.delay_ms.unwrap_or(self.scenario.delay_ms)).await;
        let content = content(script, &moment, &body);
        if let Some(Block::Text { text }) = content.first() {
            stream(text, script.chunk_ms.unwrap_or(self.scenario.chunk_ms), deltas).await;
        }
        if let Some(fault) = &script.fault {
            return Err(fault.clone());
        }
        let finish_reason = match script.finish_reason {
            Some(reason) => reason,
            None if script.tool_calls.is_empty() => FinishReason::Stop,
            None => FinishReason::ToolCalls,
        };
        let estimated = estimate(&body, &content);
        let usage = Usage {
            input_tokens: script.usage.input_tokens.unwrap_or(estimated.input_tokens),
            output_tokens: script.usage.output_tokens.unwrap_or(estimated.output_tokens),
            cached_tokens: script.usage.cached_tokens.unwrap_or(estimated.cached_tokens),
            ..estimated
        };
        let reply = Reply::new(content, finish_reason, usage);
        // A template can render to blank text: `{{user}}` with a blank user text.
        if reply.is_empty() { Err(Fault::EmptyReply) } else { Ok(reply) }
    }
}

impl Protocol for Scripted {
    fn transcript(&self, system: &str) -> Box<dyn Transcript> {
        Box::new(Messages { system: system.to_owned() })
    }

    fn frame(&self, system: &str, tools: &[ToolDefinition]) -> Frame {
        let body = Frameless {
            model: format!("scripted/{}", self.name),
            system,
            tools: tools.iter().map(|tool| tool.name.as_str()).collect(),
            messages: [],
        };
        let mut before = bytes(&body);
        // The list of messages is the body's last field.
        let after = before.split_off(before.len() - 2);
        Frame { before, after, repairs: Repairs::default() }
    }
}

/// The messages of a request. None is ever changed by a later one.
struct Messages {
    system: String,
}

impl Transcript for Messages {
    fn add(&mut self, message: &Message, settled: &mut Vec<Vec<u8>>) {
        let content = message.content.iter().filter_map(part).collect();
        settled.push(bytes(&BodyMessage { role: message.role, content }));
    }

    fn end(&self, _: Option<&str>) -> End {
        End::default()
    }

    fn system(&self) -> &str {
        &self.system
    }
}

fn bytes(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings, lists and JSON values always serialise")
}

impl Scripted {
    fn script(&self, moment: &Moment<'_>) -> Option<&ReplyScript> {
        self.scenario.turn(moment.variables.user)?.replies.get(moment.answers)
    }

    /// Returns the text for a request without a scripted reply. It ends the run and tells the reader why.
    fn silence(&self, moment: &Moment<'_>) -> String {
        match self.scenario.turn(moment.variables.user) {
            None => format!("(Scenario `{}` has no turn for this message.)", self.name),
            Some(turn) => format!(
                "(Scenario `{}` has no reply {} for this message: its turn ends after {}.)",
                self.name,
                moment.answers + 1,
                turn.replies.len()
            ),
        }
    }
}

fn part(block: &Block) -> Option<BodyPart<'_>> {
    match block {
        Block::Text { text } => Some(BodyPart::Text { text }),
        Block::ToolCall(call) => Some(BodyPart::ToolCall {
            call_id: &call.call_id,
            name: &call.name,
            arguments: sorted(&call.arguments),
        }),
        Block::ToolResult(result) => Some(BodyPart::ToolResult {
            call_id: &result.call_id,
            name: &result.name,
            content: &result.content,
            is_error: result.is_error,
        }),
        Block::Provider { .. } => None,
    }
}

/// Sorts the keys of all objects. The database may return keys in another order, and whether a map keeps its
/// order depends on features of the whole build.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        Value::Object(map) => {
            let mut entries: Vec<(&String, &Value)> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            Value::Object(entries.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

fn content(script: &ReplyScript, moment: &Moment<'_>, body: &Body<'_>) -> Vec<Block> {
    let text = script.text.iter().map(|text| Block::Text { text: text.render(&moment.variables) });
    let position = body.position();
    let calls = script.tool_calls.iter().enumerate().map(|(n, call)| {
        Block::ToolCall(ToolCall {
            call_id: CallId::from(format!("call_{position}_{n}")),
            name: call.name.clone(),
            arguments: call.render(&moment.variables),
            malformed: None,
        })
    });
    text.chain(calls).collect()
}

async fn pause(ms: u64) {
    if ms > 0 {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
}

/// Streams `text` word by word, each word with the spaces after it.
async fn stream(text: &str, chunk_ms: u64, deltas: &mut dyn Deltas) {
    let mut rest = text;
    while !rest.is_empty() {
        let word = rest.find(char::is_whitespace).unwrap_or(rest.len());
        let blanks = rest[word..].find(|c: char| !c.is_whitespace()).unwrap_or(rest.len() - word);
        let (chunk, after) = rest.split_at(word + blanks);
        deltas.text(chunk);
        rest = after;
        pause(chunk_ms).await;
    }
}

#[cfg(test)]
mod tests;
