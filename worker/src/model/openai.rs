//! OpenAI's Chat Completions, streamed: `POST {base_url}/chat/completions`. Many other servers speak it too, with
//! habits of their own that are met here.

use super::sse::{self, Endpoint, ProviderError};
use super::{Deltas, Model};
use async_trait::async_trait;
use reqwest::header::{AUTHORIZATION, HeaderMap};
use secrecy::ExposeSecret;
use serde_json::Value;
use wakeful_workflow::context::Context;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{Block, FinishReason, Reply, Usage, without_nul};
use wakeful_workflow::wire::Request;
use wakeful_workflow::wire::openai::{Options, project};

/// Where the official API is.
pub const BASE_URL: &str = "https://api.openai.com/v1";

/// A model that speaks OpenAI's protocol.
pub struct OpenAi {
    endpoint: Endpoint,
    options: Options,
}

impl OpenAi {
    /// A model at `endpoint`, whose `base_url` ends with `/v1` where the server has one.
    pub fn new(endpoint: Endpoint, options: Options) -> OpenAi {
        OpenAi { endpoint, options }
    }
}

#[async_trait]
impl Model for OpenAi {
    fn request(&self, context: &Context) -> Request {
        project(context, &self.options)
    }

    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault> {
        let url = format!("{}/chat/completions", self.endpoint.base_url.trim_end_matches('/'));
        let mut headers = HeaderMap::new();
        if let Some(key) = &self.endpoint.api_key {
            headers.insert(AUTHORIZATION, sse::secret_header(format!("Bearer {}", key.expose_secret()))?);
        }
        let mut events = sse::open(&self.endpoint, url, headers, request.body.clone()).await?;
        let mut answer = Answer::default();
        loop {
            let data = events.next().await?;
            if data.trim() == "[DONE]" {
                return answer.finish();
            }
            answer.take(&data, deltas)?;
        }
    }
}

/// The answer as far as it came.
#[derive(Default)]
struct Answer {
    text: String,
    calls: Vec<Call>,
    finish_reason: Option<String>,
    usage: Usage,
}

struct Call {
    index: u64,
    id: String,
    name: String,
    arguments: String,
}

impl Answer {
    fn take(&mut self, data: &str, deltas: &mut dyn Deltas) -> Result<(), Fault> {
        let chunk: Value = serde_json::from_str(data).map_err(sse::bad_response)?;
        if let Some(error) = ProviderError::of(&chunk) {
            let status = error.status();
            return Err(error.fault(status, None));
        }
        let usage = &chunk["usage"];
        if usage.is_object() {
            self.usage.input_tokens = sse::tokens(usage, "prompt_tokens").unwrap_or_default();
            self.usage.output_tokens = sse::tokens(usage, "completion_tokens").unwrap_or_default();
            self.usage.cached_tokens =
                sse::tokens(&usage["prompt_tokens_details"], "cached_tokens").unwrap_or_default();
        }

        // The usage chunk has no choice; we never ask for more than one.
        let choice = &chunk["choices"][0];
        for field in ["content", "refusal"] {
            if let Some(more) = choice["delta"][field].as_str().filter(|more| !more.is_empty()) {
                let more = without_nul(more.to_owned());
                deltas.text(&more);
                self.text.push_str(&more);
            }
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            self.call(call);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        Ok(())
    }

    /// Adds to the call of the same index, or begins one. Some servers give every call index 0 or none at all;
    /// there a new id tells the calls apart.
    fn call(&mut self, delta: &Value) {
        let id = delta["id"].as_str().unwrap_or_default();
        let newest = self.calls.last().map_or(0, |call| call.index);
        let index = delta["index"].as_u64().unwrap_or(newest);
        let known = self.calls.iter().rposition(|call| call.index == index);
        let known = known.filter(|at| {
            let begun = &self.calls[*at].id;
            id.is_empty() || begun.is_empty() || begun == id
        });
        let at = known.unwrap_or_else(|| {
            self.calls.push(Call { index, id: String::new(), name: String::new(), arguments: String::new() });
            self.calls.len() - 1
        });

        let call = &mut self.calls[at];
        let function = &delta["function"];
        // Id and name come whole, and with some servers again and again.
        if call.id.is_empty() {
            id.clone_into(&mut call.id);
        }
        if call.name.is_empty() {
            function["name"].as_str().unwrap_or_default().clone_into(&mut call.name);
        }
        match &function["arguments"] {
            Value::String(more) => call.arguments.push_str(more),
            arguments @ Value::Object(_) => call.arguments.push_str(&arguments.to_string()),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => {}
        }
    }

    fn finish(self) -> Result<Reply, Fault> {
        let finish_reason = match self.finish_reason.as_deref() {
            // A proxy may close a stream properly that its upstream cut.
            None => return Err(Fault::StreamCut),
            Some("tool_calls" | "function_call") => FinishReason::ToolCalls,
            Some("length") => FinishReason::Length,
            Some("content_filter") => FinishReason::ContentFilter,
            Some(_) => FinishReason::Stop,
        };
        let mut content = Vec::new();
        if !self.text.is_empty() {
            content.push(Block::Text { text: self.text });
        }
        let last = self.calls.len().saturating_sub(1);
        for (at, call) in self.calls.into_iter().enumerate() {
            let truncated = finish_reason == FinishReason::Length && at == last;
            let (id, name) = (without_nul(call.id), without_nul(call.name));
            content.push(Block::ToolCall(super::tool_call(id, name, call.arguments, truncated)));
        }
        super::complete(Reply { content, finish_reason, usage: self.usage })
    }
}
