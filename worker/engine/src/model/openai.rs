//! OpenAI's Chat Completions, streamed: `POST {base_url}/chat/completions`. Many other servers speak this
//! protocol too; this file also handles their deviations.

use super::call::{self, Endpoint};
use super::provider_error::{ProviderError, bad_response};
use super::{Deltas, Model};
use async_trait::async_trait;
use reqwest::header::{AUTHORIZATION, HeaderMap};
use secrecy::ExposeSecret;
use serde_json::Value;
use wakeful_workflow::context::Context;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{Block, FinishReason, Reply, Usage, without_nul};
use wakeful_workflow::wire::openai::{Options, project};
use wakeful_workflow::wire::{Protocol, Request};

/// Address of the official API.
pub const BASE_URL: &str = "https://api.openai.com/v1";

/// A model that speaks OpenAI's protocol.
pub struct OpenAi {
    endpoint: Endpoint,
    options: Options,
}

impl OpenAi {
    /// Creates a model at `endpoint`, whose `base_url` includes `/v1` if the server uses it.
    pub fn new(endpoint: Endpoint, options: Options) -> OpenAi {
        OpenAi { endpoint, options }
    }
}

#[async_trait]
impl Model for OpenAi {
    fn request(&self, context: &Context) -> Request {
        project(context, &self.options)
    }

    fn protocol(&self) -> Option<&dyn Protocol> {
        Some(&self.options)
    }

    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault> {
        let url = format!("{}/chat/completions", self.endpoint.base_url.trim_end_matches('/'));
        let mut headers = HeaderMap::new();
        if let Some(key) = &self.endpoint.api_key {
            headers.insert(AUTHORIZATION, call::secret_header(format!("Bearer {}", key.expose_secret()))?);
        }
        let mut events = call::open(&self.endpoint, url, headers, request.body.clone()).await?;
        let mut answer = Answer::default();
        loop {
            let data = match events.next().await {
                // Some servers end the stream after the usage, which is the last thing that the protocol has before its marker.
                Err(Fault::StreamCut) if answer.is_whole() => return answer.finish(),
                data => data?,
            };
            if data.trim() == "[DONE]" {
                events.end();
                return answer.finish();
            }
            answer.take(&data, deltas)?;
            deltas.began();
        }
    }
}

/// The answer as far as it has arrived.
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
        let chunk: Value = serde_json::from_str(data).map_err(bad_response)?;
        if let Some(error) = ProviderError::of(&chunk) {
            let status = error.status();
            return Err(error.fault(status, None));
        }
        let usage = &chunk["usage"];
        if usage.is_object() {
            self.usage.input_tokens = call::tokens(usage, "prompt_tokens").unwrap_or_default();
            self.usage.output_tokens = call::tokens(usage, "completion_tokens").unwrap_or_default();
            self.usage.cached_tokens =
                call::tokens(&usage["prompt_tokens_details"], "cached_tokens").unwrap_or_default();
        }

        // The usage chunk has no choice, and we never ask for more than one.
        let choice = &chunk["choices"][0];
        for field in ["content", "refusal"] {
            if let Some(more) = choice["delta"][field].as_str().filter(|more| !more.is_empty()) {
                let more = without_nul(more.to_owned());
                deltas.text(&more);
                self.text.push_str(&more);
            }
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            deltas.not_text();
            self.call(call);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        Ok(())
    }

    /// Adds to the call with the same index, or starts a new one. Some servers send index 0, or none, for
    /// every call; there a new id marks a new call.
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
        // Id and name arrive whole; some servers repeat them.
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

    /// Returns whether the reason of the end and the usage have come.
    fn is_whole(&self) -> bool {
        self.finish_reason.is_some() && self.usage != Usage::default()
    }

    fn finish(self) -> Result<Reply, Fault> {
        let finish_reason = match self.finish_reason.as_deref() {
            // A proxy may end the stream properly although its upstream was cut.
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
            let truncated = finish_reason.may_cut() && at == last;
            let (id, name) = (without_nul(call.id), without_nul(call.name));
            content.push(Block::ToolCall(super::tool_call(id, name, call.arguments, truncated)));
        }
        super::complete(Reply::new(content, finish_reason, self.usage))
    }
}

#[cfg(test)]
mod tests {
    use super::super::faults::{Heard, endpoint, hello, stream};
    use super::*;
    use serde_json::json;
    use wakeful_workflow::record::ToolCall;
    use wiremock::matchers::{body_partial_json, header, method, path};
    use wiremock::{Mock, MockServer, ResponseTemplate};

