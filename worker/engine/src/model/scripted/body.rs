//! A request's body, as the scripted model reads it, and what it reads out of it. Texts without escapes stay where they are,
//! because a body has the whole conversation.

use super::template::Variables;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use wakeful_workflow::record::{Block, Role, Usage};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Body<'a> {
    #[serde(borrow, rename = "model")]
    _model: Cow<'a, str>,
    #[serde(borrow)]
    system: Cow<'a, str>,
    #[serde(borrow)]
    tools: Vec<Text<'a>>,
    #[serde(borrow)]
    pub(super) messages: Vec<Message<'a>>,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Message<'a> {
    role: Role,
    #[serde(borrow)]
    pub(super) content: Vec<Part<'a>>,
}

/// A part of any type. A field that its type does not have is empty.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part<'a> {
    #[serde(rename = "type")]
    kind: Kind,
    #[serde(borrow, default)]
    text: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) call_id: Cow<'a, str>,
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content: Cow<'a, str>,
    #[serde(rename = "is_error", default)]
    _is_error: bool,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Text,
    ToolCall,
    ToolResult,
}

impl Part<'_> {
    fn text(&self) -> Option<&str> {
        (self.kind == Kind::Text).then_some(&*self.text)
    }

    fn result(&self) -> Option<&str> {
        (self.kind == Kind::ToolResult).then_some(&*self.content)
    }

    pub(super) fn is_call(&self) -> bool {
        self.kind == Kind::ToolCall
    }

    fn bytes(&self) -> usize {
        match self.kind {
            Kind::Text => self.text.len(),
            Kind::ToolCall => self.name.len() + self.arguments.map_or(0, |arguments| arguments.get().len()),
            Kind::ToolResult => self.content.len(),
        }
    }
}

impl Body<'_> {
    /// Returns the number to use in new call ids: the answer's index among the messages, or one more than the
    /// greatest number in existing ids. The index alone could repeat when the context leaves out old messages,
    /// and then two calls would share an id.
    pub(super) fn position(&self) -> usize {
        let calls = self.messages.iter().flat_map(|message| &message.content).filter(|part| part.is_call());
        let used = calls.filter_map(|call| {
            let number = call.call_id.strip_prefix("call_")?.split_once('_')?.0;
            number.parse::<usize>().ok()?.checked_add(1)
        });
        used.fold(self.messages.len(), usize::max)
    }
}

/// The position of a request in its conversation.
pub(super) struct Moment<'a> {
    pub(super) variables: Variables<'a>,
    /// Number of the model's replies since the newest user text.
    pub(super) answers: usize,
}

impl<'a> Moment<'a> {
    pub(super) fn of(body: &'a Body<'_>) -> Self {
        let newest = body.messages.iter().enumerate().rev().find_map(|(index, message)| match message.role {
            Role::User => message.content.iter().rev().find_map(Part::text).map(|text| (index, text)),
            Role::System | Role::Assistant | Role::Tool => None,
        });
        let (since, user) = newest.map_or((0, ""), |(index, text)| (index + 1, text));
        let after = &body.messages[since..];
        let answers = after.iter().filter(|message| message.role == Role::Assistant).count();
        let results = after.iter().flat_map(|message| &message.content).filter_map(Part::result).collect();
        Moment { variables: Variables { user, results }, answers }
    }
}

/// Estimates one token per four bytes. Everything before the model's newest reply counts as cached, because
/// the previous request held it.
pub(super) fn estimate(body: &Body<'_>, content: &[Block]) -> Usage {
    let tokens = |bytes: usize| i64::try_from(bytes.div_ceil(4)).unwrap_or(i64::MAX);
    let head = tokens(body.system.len() + body.tools.iter().map(|tool| tool.0.len()).sum::<usize>());
    let size = |messages: &[Message<'_>]| {
        messages.iter().map(|message| tokens(message.content.iter().map(Part::bytes).sum())).sum::<i64>()
    };
    let cached = match body.messages.iter().rposition(|message| message.role == Role::Assistant) {
        Some(answer) => head + size(&body.messages[..answer]),
        None => 0,
    };
    Usage {
        input_tokens: head + size(&body.messages),
        output_tokens: content.iter().filter_map(bytes).map(tokens).sum(),
        cached_tokens: cached,
        cache_write_tokens: 0,
        cost_micros: 0,
    }
}

/// The bytes of a block that a model may see.
fn bytes(block: &Block) -> Option<usize> {
    match block {
        Block::Text { text } => Some(text.len()),
        Block::ToolCall(call) => Some(call.name.len() + call.arguments.to_string().len()),
        Block::ToolResult(result) => Some(result.content.len()),
        Block::Provider { .. } => None,
    }
}
