//! Anthropic's Messages API, streamed: `POST {base_url}/v1/messages`.

use super::sse::{self, Endpoint, ProviderError};
use super::{Deltas, Model};
use async_trait::async_trait;
use reqwest::header::{HeaderMap, HeaderValue};
use secrecy::ExposeSecret;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use wakeful_workflow::context::Context;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{Block, FinishReason, Reply, Usage, without_nul};
use wakeful_workflow::wire::Request;
use wakeful_workflow::wire::anthropic::{Options, PROVIDER, project};

/// Where the official API is.
pub const BASE_URL: &str = "https://api.anthropic.com";
const VERSION: &str = "2023-06-01";

/// A model that speaks Anthropic's protocol.
pub struct Anthropic {
    endpoint: Endpoint,
    options: Options,
}

impl Anthropic {
    /// A model at `endpoint`, whose `base_url` is without `/v1`.
    pub fn new(endpoint: Endpoint, options: Options) -> Anthropic {
        Anthropic { endpoint, options }
    }
}

#[async_trait]
impl Model for Anthropic {
    fn request(&self, context: &Context) -> Request {
        project(context, &self.options)
    }

    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault> {
        let url = format!("{}/v1/messages", self.endpoint.base_url.trim_end_matches('/'));
        let mut headers = HeaderMap::new();
        headers.insert("anthropic-version", HeaderValue::from_static(VERSION));
        if let Some(key) = &self.endpoint.api_key {
            headers.insert("x-api-key", sse::secret_header(key.expose_secret().to_owned())?);
        }
        let mut events = sse::open(&self.endpoint, url, headers, request.body.clone()).await?;
        let mut answer = Answer::default();
        loop {
            if answer.take(&events.next().await?, deltas)? {
                return answer.finish();
            }
        }
    }
}

/// The answer as far as it came.
#[derive(Default)]
struct Answer {
    parts: BTreeMap<u64, Part>,
    stop_reason: Option<String>,
    input_tokens: i64,
    output_tokens: i64,
    cached_tokens: i64,
    cache_write_tokens: i64,
}

enum Part {
    Text(String),
    Call {
        id: String,
        name: String,
        input: Value,
        json: String,
    },
    /// Thinking, server tools and whatever kind comes next: built up field by field, never read.
    Raw {
        raw: Map<String, Value>,
        json: String,
    },
}

impl Answer {
    /// Takes one event in. True at the end marker.
    fn take(&mut self, data: &str, deltas: &mut dyn Deltas) -> Result<bool, Fault> {
        let event: Value = serde_json::from_str(data).map_err(sse::bad_response)?;
        match event["type"].as_str().unwrap_or_default() {
            "message_start" => self.usage(&event["message"]["usage"]),
            "content_block_start" => self.start(index(&event)?, &event["content_block"], deltas),
            "content_block_delta" => self.delta(index(&event)?, &event["delta"], deltas)?,
            "message_delta" => {
                self.usage(&event["usage"]);
                if let Some(reason) = event["delta"]["stop_reason"].as_str() {
                    self.stop_reason = Some(reason.to_owned());
                }
            }
            "message_stop" => return Ok(true),
            "error" => {
                let error = ProviderError::of(&event).ok_or_else(|| sse::bad_response(data))?;
                let status = error.status();
                return Err(error.fault(status, None));
            }
            // ping and content_block_stop say nothing new; the protocol asks clients to pass over unknown events.
            _ => {}
        }
        Ok(false)
    }

    /// Counts are cumulative: the newest of each wins.
    fn usage(&mut self, usage: &Value) {
        let counts = [
            ("input_tokens", &mut self.input_tokens),
            ("output_tokens", &mut self.output_tokens),
            ("cache_read_input_tokens", &mut self.cached_tokens),
            ("cache_creation_input_tokens", &mut self.cache_write_tokens),
        ];
        for (field, count) in counts {
            if let Some(tokens) = sse::tokens(usage, field) {
                *count = tokens;
            }
        }
    }

