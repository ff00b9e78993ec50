//! An HTTP client that knows Wakeful's API.

use super::{documented, eventually};
use eventsource_stream::{Event, Eventsource};
use futures::{Stream, StreamExt};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use std::sync::OnceLock;

/// The client of this test's process: to make one takes 20 ms. Each request has a connection of its own, since the servers
/// of tests are killed.
pub fn http() -> reqwest::Client {
    static CLIENT: OnceLock<reqwest::Client> = OnceLock::new();
    let make = || reqwest::Client::builder().pool_max_idle_per_host(0).build().expect("a client");
    CLIENT.get_or_init(make).clone()
}

#[derive(Clone)]
pub struct Client {
    pub url: String,
    http: reqwest::Client,
}

impl Client {
    pub fn new(url: &str) -> Client {
        Client { url: url.to_owned(), http: reqwest::Client::new() }
    }

    pub fn get_request(&self, path: &str) -> RequestBuilder {
        self.http.get(format!("{}{path}", self.url))
    }

    pub fn post_request(&self, path: &str) -> RequestBuilder {
        self.http.post(format!("{}{path}", self.url))
    }

    /// Status and JSON body.
    pub async fn get(&self, path: &str) -> (StatusCode, Value) {
        read(Method::GET, self.get_request(path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        read(Method::POST, self.post_request(path).body(body.to_string())).await
    }

    /// Posts a chat message that must be accepted, and returns the answer.
    pub async fn chat(&self, conversation: &str, text: &str) -> Value {
        let body = json!({"user_id": "ann", "text": text});
        let (status, answer) = self.post(&format!("/v1/chat/{conversation}/messages"), &body).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
        answer
    }

    pub async fn session(&self, session_id: &str) -> Value {
        let (status, session) = self.get(&format!("/v1/sessions/{session_id}")).await;
        assert_eq!(status, StatusCode::OK, "{session}");
        session
    }

    /// Waits until the session has this status, and returns the session. A server without a free connection says 503, and is asked
    /// again: a process that a test has stopped may hold what the others wait for.
    pub async fn wait_for(&self, session_id: &str, status: &str) -> Value {
        eventually(&format!("session {session_id} to be {status}"), || async {
            let (code, session) = self.get(&format!("/v1/sessions/{session_id}")).await;
            assert!(matches!(code, StatusCode::OK | StatusCode::SERVICE_UNAVAILABLE), "{session}");
            (session["status"] == status).then_some(session)
        })
        .await
    }

    /// The session's stream of events after number `last`.
    pub async fn stream(
        &self,
        session_id: &str,
        last: Option<i64>,
    ) -> impl Stream<Item = Event> + Unpin + use<> {
        let mut request = self.get_request(&format!("/v1/sessions/{session_id}/stream"));
        if let Some(last) = last {
            request = request.header("Last-Event-ID", last.to_string());
        }
        let response = request.send().await.expect("the server answers");
        assert_eq!(response.status(), StatusCode::OK);
        let events = response.bytes_stream().eventsource();
        Box::pin(
            events
                .take_while(|event| std::future::ready(event.is_ok()))
                .filter_map(|event| async { event.ok() }),
        )
    }
}

async fn read(method: Method, request: RequestBuilder) -> (StatusCode, Value) {
    let response = request.send().await.expect("the server answers");
    let (status, path) = (response.status(), response.url().path().to_owned());
    let text = response.text().await.expect("a body");
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    documented::check(&method, &path, status, &body);
    (status, body)
}

/// The texts of the session's messages with one role.
pub fn texts(session: &Value, role: &str) -> Vec<String> {
    let messages = session["messages"].as_array().expect("messages");
    let of_role = messages.iter().filter(|message| message["role"] == role);
    of_role.map(|message| message["text"].as_str().expect("text").to_owned()).collect()
}

/// The session's message numbers.
pub fn numbers(session: &Value) -> Vec<i64> {
    let messages = session["messages"].as_array().expect("messages");
    messages.iter().map(|message| message["message_number"].as_i64().expect("a number")).collect()
}
