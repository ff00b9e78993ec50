//! A server that acts as Slack, as Telegram and as a webhook's receiver. It checks tokens and signatures,
//! enforces rate limits, and keeps what it receives.

use super::received::Received;
use super::within;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::Sha256;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;

pub const SLACK_TOKEN: &str = "xoxb-of-the-test";
pub const SLACK_SECRET: &str = "signing-secret-of-the-test";
pub const TELEGRAM_TOKEN: &str = "4242:AAE-of_the_test";
pub const TELEGRAM_SECRET: &str = "webhook-secret-of-the-test";
/// The Base64 of 24 bytes.
pub const WEBHOOK_SECRET: &str = "whsec_dGhlIHdlYmhvb2sgc2VjcmV0IG9mIHRlc3Rz";

/// A message that the server accepted.
#[derive(Clone, Debug)]
pub struct Sent {
    pub messenger: &'static str,
    /// Channel and thread; or chat; or conversation.
    pub place: String,
    /// The delivery's id, where the message carries it.
    pub key: Option<String>,
    pub text: String,
    pub body: Value,
}

/// A canned answer to the next request, in place of the correct one.
#[derive(Clone, Debug)]
pub struct Says {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
    /// Accept the message all the same.
    pub takes: bool,
}

impl Says {
    pub fn new(status: u16, body: &str) -> Says {
        Says { status, headers: Vec::new(), body: body.to_owned(), takes: false }
    }

    /// The wait that the answer asks for, in the header or in Telegram's field.
    fn wait(&self) -> Option<Duration> {
        let header = self.headers.iter().find(|(name, _)| *name == "retry-after");
        let told = serde_json::from_str::<Value>(&self.body).ok();
        let seconds = match header {
            Some((_, value)) => value.parse().ok(),
            None => told.and_then(|told| told["parameters"]["retry_after"].as_u64()),
        };
        seconds.map(Duration::from_secs)
    }
}

pub struct Messengers {
    pub url: String,
    shared: Arc<Shared>,
    server: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    sent: Received<Sent>,
    /// When each place last received messages.
    times: Mutex<HashMap<String, Vec<Instant>>>,
    says: Mutex<VecDeque<Says>>,
    /// Requests over a limit, which were answered with 429.
    too_many: Mutex<usize>,
    /// How many requests were received.
    asked: watch::Sender<usize>,
    /// The end of the wait that an answer asked for, and the number of requests before it.
    closed_until: Mutex<Option<Instant>>,
    too_early: Mutex<usize>,
    scopes: Mutex<String>,
}

impl Messengers {
    #[expect(clippy::unused_async, reason = "tests start every kind of server with `.await`")]
    pub async fn start() -> Messengers {
        let listener = super::servers::listen();
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let shared = Arc::new(Shared::default());
        *shared.scopes.lock().unwrap() = "chat:write,channels:history,metadata.message:read".to_owned();
        let router = Router::new()
            .route("/api/chat.postMessage", post(slack_post))
            .route("/api/conversations.replies", get(slack_replies))
            .route("/api/conversations.history", get(slack_replies))
            .route("/{bot}/sendMessage", post(telegram_send))
            .route("/replies", post(receive_reply))
            .with_state(Arc::clone(&shared));
        let server = super::servers::runtime()
            .spawn(async move { axum::serve(listener, router).await.expect("it serves") });
        Messengers { url, shared, server }
    }

    /// The messages accepted so far.
    pub fn sent(&self) -> Vec<Sent> {
        self.shared.sent.all()
    }

    pub fn texts(&self) -> Vec<String> {
        self.sent().into_iter().map(|sent| sent.text).collect()
    }

    pub async fn has(&self, count: usize) {
        self.until(&format!("{count} messages to be sent"), |sent| sent.len() >= count).await;
    }

    /// Answers the next request like this. Several answers are used in their order.
    pub fn says(&self, says: Says) {
        self.shared.says.lock().unwrap().push_back(says);
    }

    pub fn too_many(&self) -> usize {
        *self.shared.too_many.lock().unwrap()
    }

    pub fn asked(&self) -> usize {
        *self.shared.asked.borrow()
    }

    /// Waits until `times` requests have arrived.
    pub async fn is_asked(&self, times: usize) {
        let mut asked = self.shared.asked.subscribe();
        let asked = asked.wait_for(|asked| *asked >= times);
        within(&format!("{times} requests"), asked).await.expect("the server counts");
    }