    fn start(&mut self, index: u64, block: &Value, deltas: &mut dyn Deltas) {
        let text = |field: &str| without_nul(block[field].as_str().unwrap_or_default().to_owned());
        let part = match block["type"].as_str() {
            Some("text") => {
                let text = text("text");
                if !text.is_empty() {
                    deltas.text(&text);
                }
                Part::Text(text)
            }
            Some("tool_use") => {
                let input = block["input"].clone();
                Part::Call { id: text("id"), name: text("name"), input, json: String::new() }
            }
            _ => {
                let raw = block.as_object().cloned().unwrap_or_default();
                Part::Raw { raw, json: String::new() }
            }
        };
        self.parts.insert(index, part);
    }

    fn delta(&mut self, index: u64, delta: &Value, deltas: &mut dyn Deltas) -> Result<(), Fault> {
        let part = self
            .parts
            .get_mut(&index)
            .ok_or_else(|| sse::bad_response(format!("a delta of block {index}, which was not started")))?;
        match part {
            Part::Text(text) => {
                // Citations, the other kind of delta in a text, have no place in our text blocks.
                if let Some(more) = delta["text"].as_str() {
                    let more = without_nul(more.to_owned());
                    deltas.text(&more);
                    text.push_str(&more);
                }
            }
            Part::Call { json, .. } => json.push_str(delta["partial_json"].as_str().unwrap_or_default()),
            Part::Raw { raw, json } => {
                for (field, value) in delta.as_object().into_iter().flatten() {
                    match (field.as_str(), raw.get_mut(field), value) {
                        ("type", _, _) => {}
                        ("partial_json", _, Value::String(more)) => json.push_str(more),
                        ("citation", _, citation) => match raw.get_mut("citations") {
                            Some(Value::Array(list)) => list.push(citation.clone()),
                            _ => {
                                raw.insert("citations".into(), vec![citation.clone()].into());
                            }
                        },
                        // A signature comes whole; texts come in pieces.
                        (name, Some(Value::String(text)), Value::String(more)) if name != "signature" => {
                            text.push_str(more);
                        }
                        _ => {
                            raw.insert(field.clone(), value.clone());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Reply, Fault> {
        let finish_reason = match self.stop_reason.as_deref() {
            None => return Err(Fault::StreamCut),
            Some("tool_use") => FinishReason::ToolCalls,
            Some("max_tokens" | "model_context_window_exceeded") => FinishReason::Length,
            Some("refusal") => FinishReason::ContentFilter,
            // end_turn, stop_sequence, pause_turn, and what may be added: the message is complete.
            Some(_) => FinishReason::Stop,
        };
        let last = self.parts.keys().next_back().copied();
        let mut content = Vec::new();
        for (index, part) in self.parts {
            let truncated = finish_reason == FinishReason::Length && last == Some(index);
            match part {
                Part::Text(text) if text.is_empty() => {}
                Part::Text(text) => content.push(Block::Text { text }),
                Part::Call { id, name, input, json } => {
                    let is_given =
                        json.is_empty() && input.as_object().is_some_and(|input| !input.is_empty());
                    let json = if is_given { input.to_string() } else { json };
                    content.push(Block::ToolCall(super::tool_call(id, name, json, truncated)));
                }
                Part::Raw { mut raw, json } => {
                    if let Ok(input) = serde_json::from_str::<Value>(&json) {
                        raw.insert("input".into(), input);
                    }
                    let raw = sse::cleaned(Value::Object(raw));
                    content.push(Block::Provider { provider: PROVIDER.to_owned(), raw });
                }
            }
        }
        let usage = Usage {
            input_tokens: self.input_tokens + self.cached_tokens + self.cache_write_tokens,
            output_tokens: self.output_tokens,
            cached_tokens: self.cached_tokens,
            cache_write_tokens: self.cache_write_tokens,
            cost_micros: 0,
        };
        super::complete(Reply { content, finish_reason, usage })
    }
}

fn index(event: &Value) -> Result<u64, Fault> {
    event["index"].as_u64().ok_or_else(|| sse::bad_response("a content block without an index"))
}
