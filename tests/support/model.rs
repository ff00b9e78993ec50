//! A model server that speaks Chat Completions, keeps every request body, and can hold its answers.

use super::received::Received;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The answer to one request.
#[derive(Clone, Debug)]
pub enum Answer {
    Text(String),
    /// Tool calls: (name, arguments as JSON text).
    Calls(Vec<(String, String)>),
    /// An HTTP error.
    Error(u16),
    /// An HTTP error with this message.
    Refused(u16, String),
    /// An HTTP error of this type, without a message.
    RefusedAs(u16, String),
    /// An HTTP error that asks for a pause of this many milliseconds.
    Busy(u16, u64),
    /// Text whose stream ends without its end marker.
    Cut(String),
    /// Nothing, for as long as the caller waits.
    Never,
    /// Nothing until this becomes true, and then the text.
    Late(watch::Receiver<bool>, String),
}

impl Answer {
    pub fn text(text: &str) -> Answer {
        Answer::Text(text.to_owned())
    }

    pub fn call(name: &str, arguments: Value) -> Answer {
        Answer::Calls(vec![(name.to_owned(), arguments.to_string())])
    }
}

type Script = dyn Fn(&Value, usize) -> Answer + Send + Sync;

/// A running model server.
pub struct ModelServer {
    pub url: String,
    shared: Arc<Shared>,
    server: tokio::task::JoinHandle<()>,
}

struct Shared {
    bodies: Received<String>,
    /// When each of them came.
    arrivals: Mutex<Vec<Instant>>,
    script: Box<Script>,
    /// From this request number on, answers stop after their first piece.
    held_from: watch::Sender<usize>,
    /// Milliseconds between two pieces of an answer.
    pace_ms: AtomicU64,
}

impl ModelServer {
    /// Answers each request with the result of `script` for its body and its number (from 0). Where requests
    /// may be repeated, the answer should depend only on the body.
    #[expect(clippy::unused_async, reason = "tests start every kind of server with `.await`")]
    pub async fn start(script: impl Fn(&Value, usize) -> Answer + Send + Sync + 'static) -> ModelServer {
        let shared = Arc::new(Shared {
            bodies: Received::default(),
            arrivals: Mutex::default(),
            script: Box::new(script),
            held_from: watch::channel(usize::MAX).0,
            pace_ms: AtomicU64::new(0),
        });
        let listener = super::servers::listen();
        let url = format!("http://{}/v1", listener.local_addr().expect("an address"));
        let router =
            Router::new().route("/v1/chat/completions", post(complete)).with_state(Arc::clone(&shared));
        let server = super::servers::runtime().spawn(async move {
            axum::serve(listener, router).await.expect("the model server serves");
        });
        ModelServer { url, shared, server }
    }

    /// A model that counts the assistant messages since the last user text. That count selects one of
    /// `answers`; beyond the end it is the last one.
    pub async fn turns(answers: Vec<Answer>) -> ModelServer {
        ModelServer::start(move |body, _| {
            let answered = turns_since_user(body);
            answers[answered.min(answers.len() - 1)].clone()
        })
        .await
    }

    /// Every request body so far, as it came.
    pub fn bodies(&self) -> Vec<String> {
        self.shared.bodies.all()
    }

    /// When each request came.
    pub fn arrivals(&self) -> Vec<Instant> {
        self.shared.arrivals.lock().expect("no handler panics").clone()
    }

    /// Waits until `times` requests have arrived.
    pub async fn asked(&self, times: usize) {
        self.shared.bodies.until(&format!("{times} model calls"), |bodies| bodies.len() >= times).await;
    }

    /// Waits until a request contains `text` followed by a quotation mark.
    pub async fn asked_about(&self, text: &str) {
        let quoted = format!("{text}\"");
        let is_there = |bodies: &[String]| bodies.iter().any(|body| body.contains(&quoted));
        self.shared.bodies.until(&format!("a model call about {text}"), is_there).await;
    }

    /// Makes answers stop after their first piece.
    pub fn hold(&self) {
        self.hold_from(0);
    }

    /// Makes the answers to request `number` (from 0) and to all later ones stop after their first piece.
    pub fn hold_from(&self, number: usize) {
        self.shared.held_from.send_replace(number);
    }

    /// Pauses between the pieces of an answer, to make room for a crash. No test depends on the length.
    pub fn pace(&self, pause: Duration) {
        self.shared.pace_ms.store(pause.as_millis() as u64, Ordering::SeqCst);
    }

