//! Anthropic's Messages API, streamed: `POST {base_url}/v1/messages`.

use super::call::{self, Endpoint};
use super::provider_error::{ProviderError, bad_response};
use super::{Deltas, Model};
use async_trait::async_trait;
use reqwest::header::{HeaderMap, HeaderValue};
use secrecy::ExposeSecret;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use wakeful_workflow::context::Context;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{Block, FinishReason, Reply, Usage, storable, without_nul};
use wakeful_workflow::wire::anthropic::{Options, PROVIDER, project};
use wakeful_workflow::wire::{Protocol, Request};

/// Address of the official API.
pub const BASE_URL: &str = "https://api.anthropic.com";
const VERSION: &str = "2023-06-01";

/// A model that speaks Anthropic's protocol.
pub struct Anthropic {
    endpoint: Endpoint,
    options: Options,
}

impl Anthropic {
    /// Creates a model at `endpoint`, whose `base_url` does not include `/v1`.
    pub fn new(endpoint: Endpoint, options: Options) -> Anthropic {
        Anthropic { endpoint, options }
    }
}

#[async_trait]
impl Model for Anthropic {
    fn request(&self, context: &Context) -> Request {
        project(context, &self.options)
    }

    fn protocol(&self) -> Option<&dyn Protocol> {
        Some(&self.options)
    }

    fn takes_prefill(&self) -> bool {
        self.options.prefill
    }

    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault> {
        let url = format!("{}/v1/messages", self.endpoint.base_url.trim_end_matches('/'));
        let mut headers = HeaderMap::new();
        headers.insert("anthropic-version", HeaderValue::from_static(VERSION));
        if let Some(key) = &self.endpoint.api_key {
            headers.insert("x-api-key", call::secret_header(key.expose_secret().to_owned())?);
        }
        let mut events = call::open(&self.endpoint, url, headers, request.body.clone()).await?;
        let mut answer = Answer::default();
        loop {
            let is_whole = answer.take(&events.next().await?, deltas)?;
            deltas.began();
            if is_whole {
                events.end();
                return answer.finish(request.prefill.as_deref());
            }
        }
    }
}

/// The answer as far as it has arrived.
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
    /// Thinking, server tools and unknown kinds of blocks. Collected field by field and never interpreted.
    Raw {
        raw: Map<String, Value>,
        json: String,
    },
}

impl Answer {
    /// Adds one event. Returns true at the end marker.
    fn take(&mut self, data: &str, deltas: &mut dyn Deltas) -> Result<bool, Fault> {
        let event: Value = serde_json::from_str(data).map_err(bad_response)?;
        match event["type"].as_str().unwrap_or_default() {
            "message_start" => {
                self.usage(&event["message"]["usage"]);
                deltas.usage(self.total());
            }
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
                let error = ProviderError::of(&event).ok_or_else(|| bad_response(data))?;
                let status = error.status();
                return Err(error.fault(status, None));
            }
            // ping and content_block_stop carry no data; the protocol asks clients to ignore unknown events.
            _ => {}
        }
        Ok(false)
    }

    /// Token counts are cumulative, so the newest value of each replaces the older one.
    fn usage(&mut self, usage: &Value) {
        let counts = [
            ("input_tokens", &mut self.input_tokens),
            ("output_tokens", &mut self.output_tokens),
            ("cache_read_input_tokens", &mut self.cached_tokens),
            ("cache_creation_input_tokens", &mut self.cache_write_tokens),
        ];
        for (field, count) in counts {
            if let Some(tokens) = call::tokens(usage, field) {
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
                deltas.not_text();
                let input = block["input"].clone();
                Part::Call { id: text("id"), name: text("name"), input, json: String::new() }
            }
            _ => {
                deltas.not_text();
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
            .ok_or_else(|| bad_response(format!("a delta of block {index}, which was not started")))?;
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
                        // A signature arrives whole; texts arrive in pieces.
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

    /// Builds the reply, with the `prefill` that the model continued put in front of its text.
    fn finish(self, prefill: Option<&str>) -> Result<Reply, Fault> {
        let finish_reason = match self.stop_reason.as_deref() {
            None => return Err(Fault::StreamCut),
            Some("tool_use") => FinishReason::ToolCalls,
            Some("max_tokens" | "model_context_window_exceeded") => FinishReason::Length,
            Some("refusal") => FinishReason::ContentFilter,
            // end_turn, stop_sequence, pause_turn, and any unknown reason: the message is complete.
            Some(_) => FinishReason::Stop,
        };
        let usage = self.total();
        let last = self.parts.keys().next_back().copied();
        let mut content = Vec::new();
        for (index, part) in self.parts {
            let truncated = finish_reason.may_cut() && last == Some(index);
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
                    let raw = storable(Value::Object(raw));
                    content.push(Block::Provider { provider: PROVIDER.to_owned(), raw });
                }
            }
        }
        if let Some(prefill) = prefill {
            match content.first_mut() {
                Some(Block::Text { text }) => text.insert_str(0, prefill),
                _ => content.insert(0, Block::Text { text: prefill.to_owned() }),
            }
        }
        super::complete(Reply::new(content, finish_reason, usage))
    }

    /// What was counted so far.
    fn total(&self) -> Usage {
        Usage {
            input_tokens: self.input_tokens + self.cached_tokens + self.cache_write_tokens,
            output_tokens: self.output_tokens,
            cached_tokens: self.cached_tokens,
            cache_write_tokens: self.cache_write_tokens,
            cost_micros: 0,
        }
    }
}

