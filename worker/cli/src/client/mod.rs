//! A client of a running server: sends a trigger as its real sender would, and waits for the sessions that it
//! wakes.
//!
//! `wakeful trigger` and the samples of `wakeful dev` use it. Both go through the public HTTP interface.

pub mod address;
pub mod readyz;
mod request;

pub use request::{Request, Trigger, Via};

use reqwest::{StatusCode, Url};
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;
use wakeful_engine::web::{self, Reach};

/// How long a server may take to answer one request.
const ANSWER: Duration = Duration::from_secs(30);
/// Interval between two reads of a session that is still busy.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A server, and the token for it.
#[derive(Clone, Debug)]
pub struct Client {
    url: Url,
    token: Option<SecretString>,
    /// The space that the requests are about; without one, the token's.
    space: Option<String>,
    http: reqwest::Client,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// The server refused the request.
    #[error("the server says {status}: {detail}")]
    Refused { status: StatusCode, detail: String },
    /// No complete answer came from the server.
    #[error("no answer from {url}: {reason}")]
    Unreachable { url: String, reason: String },
}

/// The server's answer to a trigger.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    pub status: StatusCode,
    /// The body parsed as JSON. A body that is not JSON becomes a JSON string.
    pub body: Value,
}

/// A session at rest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rested {
    pub session_id: String,
    pub status: String,
    /// The last text after the newest message that a user sees, or the question that it asks.
    pub reply: String,
    pub error: Option<String>,
    /// Reasons why the session's replies are not sent, such as mails that look like a loop.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub silenced: Vec<String>,
}

impl Client {
    /// Returns a client of the server at `url`, such as `http://127.0.0.1:7070`, or `None` when `url` is not
    /// an HTTP address.
    ///
    /// # Errors
    /// When the HTTP client cannot be built.
    pub fn new(url: &str, token: Option<SecretString>) -> Result<Option<Client>, reqwest::Error> {
        let Ok(url) = Url::parse(url) else { return Ok(None) };
        if !matches!(url.scheme(), "http" | "https") || url.cannot_be_a_base() {
            return Ok(None);
        }
        let http = web::client(Reach::Named(&[url.as_str()]))
            .connect_timeout(Duration::from_secs(5))
            .timeout(ANSWER)
            .build()?;
        Ok(Some(Client { url, token, space: None, http }))
    }

    /// The same server, for requests about a space.
    pub fn in_space(self, space: Option<&str>) -> Client {
        Client { space: space.map(str::to_owned), ..self }
    }

    /// Sends the request. A refusal is an error.
    ///
    /// # Errors
    /// [`Failed`].
    pub async fn send(&self, request: Request) -> Result<Taken, Failed> {
        let mut built = self.http.post(self.at(&request.path)).body(request.body);
        for (name, value) in request.headers {
            built = built.header(name, value);
        }
        // A signed webhook needs no token, so send none with it.
        let built = if request.signed { built } else { self.as_caller(built) };
        self.answer(built).await
    }

    /// Returns the session as `GET /v1/sessions/{id}` shows it.
    ///
    /// # Errors
    /// [`Failed`].
    pub async fn session(&self, session_id: &str) -> Result<Value, Failed> {
        let built = self.http.get(self.at(&["v1".into(), "sessions".into(), session_id.into()]));
        Ok(self.answer(self.as_caller(built)).await?.body)
    }

    /// Adds the token and the space.
    fn as_caller(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        let request = match &self.token {
            Some(token) => request.bearer_auth(token.expose_secret()),
            None => request,
        };
        match &self.space {
            Some(space) => request.header(wakeful_http::access::SPACE, space),
            None => request,
        }
    }