    /// Waits until these messages are sent.
    pub async fn until(&self, what: &str, are_sent: impl FnMut(&[Sent]) -> bool) {
        self.shared.sent.until(what, are_sent).await;
    }

    /// Requests that came before the end of the wait that an answer had asked for.
    pub fn too_early(&self) -> usize {
        *self.shared.too_early.lock().unwrap()
    }

    /// Sets the scopes of Slack's bot.
    pub fn scopes(&self, scopes: &str) {
        *self.shared.scopes.lock().unwrap() = scopes.to_owned();
    }
}

impl Drop for Messengers {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Shared {
    /// Takes the next canned answer, if any. With one, the message is accepted only if the answer says so.
    fn begins(&self) -> Option<Says> {
        self.asked.send_modify(|asked| *asked += 1);
        if self.closed_until.lock().unwrap().is_some_and(|until| Instant::now() < until) {
            *self.too_early.lock().unwrap() += 1;
        }
        let says = self.says.lock().unwrap().pop_front();
        if let Some(wait) = says.as_ref().and_then(Says::wait) {
            *self.closed_until.lock().unwrap() = Some(Instant::now() + wait);
        }
        says
    }

    /// Returns whether this place may receive a message now: at most `most` in `window`. The windows are half as long as the
    /// messengers' own: a sender keeps to their limits by its clock, and a busy machine may hold a request up.
    fn passes(&self, place: &str, most: usize, window: Duration) -> bool {
        let mut times = self.times.lock().unwrap();
        let all = times.entry(place.to_owned()).or_default();
        let now = Instant::now();
        let recent = all.iter().filter(|at| now - **at < window).count();
        if recent >= most {
            *self.too_many.lock().unwrap() += 1;
            return false;
        }
        all.push(now);
        true
    }

