//! One request to a messenger, and what became of it.

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{ClientBuilder, RequestBuilder, StatusCode};
use serde_json::Value;
use std::time::Duration;
use wakeful_engine::channel::SendError;

/// The largest answer that is read.
const ANSWER_BYTES: usize = 8 << 20;

/// The longest that a messenger may ask us to wait: then it is asked again.
pub const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// How long to leave a messenger alone that takes no more and does not say for how long.
const UNTOLD_WAIT: Duration = Duration::from_secs(30);

/// What a messenger answered.
pub(super) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: Vec<u8>,
}

/// A client whose requests either begin on a connection of their own or not at all.
pub(super) fn client() -> ClientBuilder {
    reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(10))
        .timeout(Duration::from_secs(30))
        // A connection that was kept may be closed just as it is used, and then nobody can say whether the message went out.
        .pool_max_idle_per_host(0)
        // A message goes where the configuration says, and nowhere else.
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("wakeful/", env!("CARGO_PKG_VERSION")))
}

/// Sends it and reads the answer.
///
/// # Errors
/// `Later` where no connection came about, `Unknown` where one broke off. None of them shows the address: it may hold a token.
pub(super) async fn ask(messenger: &str, request: RequestBuilder) -> Result<Answer, SendError> {
    let failed = |error: reqwest::Error| {
        let error = error.without_url();
        let text = format!("{messenger} did not answer: {}", chain(&error));
        if error.is_builder() {
            SendError::Refused(text)
        } else if error.is_connect() {
            SendError::Later(text)
        } else {
            SendError::Unknown(text)
        }
    };
    let mut response = request.send().await.map_err(failed)?;
    let (status, headers) = (response.status(), response.headers().clone());
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        body.extend_from_slice(&chunk);
        if body.len() > ANSWER_BYTES {
            return Err(SendError::Unknown(format!(
                "{messenger} answered with more than {ANSWER_BYTES} bytes"
            )));
        }
    }
    Ok(Answer { status, headers, body })
}

impl Answer {
    /// The body, `null` if it is no JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// What `Retry-After` asks for: seconds, or a date. At least a second, and at most an hour: a channel that one answer has
    /// closed for years would be closed until the process ends.
    pub fn retry_after(&self) -> Option<Duration> {
        let text = self.headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
        let wait = match text.parse::<u64>() {
            Ok(seconds) => Duration::from_secs(seconds),
            Err(_) => {
                let at = chrono::DateTime::parse_from_rfc2822(text).ok()?;
                (at.with_timezone(&chrono::Utc) - chrono::Utc::now()).to_std().unwrap_or_default()
            }
        };
        Some(wait.clamp(Duration::from_secs(1), LONGEST_WAIT))
    }

    /// The same, or what is polite.
    pub fn wait(&self) -> Duration {
        self.retry_after().unwrap_or(UNTOLD_WAIT)
    }

    /// What a status of a failed server means: it did not, or nobody knows. A gateway that gave up says nothing of what is
    /// behind it.
    pub fn server_error(&self, messenger: &str) -> SendError {
        let text = format!("{messenger} answered {}", self.status);
        match self.status {
            StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => SendError::Unknown(text),
            _ => SendError::Later(text),
        }
    }
}

/// A word that came from outside, for a message of ours: short, and on one line.
pub(super) fn word(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    word(&text)
}