    /// Waits until the session rests, through any number of runs, and returns its last reply or question.
    ///
    /// # Errors
    /// [`Failed`] on a refusal, or when the server stays unreachable for longer than 30 s.
    pub async fn wait_until_rest(&self, session_id: &str) -> Result<Rested, Failed> {
        let mut silent_since = None;
        loop {
            match self.session(session_id).await {
                Ok(session) => {
                    silent_since = None;
                    let status = session["status"].as_str().unwrap_or_default();
                    if !matches!(status, "created" | "queued" | "running") {
                        return Ok(rested(session_id, status, &session));
                    }
                }
                // The server may be restarting, so an unreachable server is tolerated for a while.
                Err(Failed::Unreachable { url, reason }) => {
                    let since = *silent_since.get_or_insert_with(std::time::Instant::now);
                    if since.elapsed() > ANSWER {
                        return Err(Failed::Unreachable { url, reason });
                    }
                }
                Err(refused @ Failed::Refused { .. }) => return Err(refused),
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Appends `path` to the server's address, which may have a path of its own.
    fn at(&self, path: &[String]) -> Url {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        url
    }

    async fn answer(&self, request: reqwest::RequestBuilder) -> Result<Taken, Failed> {
        let unreachable = |error: reqwest::Error| Failed::Unreachable {
            url: self.url.origin().ascii_serialization(),
            reason: format!("{:#}", anyhow::Error::from(error.without_url())),
        };
        let response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        let text = response.text().await.map_err(unreachable)?;
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        if status.is_success() {
            return Ok(Taken { status, body });
        }
        let detail = body["detail"].as_str().or(body.as_str()).filter(|detail| !detail.is_empty());
        Err(Failed::Refused { status, detail: detail.unwrap_or("no reason was given").to_owned() })
    }
}

impl Taken {
    /// Returns the sessions that the answer names, each once.
    pub fn sessions(&self) -> Vec<String> {
        let mut found = Vec::new();
        collect(&self.body, &mut found);
        found
    }

    /// Returns whether the server had accepted the same trigger before.
    pub fn is_duplicate(&self) -> bool {
        self.status == StatusCode::OK && (self.body["duplicate"] == true || self.body["outcome"].is_string())
    }
}

fn collect(body: &Value, found: &mut Vec<String>) {
    match body {
        Value::Object(fields) => {
            if let Some(id) = fields.get("session_id").and_then(Value::as_str)
                && !found.iter().any(|one| one == id)
            {
                found.push(id.to_owned());
            }
            fields.values().for_each(|value| collect(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn rested(session_id: &str, status: &str, session: &Value) -> Rested {
    // What was said before the newest message from outside is not a reply to it.
    let after = session["messages"].as_array().into_iter().flatten().rev();
    let said = after.take_while(|message| message["role"] != "user" || message["internal"] == true).find(
        |message| {
            message["role"] == "assistant"
                && message["internal"] != true
                && message["text"].as_str().is_some_and(|text| !text.is_empty())
        },
    );
    let reply = session["question"].as_str().or_else(|| said.and_then(|message| message["text"].as_str()));
    Rested {
        session_id: session_id.to_owned(),
        status: status.to_owned(),
        reply: reply.unwrap_or_default().to_owned(),
        error: session["error"].as_str().map(str::to_owned),
        silenced: session["policy"]["loop_suspicion"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|reason| reason.as_str().map(str::to_owned))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_session_that_an_answer_names_is_found_once() {
        let taken = |body| Taken { status: StatusCode::ACCEPTED, body };
        assert_eq!(taken(json!({"session_id": "a", "run_id": "r"})).sessions(), ["a"]);
        let list = json!({"items": [{"session_id": "a"}, {"session_id": "b"}, {"session_id": "a"}]});
        assert_eq!(taken(list).sessions(), ["a", "b"]);
        assert!(taken(json!("ok")).sessions().is_empty());
    }

    #[test]
    fn a_servers_address_may_have_a_path_and_must_be_http() {
        let at = |url: &str| {
            let client = Client::new(url, None).unwrap()?;
            Some(client.at(&["v1".into(), "a/b".into()]).to_string())
        };
        assert_eq!(at("http://h:1/x/").as_deref(), Some("http://h:1/x/v1/a%2Fb"));
        assert_eq!(at("http://h").as_deref(), Some("http://h/v1/a%2Fb"));
        assert_eq!(at("ftp://h"), None);
        assert_eq!(at("localhost:7070"), None);
    }

    #[test]
    fn the_last_words_are_those_that_a_user_sees() {
        let session = json!({"error": null, "question": null, "messages": [
            {"role": "assistant", "text": "Hello.", "internal": false},
            {"role": "assistant", "text": "", "internal": false},
            {"role": "assistant", "text": "thinking", "internal": true},
        ]});
        assert_eq!(rested("s", "completed", &session).reply, "Hello.");
        let unanswered = json!({"messages": [
            {"role": "user", "text": "One."}, {"role": "assistant", "text": "An old reply."},
            {"role": "user", "text": "Two."}], "error": "it failed"});
        assert_eq!(rested("s", "failed", &unanswered).reply, "", "an old reply answers nothing");
        let asks = json!({"question": "Which?", "messages": session["messages"]});
        assert_eq!(rested("s", "waiting_input", &asks).reply, "Which?");
        assert!(rested("s", "completed", &asks).silenced.is_empty());
        let silenced = json!({"policy": {"loop_suspicion": ["a loop"]}});
        assert_eq!(rested("s", "completed", &silenced).silenced, ["a loop"]);
    }
}