    fn take(&self, sent: Sent) {
        self.sent.push(sent);
    }
}

fn answer(says: &Says) -> Response {
    let status = StatusCode::from_u16(says.status).expect("a status");
    let mut response = (status, says.body.clone()).into_response();
    for (name, value) in &says.headers {
        response.headers_mut().insert(*name, value.parse().expect("a header"));
    }
    response
}

fn retry_after(body: Value) -> Response {
    (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")], body.to_string()).into_response()
}

fn is_slacks(headers: &HeaderMap) -> bool {
    headers.get("authorization").is_some_and(|value| value == &format!("Bearer {SLACK_TOKEN}"))
}

async fn slack_post(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let said = shared.begins();
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    if !is_slacks(&headers) {
        return json!({"ok": false, "error": "invalid_auth"}).to_string().into_response();
    }
    let channel = body["channel"].as_str().expect("a channel").to_owned();
    if let Some(says) = &said
        && !says.takes
    {
        return answer(says);
    }
    let within = Duration::from_millis(500);
    if !shared.passes(&format!("slack {channel}"), 1, within) {
        return retry_after(json!({"ok": false, "error": "ratelimited"}));
    }
    let thread = body["thread_ts"].as_str().map(|ts| format!("/{ts}")).unwrap_or_default();
    let key = body["metadata"]["event_payload"]["delivery_id"].as_str().map(str::to_owned);
    let text = body["text"].as_str().expect("a text").to_owned();
    shared.take(Sent { messenger: "slack", place: format!("{channel}{thread}"), key, text, body });
    match &said {
        Some(says) => answer(says),
        None => json!({"ok": true, "channel": channel, "ts": "99.000001"}).to_string().into_response(),
    }
}

/// The thread's messages, three per page. They include the metadata if the token's scopes allow it.
async fn slack_replies(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    shared.asked.send_modify(|asked| *asked += 1);
    if !is_slacks(&headers) {
        return json!({"ok": false, "error": "invalid_auth"}).to_string().into_response();
    }
    let scopes = shared.scopes.lock().unwrap().clone();
    if !scopes.contains(":history") {
        let error = json!({"ok": false, "error": "missing_scope", "needed": "channels:history"});
        return ([("x-oauth-scopes", scopes)], error.to_string()).into_response();
    }
    let thread = query.get("ts").map(|ts| format!("/{ts}")).unwrap_or_default();
    let place = format!("{}{thread}", query["channel"]);
    let mut messages: Vec<Value> =
        (0..4).map(|n| json!({"ts": n.to_string(), "text": "of a person"})).collect();
    for sent in shared.sent.all().iter().filter(|sent| sent.place == place) {
        let mut message = json!({"ts": "99.000001", "text": sent.text});
        if scopes.contains("metadata.message:read") && query["include_all_metadata"] == "true" {
            message["metadata"] = sent.body["metadata"].clone();
        }
        messages.push(message);
    }
    let from: usize = query.get("cursor").map_or(0, |cursor| cursor.parse().expect("a cursor of ours"));
    let page: Vec<&Value> = messages.iter().skip(from).take(3).collect();
    let more = from + 3 < messages.len();
    let cursor = if more { (from + 3).to_string() } else { String::new() };
    let body =
        json!({"ok": true, "messages": page, "has_more": more, "response_metadata": {"next_cursor": cursor}});
    ([("x-oauth-scopes", scopes)], body.to_string()).into_response()
}

async fn telegram_send(State(shared): State<Arc<Shared>>, Path(bot): Path<String>, body: Bytes) -> Response {
    let said = shared.begins();
    let error = |status: u16, text: &str| {
        let body = json!({"ok": false, "error_code": status, "description": text});
        (StatusCode::from_u16(status).expect("a status"), body.to_string()).into_response()
    };
    if bot != format!("bot{TELEGRAM_TOKEN}") {
        return error(401, "Unauthorized");
    }
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let chat = body["chat_id"].as_i64().expect("a chat");
    let text = body["text"].as_str().expect("a text").to_owned();
    if text.is_empty() || text.encode_utf16().count() > 4096 {
        return error(400, "Bad Request: message is too long");
    }
    if let Some(says) = &said
        && !says.takes
    {
        return answer(says);
    }
    let window = Duration::from_millis(500);
    // The limit of 20 per minute, checked over a twentieth of a minute.
    let in_group = chat >= 0 || shared.passes(&format!("group {chat}"), 2, Duration::from_secs(3));
    if !in_group || !shared.passes("bot", 30, window) || !shared.passes(&format!("chat {chat}"), 1, window) {
        let told = json!({"ok": false, "error_code": 429, "description": "Too Many Requests: retry after 1",
            "parameters": {"retry_after": 1}});
        return (StatusCode::TOO_MANY_REQUESTS, told.to_string()).into_response();
    }
    shared.take(Sent { messenger: "telegram", place: chat.to_string(), key: None, text, body });
    match &said {
        Some(says) => answer(says),
        None => json!({"ok": true, "result": {"message_id": 1}}).to_string().into_response(),
    }
}

async fn receive_reply(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let said = shared.begins();
    let header =
        |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let (id, timestamp) = (header("webhook-id"), header("webhook-timestamp"));
    let text = String::from_utf8(body.to_vec()).expect("UTF-8");
    let now = chrono::Utc::now().timestamp();
    let fresh = timestamp.parse::<i64>().is_ok_and(|at| (at - now).abs() < 60);
    if !fresh || header("webhook-signature") != webhook_signature(WEBHOOK_SECRET, &id, &timestamp, &text) {
        return (StatusCode::UNAUTHORIZED, "unsigned").into_response();
    }
    if let Some(says) = &said
        && !says.takes
    {
        return answer(says);
    }
    let body: Value = serde_json::from_str(&text).expect("JSON");
    let place = body["data"]["conversation_id"].as_str().expect("a conversation").to_owned();
    let text = body["data"]["text"].as_str().expect("a text").to_owned();
    shared.take(Sent { messenger: "webhook", place, key: Some(id), text, body });
    said.as_ref().map_or_else(|| StatusCode::NO_CONTENT.into_response(), answer)
}

/// The `v1,…` signature of Standard Webhooks, computed here without the product's code.
pub fn webhook_signature(secret: &str, id: &str, timestamp: &str, body: &str) -> String {
    let key = STANDARD.decode(secret.trim_start_matches("whsec_")).expect("Base64");
    format!("v1,{}", STANDARD.encode(hmac(&key, &format!("{id}.{timestamp}.{body}"))))
}

/// Slack's `v0=…` signature.
pub fn slack_signature(secret: &str, timestamp: &str, body: &str) -> String {
    format!("v0={}", hex::encode(hmac(secret.as_bytes(), &format!("v0:{timestamp}:{body}"))))
}

fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}