    /// Lets held answers continue.
    pub fn release(&self) {
        self.shared.held_from.send_replace(usize::MAX);
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The number of assistant messages after the newest user message.
pub fn turns_since_user(body: &Value) -> usize {
    let messages = body["messages"].as_array().expect("messages");
    let since = messages.iter().rposition(|message| message["role"] == "user").map_or(0, |at| at + 1);
    messages[since..].iter().filter(|message| message["role"] == "assistant").count()
}

async fn complete(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    let text = String::from_utf8(body.to_vec()).expect("bodies are UTF-8");
    let value: Value = serde_json::from_str(&text).expect("bodies are JSON");
    let number = {
        let mut arrivals = shared.arrivals.lock().expect("no handler panics");
        arrivals.push(Instant::now());
        shared.bodies.push(text)
    };
    let answer = match (shared.script)(&value, number) {
        Answer::Late(mut go, text) => {
            let _ = go.wait_for(|go| *go).await;
            Answer::Text(text)
        }
        answer => answer,
    };
    let refused = match &answer {
        Answer::Error(status) => Some((*status, json!({"message": "as told"}))),
        Answer::Refused(status, message) => Some((*status, json!({"message": message}))),
        Answer::RefusedAs(status, kind) => Some((*status, json!({"type": kind}))),
        _ => None,
    };
    if let Some((status, error)) = refused {
        let status = StatusCode::from_u16(status).expect("a status");
        return (status, json!({"error": error}).to_string()).into_response();
    }
    if matches!(answer, Answer::Never) {
        std::future::pending::<()>().await;
    }
    let turn = value["messages"].as_array().map_or(0, Vec::len);
    if let Answer::Busy(status, pause_ms) = answer {
        let status = StatusCode::from_u16(status).expect("a status");
        let pause = [("retry-after-ms", pause_ms.to_string())];
        return (status, pause, json!({"error": {"message": "as told"}}).to_string()).into_response();
    }
    let (pieces, end) = pieces(&answer, turn);
    let held = shared.held_from.subscribe();
    let pace = Duration::from_millis(shared.pace_ms.load(Ordering::SeqCst));
    let stream = futures::stream::unfold(
        (pieces.into_iter(), held, 0),
        move |(mut pieces, mut held, sent)| async move {
            let piece = pieces.next()?;
            if sent > 0 {
                let _ = held.wait_for(|from| number < *from).await;
                // A slow server, where a test sets a pace.
                tokio::time::sleep(pace).await;
            }
            Some((Ok::<_, std::convert::Infallible>(format!("data: {piece}\n\n")), (pieces, held, sent + 1)))
        },
    );
    let tail = futures::stream::iter(end.then(|| Ok("data: [DONE]\n\n".to_owned())));
    let body = Body::from_stream(futures::StreamExt::chain(stream, tail));
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

fn pieces(answer: &Answer, turn: usize) -> (Vec<String>, bool) {
    let chunk = |delta: Value, finish: Value| {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).to_string()
    };
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 40}}})
    .to_string();
    match answer {
        Answer::Text(text) | Answer::Cut(text) => {
            let (first, rest) = text.split_at(text.len() / 2);
            let mut pieces = vec![chunk(json!({"role": "assistant", "content": first}), Value::Null)];
            pieces.push(chunk(json!({"content": rest}), Value::Null));
            let whole = matches!(answer, Answer::Text(_));
            if whole {
                pieces.push(chunk(json!({}), json!("stop")));
                pieces.push(usage);
            }
            (pieces, whole)
        }
        Answer::Calls(calls) => {
            let calls: Vec<Value> = calls
                .iter()
                .enumerate()
                .map(|(index, (name, arguments))| {
                    json!({"index": index, "id": format!("call_{turn}_{index}"), "type": "function",
                        "function": {"name": name, "arguments": arguments}})
                })
                .collect();
            let pieces = vec![
                chunk(json!({"tool_calls": calls}), Value::Null),
                chunk(json!({}), json!("tool_calls")),
                usage,
            ];
            (pieces, true)
        }
        Answer::Error(_)
        | Answer::Refused(..)
        | Answer::RefusedAs(..)
        | Answer::Busy(..)
        | Answer::Never
        | Answer::Late(..) => {
            unreachable!("they are no stream")
        }
    }
}
