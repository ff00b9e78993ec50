//! Models: one trait, one file a provider.
//!
//! A model is two things: a pure projection of the context onto its protocol, and a call that streams. Adding a
//! provider is a file here, its projection in `wakeful_workflow::wire`, and a line in `Models`.

use async_trait::async_trait;
use wakeful_workflow::context::Context;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{FinishReason, Reply, ToolCall};
use wakeful_workflow::wire::Request;

pub mod anthropic;
#[cfg(test)]
mod faults;
pub mod openai;
#[cfg(test)]
mod peer;
pub mod scripted;
pub mod sse;

/// A model of one provider.
#[async_trait]
pub trait Model: Send + Sync {
    /// The request body for `context`. Pure: the same context gives the same bytes.
    fn request(&self, context: &Context) -> Request;

    /// Sends `request` and streams the answer.
    ///
    /// Each piece of text goes to `deltas` as it arrives. The future may be dropped at any await: the call is
    /// then abandoned and nothing of it counts.
    ///
    /// # Errors
    /// A typed [`Fault`]. A stream that ends without its protocol's end marker is [`Fault::StreamCut`], an answer
    /// with neither text nor a call [`Fault::EmptyReply`]: half an answer is never returned as one.
    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault>;
}

/// Where the text of a running call goes.
pub trait Deltas: Send {
    /// One piece of text, in order.
    fn text(&mut self, delta: &str);
}

/// Drops the deltas: for callers that only want the answer.
pub struct NoDeltas;

impl Deltas for NoDeltas {
    fn text(&mut self, _delta: &str) {}
}

/// A call as it is recorded, out of the text of its arguments.
fn tool_call(id: String, name: String, arguments: String, truncated: bool) -> ToolCall {
    let (arguments, malformed) = match sse::arguments(arguments, truncated) {
        Ok(arguments) => (arguments, None),
        Err(raw) => (serde_json::Value::Object(serde_json::Map::new()), Some(raw)),
    };
    ToolCall { call_id: id.into(), name, arguments, malformed }
}

/// `reply`, if it says anything.
fn complete(reply: Reply) -> Result<Reply, Fault> {
    if !reply.is_empty() {
        return Ok(reply);
    }
    // Sampling again helps against a hiccup, but neither against a filter nor against the limit.
    let message = match reply.finish_reason {
        FinishReason::Stop | FinishReason::ToolCalls => return Err(Fault::EmptyReply),
        FinishReason::ContentFilter => "the provider withheld the whole answer",
        FinishReason::Length => "the output limit was reached before any text: raise the model's max_tokens",
    };
    Err(Fault::Refused { status: 200, message: message.to_owned() })
}
