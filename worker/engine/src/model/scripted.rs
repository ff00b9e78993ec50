//! `scripted/NAME`: an offline model that answers from a scenario file, for `wakeful dev`, demos and tests.
//!
//! It keeps no state between calls. The request alone decides the reply: the newest user text chooses the
//! turn, and the number of model answers since then chooses the reply within it. So the same request gets the
//! same answer in any process, before and after a crash.

use super::{Deltas, Model};
use async_trait::async_trait;
use scenario::{ReplyScript, Scenario};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use template::Variables;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::context::{Context, Message};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::id::CallId;
use wakeful_workflow::record::{Block, FinishReason, Reply, Role, ToolCall, Usage};
use wakeful_workflow::wire::{End, Frame, Protocol, Repairs, Request, Transcript};

pub mod scenario;
mod template;

/// The scenarios that come with Wakeful.
const BUILT_IN: &[(&str, &str)] = &[("demo", include_str!("../../scenarios/demo.toml"))];

/// A model that answers from its scenario.
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

/// The request body. It holds only what a model may see: no details of tool results, and no blocks of other
/// providers.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: String,
    system: String,
    tools: Vec<String>,
    messages: Vec<BodyMessage>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BodyMessage {
    role: Role,
    content: Vec<Part>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part {
    Text { text: String },
    ToolCall { call_id: CallId, name: String, arguments: Value },
    ToolResult { call_id: CallId, name: String, content: String, is_error: bool },
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
        let body: Body = serde_json::from_slice(&request.body).map_err(|error| Fault::Internal {
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
        let body = Body {
            model: format!("scripted/{}", self.name),
            system: system.to_owned(),
            tools: tools.iter().map(|tool| tool.name.clone()).collect(),
            messages: Vec::new(),
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

/// The position of a request in its conversation.
struct Moment<'a> {
    variables: Variables<'a>,
    /// Number of model answers since the newest user text.
    answers: usize,
}

impl<'a> Moment<'a> {
    fn of(body: &'a Body) -> Self {
        let newest = body.messages.iter().enumerate().rev().find_map(|(index, message)| match message.role {
            Role::User => message.content.iter().rev().find_map(text).map(|text| (index, text)),
            Role::System | Role::Assistant | Role::Tool => None,
        });
        let (since, user) = newest.map_or((0, ""), |(index, text)| (index + 1, text));
        let after = &body.messages[since..];
        let answers = after.iter().filter(|message| message.role == Role::Assistant).count();
        let results = after.iter().flat_map(|message| &message.content).filter_map(result).collect();
        Moment { variables: Variables { user, results }, answers }
    }
}

fn part(block: &Block) -> Option<Part> {
    match block {
        Block::Text { text } => Some(Part::Text { text: text.clone() }),
        Block::ToolCall(call) => Some(Part::ToolCall {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            arguments: sorted(&call.arguments),
        }),
        Block::ToolResult(result) => Some(Part::ToolResult {
            call_id: result.call_id.clone(),
            name: result.name.clone(),
            content: result.content.clone(),
            is_error: result.is_error,
        }),
        Block::Provider { .. } => None,
    }
}

fn text(part: &Part) -> Option<&str> {
    match part {
        Part::Text { text } => Some(text),
        Part::ToolCall { .. } | Part::ToolResult { .. } => None,
    }
}

fn result(part: &Part) -> Option<&str> {
    match part {
        Part::ToolResult { content, .. } => Some(content),
        Part::Text { .. } | Part::ToolCall { .. } => None,
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

fn content(script: &ReplyScript, moment: &Moment<'_>, body: &Body) -> Vec<Block> {
    let text = script.text.iter().map(|text| Block::Text { text: text.render(&moment.variables) });
    let position = position(body);
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

/// Returns the number to use in new call ids: the answer's index among the messages, or one more than the
/// greatest number in existing ids. The index alone could repeat when the context leaves out old messages,
/// and then two calls would share an id.
fn position(body: &Body) -> usize {
    let used = body.messages.iter().flat_map(|message| &message.content).filter_map(|part| match part {
        Part::ToolCall { call_id, .. } => {
            call_id.as_str().strip_prefix("call_")?.split_once('_')?.0.parse::<usize>().ok()?.checked_add(1)
        }
        Part::Text { .. } | Part::ToolResult { .. } => None,
    });
    used.fold(body.messages.len(), usize::max)
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

/// Estimates one token per four bytes. Everything before the newest model answer counts as cached, because
/// the previous request held it.
fn estimate(body: &Body, content: &[Block]) -> Usage {
    let tokens = |bytes: usize| i64::try_from(bytes.div_ceil(4)).unwrap_or(i64::MAX);
    let head = tokens(body.system.len() + body.tools.iter().map(String::len).sum::<usize>());
    let size = |messages: &[BodyMessage]| {
        messages.iter().map(|message| tokens(message.content.iter().map(part_bytes).sum())).sum::<i64>()
    };
    let cached = match body.messages.iter().rposition(|message| message.role == Role::Assistant) {
        Some(answer) => head + size(&body.messages[..answer]),
        None => 0,
    };
    Usage {
        input_tokens: head + size(&body.messages),
        output_tokens: content.iter().filter_map(part).map(|part| tokens(part_bytes(&part))).sum(),
        cached_tokens: cached,
        cache_write_tokens: 0,
        cost_micros: 0,
    }
}

fn part_bytes(part: &Part) -> usize {
    match part {
        Part::Text { text } => text.len(),
        Part::ToolCall { name, arguments, .. } => name.len() + arguments.to_string().len(),
        Part::ToolResult { content, .. } => content.len(),
    }
}

#[cfg(test)]
mod tests;