fn index(event: &Value) -> Result<u64, Fault> {
    event["index"].as_u64().ok_or_else(|| bad_response("a content block without an index"))
}

#[cfg(test)]
mod tests {
    use super::super::faults::{Heard, endpoint, hello, stream};
    use super::*;
    use serde_json::json;
    use wakeful_workflow::record::ToolCall;
    use wiremock::matchers::{body_partial_json, header, method, path};
    use wiremock::{Mock, MockServer, ResponseTemplate};

    /// Builds a whole answer from content block events and a stop reason.
    fn answer(blocks: &[Value], stop_reason: &str) -> Result<(Reply, String), Fault> {
        let mut heard = Heard::default();
        let mut answer = Answer::default();
        for event in blocks {
            assert!(!answer.take(&event.to_string(), &mut heard)?);
        }
        let end = json!({"type": "message_delta", "delta": {"stop_reason": stop_reason}, "usage": {"output_tokens": 5}});
        answer.take(&end.to_string(), &mut heard)?;
        assert!(answer.take(r#"{"type":"message_stop"}"#, &mut heard)?);
        Ok((answer.finish(None)?, heard.0))
    }

    fn start(index: u64, block: Value) -> Value {
        json!({"type": "content_block_start", "index": index, "content_block": block})
    }

    fn delta(index: u64, delta: Value) -> Value {
        json!({"type": "content_block_delta", "index": index, "delta": delta})
    }

    fn call(json_text: &str) -> [Value; 2] {
        [
            start(0, json!({"type": "tool_use", "id": "toolu_1", "name": "t", "input": {}})),
            delta(0, json!({"type": "input_json_delta", "partial_json": json_text})),
        ]
    }

    fn only_call(reply: Reply) -> ToolCall {
        let [Block::ToolCall(call)] = reply.content.as_slice() else { panic!("{reply:?}") };
        call.clone()
    }

    #[tokio::test]
    async fn a_call_is_sent_as_the_protocol_wants_it_and_its_answer_is_read() {
        let server = MockServer::start().await;
        let usage = r#"{"type":"message_start","message":{"usage":{"input_tokens":3,"cache_read_input_tokens":20,"cache_creation_input_tokens":100,"output_tokens":1}}}"#;
        let start = r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#;
        let events = [
            usage,
            r#"{"type":"ping"}"#,
            start,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hel"}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"lo\u0000"}}"#,
            r#"{"type":"content_block_stop","index":0}"#,
            r#"{"type":"of_tomorrow"}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":9}}"#,
            r#"{"type":"message_stop"}"#,
        ];
        Mock::given(method("POST"))
            .and(path("/v1/messages"))
            .and(header("x-api-key", "secret"))
            .and(header("anthropic-version", "2023-06-01"))
            .and(header("content-type", "application/json"))
            .and(body_partial_json(json!({"stream": true, "model": "m", "max_tokens": 100})))
            .respond_with(ResponseTemplate::new(200).set_body_raw(stream(&events), "text/event-stream"))
            .expect(1)
            .mount(&server)
            .await;
        let model = Anthropic::new(endpoint(&server.uri()), Options::new("m", 100));
        let mut heard = Heard::default();
        let reply = model.call(&model.request(&hello()), &mut heard).await.unwrap();
        assert_eq!(heard.0, "Hello\u{fffd}");
        assert_eq!(reply.content, [Block::Text { text: heard.0 }]);
        assert_eq!(reply.finish_reason, FinishReason::Stop);
        let usage = Usage {
            input_tokens: 123,
            output_tokens: 9,
            cached_tokens: 20,
            cache_write_tokens: 100,
            cost_micros: 0,
        };
        assert_eq!(reply.usage, usage);
    }

    #[test]
    fn an_answer_begins_with_the_prefill_that_it_goes_on_from() {
        let finished = |blocks: &[Value]| {
            let mut answer = Answer { stop_reason: Some("end_turn".to_owned()), ..Answer::default() };
            for block in blocks {
                answer.take(&block.to_string(), &mut Heard::default()).unwrap();
            }
            answer.finish(Some("Once upon")).unwrap().content
        };
        let said = |text: &str| Block::Text { text: text.to_owned() };
        let rest = start(0, json!({"type": "text", "text": " a time"}));
        assert_eq!(finished(&[rest]), [said("Once upon a time")]);
        assert_eq!(finished(&[]), [said("Once upon")], "nothing was left to say");
        let content = finished(&call("{}"));
        assert_eq!(content[0], said("Once upon"));
        assert!(matches!(content[1], Block::ToolCall(_)));
    }

    #[test]
    fn thinking_is_kept_verbatim_with_its_signature_and_in_its_place() {
        let events = [
            start(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
            delta(0, json!({"type": "thinking_delta", "thinking": "I "})),
            delta(0, json!({"type": "thinking_delta", "thinking": "wonder"})),
            delta(0, json!({"type": "signature_delta", "signature": "c2ln"})),
            start(1, json!({"type": "redacted_thinking", "data": "opaque"})),
            start(2, json!({"type": "tool_use", "id": "toolu_1", "name": "t", "input": {}})),
            delta(2, json!({"type": "input_json_delta", "partial_json": "{\"a\":"})),
            delta(2, json!({"type": "input_json_delta", "partial_json": "1}"})),
        ];
        let (reply, heard) = answer(&events, "tool_use").unwrap();
        let raw = |raw| Block::Provider { provider: "anthropic".to_owned(), raw };
        let call = ToolCall {
            call_id: "toolu_1".into(),
            name: "t".into(),
            arguments: json!({"a": 1}),
            malformed: None,
        };
        let expected = [
            raw(json!({"type": "thinking", "thinking": "I wonder", "signature": "c2ln"})),
            raw(json!({"type": "redacted_thinking", "data": "opaque"})),
            Block::ToolCall(call),
        ];
        assert_eq!(reply.content, expected);
        assert_eq!(reply.finish_reason, FinishReason::ToolCalls);
        assert_eq!(heard, "", "thinking is not shown");
    }

    #[test]
    fn a_kind_of_block_that_we_do_not_know_is_kept_whole() {
        let events = [
            start(0, json!({"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {}})),
            delta(0, json!({"type": "input_json_delta", "partial_json": "{\"query\":"})),
            delta(0, json!({"type": "input_json_delta", "partial_json": "\"x\"}"})),
            start(1, json!({"type": "compaction", "content": null})),
            delta(1, json!({"type": "compaction_delta", "content": "short"})),
            start(2, json!({"type": "text", "text": "found"})),
        ];
        let (reply, _) = answer(&events, "end_turn").unwrap();
        let raw = |raw| Block::Provider { provider: "anthropic".to_owned(), raw };
        let expected = [
            raw(
                json!({"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {"query": "x"}}),
            ),
            raw(json!({"type": "compaction", "content": "short"})),
            Block::Text { text: "found".to_owned() },
        ];
        assert_eq!(reply.content, expected);
    }

    #[test]
    fn arguments_that_are_no_json_object_never_run() {
        for text in ["{\"a\":", "[]", "nonsense"] {
            let call = only_call(answer(&call(text), "tool_use").unwrap().0);
            assert_eq!(call.malformed.as_deref(), Some(text));
            assert_eq!(call.arguments, json!({}));
        }
    }

    #[test]
    fn a_call_that_the_output_limit_or_a_refusal_cut_never_runs() {
        for (reason, expected) in
            [("max_tokens", FinishReason::Length), ("refusal", FinishReason::ContentFilter)]
        {
            for text in ["", "{\"to\":\"x@exam"] {
                let (reply, _) = answer(&call(text), reason).unwrap();
                assert_eq!(reply.finish_reason, expected);
                assert_eq!(only_call(reply).malformed.as_deref(), Some(text), "{reason}");
            }
        }
        let whole = only_call(answer(&call("{\"a\":1}"), "max_tokens").unwrap().0);
        assert_eq!((whole.arguments, whole.malformed), (json!({"a": 1}), None));
    }

    #[test]
    fn a_call_without_arguments_has_an_empty_object() {
        let call = only_call(answer(&call(""), "tool_use").unwrap().0);
        assert_eq!((call.arguments, call.malformed), (json!({}), None));
    }

    #[test]
    fn a_delta_of_a_block_that_never_began_is_a_bad_response() {
        let stray = [delta(3, json!({"type": "text_delta", "text": "x"}))];
        assert!(matches!(answer(&stray, "end_turn"), Err(Fault::BadResponse { .. })));
    }

    #[test]
    fn an_end_without_a_reason_is_a_cut_stream() {
        let mut answer = Answer::default();
        let text = start(0, json!({"type": "text", "text": "half"}));
        answer.take(&text.to_string(), &mut Heard::default()).unwrap();
        assert_eq!(answer.finish(None), Err(Fault::StreamCut));
    }
}