    /// Builds a whole answer from deltas and a finish reason.
    fn answer(deltas: &[Value], finish_reason: &str) -> Result<Reply, Fault> {
        let mut answer = Answer::default();
        for delta in deltas {
            let chunk = json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
            answer.take(&chunk.to_string(), &mut Heard::default())?;
        }
        let end = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]});
        answer.take(&end.to_string(), &mut Heard::default())?;
        answer.finish()
    }

    fn calls(deltas: &[Value], finish_reason: &str) -> Vec<ToolCall> {
        let deltas: Vec<Value> = deltas.iter().map(|call| json!({"tool_calls": [call]})).collect();
        let is_call = |block| match block {
            Block::ToolCall(call) => Some(call),
            Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => None,
        };
        answer(&deltas, finish_reason).unwrap().content.into_iter().filter_map(is_call).collect()
    }

    fn call(id: &str, arguments: Value) -> ToolCall {
        ToolCall { call_id: id.into(), name: "t".to_owned(), arguments, malformed: None }
    }

    #[tokio::test]
    async fn a_call_is_sent_as_the_protocol_wants_it_and_its_answer_is_read() {
        let server = MockServer::start().await;
        let events = [
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}"#,
            r#"{"choices":[{"index":0,"delta":{"content":"Hel"},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{"content":"lo\u0000"},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":20}}}"#,
            "[DONE]",
        ];
        let body =
            json!({"stream": true, "stream_options": {"include_usage": true}, "max_completion_tokens": 100});
        Mock::given(method("POST"))
            .and(path("/v1/chat/completions"))
            .and(header("authorization", "Bearer secret"))
            .and(header("content-type", "application/json"))
            .and(body_partial_json(body))
            .respond_with(ResponseTemplate::new(200).set_body_raw(stream(&events), "text/event-stream"))
            .expect(1)
            .mount(&server)
            .await;
        let model = OpenAi::new(endpoint(&format!("{}/v1/", server.uri())), Options::new("m", 100));
        let mut heard = Heard::default();
        let reply = model.call(&model.request(&hello()), &mut heard).await.unwrap();
        assert_eq!(heard.0, "Hello\u{fffd}");
        assert_eq!(reply.content, [Block::Text { text: heard.0 }]);
        assert_eq!(reply.finish_reason, FinishReason::Stop);
        let usage = Usage { input_tokens: 30, output_tokens: 9, cached_tokens: 20, ..Usage::default() };
        assert_eq!(reply.usage, usage);
    }

    #[test]
    fn parallel_calls_are_put_together_by_their_index() {
        let deltas = [
            json!({"index": 0, "id": "call_a", "type": "function", "function": {"name": "t", "arguments": ""}}),
            json!({"index": 1, "id": "call_b", "type": "function", "function": {"name": "t", "arguments": "{\"b\""}}),
            json!({"index": 0, "function": {"arguments": "{\"a\":1}"}}),
            json!({"index": 1, "function": {"arguments": ":2}"}}),
        ];
        let expected = [call("call_a", json!({"a": 1})), call("call_b", json!({"b": 2}))];
        assert_eq!(calls(&deltas, "tool_calls"), expected);
    }

    #[test]
    fn calls_that_share_an_index_are_told_apart_by_their_ids() {
        let whole = |id: &str| json!({"index": 0, "id": id, "function": {"name": "t", "arguments": "{}"}});
        let expected = [call("call_a", json!({})), call("call_b", json!({}))];
        assert_eq!(calls(&[whole("call_a"), whole("call_b")], "stop"), expected);
    }

    #[test]
    fn an_id_and_a_name_that_are_repeated_are_taken_once() {
        let piece = |text: &str| json!({"index": 0, "id": "c", "function": {"name": "t", "arguments": text}});
        assert_eq!(calls(&[piece("{\"a\""), piece(":1}")], "tool_calls"), [call("c", json!({"a": 1}))]);
    }

    #[test]
    fn arguments_that_came_as_an_object_are_taken_as_one() {
        let whole = json!({"function": {"name": "t", "arguments": {"a": 1}}});
        assert_eq!(calls(&[whole], "tool_calls"), [call("", json!({"a": 1}))]);
    }

    #[test]
    fn arguments_that_are_no_json_object_never_run() {
        let broken = json!({"index": 0, "id": "c", "function": {"name": "t", "arguments": "{\"a\":"}});
        let malformed = Some("{\"a\":".to_owned());
        assert_eq!(calls(&[broken], "tool_calls"), [ToolCall { malformed, ..call("c", json!({})) }]);
    }

    #[test]
    fn a_call_that_the_output_limit_or_a_filter_cut_never_runs() {
        let first = json!({"index": 0, "id": "a", "function": {"name": "t", "arguments": ""}});
        let cut = json!({"index": 1, "id": "b", "function": {"name": "t", "arguments": ""}});
        for reason in ["length", "content_filter"] {
            let calls = calls(&[first.clone(), cut.clone()], reason);
            assert_eq!(calls[0].malformed, None);
            assert_eq!(calls[1].malformed.as_deref(), Some(""), "{reason}");
        }
    }

    #[test]
    fn a_refusal_is_text() {
        let reply = answer(&[json!({"refusal": "I can"}), json!({"refusal": "not."})], "stop").unwrap();
        assert_eq!(reply.content, [Block::Text { text: "I cannot.".to_owned() }]);
    }

    #[test]
    fn every_finish_reason_has_its_meaning() {
        let text = [json!({"content": "x"})];
        let reason = |word| answer(&text, word).unwrap().finish_reason;
        assert_eq!(reason("stop"), FinishReason::Stop);
        assert_eq!(reason("length"), FinishReason::Length);
        assert_eq!(reason("tool_calls"), FinishReason::ToolCalls);
        assert_eq!(reason("content_filter"), FinishReason::ContentFilter);
        assert_eq!(reason("of_tomorrow"), FinishReason::Stop);
    }
}
