//! A model server that sends exactly the events a test wrote, in either protocol.

use super::received::Received;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Anthropic,
    OpenAi,
}

/// The server's reaction to one request.
pub enum Sent {
    /// Events of a stream, and then its end, whether or not the events announce it.
    Events(Vec<Value>),
    Refusal(u16, &'static str),
}

impl Protocol {
    pub const BOTH: [Protocol; 2] = [Protocol::Anthropic, Protocol::OpenAi];

    /// The name of this protocol's model.
    pub fn model(self) -> &'static str {
        match self {
            Protocol::Anthropic => "anthropic/test",
            Protocol::OpenAi => "openai/test",
        }
    }

    /// A whole answer with this text.
    pub fn text(self, pieces: &[&str]) -> Vec<Value> {
        [self.half_text(pieces), self.end()].concat()
    }

    /// The beginning of an answer, without an end marker.
    pub fn half_text(self, pieces: &[&str]) -> Vec<Value> {
        let mut events = Vec::new();
        match self {
            Protocol::Anthropic => {
                events.push(json!({"type": "message_start", "message": {"usage": {"input_tokens": 100}}}));
                if !pieces.is_empty() {
                    let block = json!({"type": "text", "text": ""});
                    events.push(json!({"type": "content_block_start", "index": 0, "content_block": block}));
                }
                events.extend(pieces.iter().map(|piece| {
                    let delta = json!({"type": "text_delta", "text": piece});
                    json!({"type": "content_block_delta", "index": 0, "delta": delta})
                }));
            }
            Protocol::OpenAi => {
                events.extend(pieces.iter().map(|piece| json!({"choices": [{"delta": {"content": piece}}]})));
            }
        }
        events
    }

    /// A text and the beginning of a tool call whose arguments break off.
    pub fn half_call(self, text: &str, tool: &str, arguments: &str) -> Vec<Value> {
        let mut events = self.half_text(&[text]);
        match self {
            Protocol::Anthropic => {
                let block = json!({"type": "tool_use", "id": "toolu_half", "name": tool, "input": {}});
                events.push(json!({"type": "content_block_start", "index": 1, "content_block": block}));
                let delta = json!({"type": "input_json_delta", "partial_json": arguments});
                events.push(json!({"type": "content_block_delta", "index": 1, "delta": delta}));
            }
            Protocol::OpenAi => {
                let call = json!({"index": 0, "id": "call_half", "function": {"name": tool, "arguments": arguments}});
                events.push(json!({"choices": [{"delta": {"tool_calls": [call]}}]}));
            }
        }
        events
    }

    fn end(self) -> Vec<Value> {
        match self {
            Protocol::Anthropic => vec![
                json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 10}}),
                json!({"type": "message_stop"}),
            ],
            Protocol::OpenAi => vec![
                json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
                json!({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}),
                json!("[DONE]"),
            ],
        }
    }
}

type Script = dyn Fn(&Value, usize) -> Sent + Send + Sync;

pub struct RawModel {
    pub protocol: Protocol,
    address: String,
    shared: Arc<Shared>,
    server: tokio::task::JoinHandle<()>,
}

struct Shared {
    bodies: Received<String>,
    script: Box<Script>,
    /// Each answer stops after this many events.
    events: watch::Sender<usize>,
}

impl RawModel {
    /// Answers each request with the result of `script` for its body and its number (from 0).
    #[expect(clippy::unused_async, reason = "tests start every kind of server with `.await`")]
    pub async fn start(
        protocol: Protocol,
        script: impl Fn(&Value, usize) -> Sent + Send + Sync + 'static,
    ) -> RawModel {
        let shared = Arc::new(Shared {
            bodies: Received::default(),
            script: Box::new(script),
            events: watch::channel(usize::MAX).0,
        });
        let listener = super::servers::listen();
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let path = match protocol {
            Protocol::Anthropic => "/v1/messages",
            Protocol::OpenAi => "/v1/chat/completions",
        };
        let router = Router::new().route(path, post(answer)).with_state(Arc::clone(&shared));
        let server = super::servers::runtime().spawn(async move {
            axum::serve(listener, router).await.expect("the model server serves");
        });
        RawModel { protocol, address, shared, server }
    }

    /// A model that says `pieces`, and continues from the end of a request's prefill.
    pub async fn saying(protocol: Protocol, pieces: &[&str]) -> RawModel {
        let pieces: Vec<String> = pieces.iter().map(|piece| (*piece).to_owned()).collect();
        RawModel::start(protocol, move |body, _| Sent::Events(rest_of(protocol, &pieces, body))).await
    }

    /// The options of a process whose default agent uses this model.
    pub fn options(&self) -> super::Options {
        let options = super::Options::new().model(self.protocol.model());
        match self.protocol {
            Protocol::Anthropic => {
                options.env("ANTHROPIC_API_KEY", "key").env("ANTHROPIC_BASE_URL", &self.address)
            }
            Protocol::OpenAi => options.env("OPENAI_BASE_URL", format!("{}/v1", self.address)),
        }
    }

    /// Every request body so far, as it came.
    pub fn bodies(&self) -> Vec<String> {
        self.shared.bodies.all()
    }

    /// Waits until `times` requests have arrived.
    pub async fn asked(&self, times: usize) {
        self.shared.bodies.until(&format!("{times} model calls"), |bodies| bodies.len() >= times).await;
    }

    /// Makes answers stop after `events` events.
    pub fn hold_after(&self, events: usize) {
        self.shared.events.send_replace(events);
    }

    /// Lets held answers continue.
    pub fn release(&self) {
        self.hold_after(usize::MAX);
    }
}

impl Drop for RawModel {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The text from which the request asks the model to continue.
pub fn prefill(body: &Value) -> Option<&str> {
    let last = body["messages"].as_array()?.last()?;
    (last["role"] == "assistant").then(|| last["content"][0]["text"].as_str()).flatten()
}

fn rest_of(protocol: Protocol, pieces: &[String], body: &Value) -> Vec<Value> {
    let said = prefill(body).unwrap_or_default();
    let whole = pieces.concat();
    assert!(whole.starts_with(said), "{said:?} is no beginning of the answer");
    let (mut at, mut rest) = (0, Vec::new());
    for piece in pieces {
        let begins = said.len().saturating_sub(at).min(piece.len());
        at += piece.len();
        if begins < piece.len() {
            rest.push(&piece[begins..]);
        }
    }
    protocol.text(&rest)
}

async fn answer(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    let text = String::from_utf8(body.to_vec()).expect("bodies are UTF-8");
    let value: Value = serde_json::from_str(&text).expect("bodies are JSON");
    let number = shared.bodies.push(text);
    let events = match (shared.script)(&value, number) {
        Sent::Events(events) => events,
        Sent::Refusal(status, message) => {
            let error =
                json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}});
            return (StatusCode::from_u16(status).expect("a status"), error.to_string()).into_response();
        }
    };
    let held = shared.events.subscribe();
    let stream =
        futures::stream::unfold((events.into_iter().enumerate(), held), |(mut events, mut held)| async {
            let (at, event) = events.next()?;
            let _ = held.wait_for(|sent| at < *sent).await;
            let data = event.as_str().map_or_else(|| event.to_string(), str::to_owned);
            Some((Ok::<_, std::convert::Infallible>(format!("data: {data}\n\n")), (events, held)))
        });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(stream)).into_response()
}
