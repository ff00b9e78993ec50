//! Sends one request to a messenger and reads the answer.

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{ClientBuilder, RequestBuilder, StatusCode};
use serde_json::Value;
use std::time::Duration;
use wakeful_engine::channel::SendError;
use wakeful_engine::web::{self, Reach};

/// The largest answer that is read, in bytes.
const ANSWER_BYTES: usize = 8 << 20;

/// The longest time that a messenger can make us wait. After that we ask again.
pub const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// The wait after a 429 that does not say how long to wait.
const UNTOLD_WAIT: Duration = Duration::from_secs(30);

/// What a messenger answered.
pub(super) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: Vec<u8>,
}

/// A client that opens a new connection for each request.
pub(super) fn client(reach: Reach<'_>) -> ClientBuilder {
    web::client(reach)
        .timeout(Duration::from_secs(30))
        // The peer may close a kept connection just as we use it, and then we cannot know whether the message
        // went out.
        .pool_max_idle_per_host(0)
}

/// Sends a request and reads the answer.
///
/// # Errors
/// `Later` when no connection was made, `Unknown` when one broke. The text never shows the URL, which may
/// hold a token.
pub(super) async fn ask(messenger: &str, request: RequestBuilder) -> Result<Answer, SendError> {
    let failed = |error: reqwest::Error| {
        let error = error.without_url();
        let text = format!("{messenger} did not answer: {}", word(&web::causes(&error)));
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
    /// The body as JSON; `null` if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The wait that `Retry-After` asks for, in seconds or as a date. At least a second, and at most an hour:
    /// otherwise one answer could close a channel for years.
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

    /// The wait that the answer asks for, or a default.
    pub fn wait(&self) -> Duration {
        self.retry_after().unwrap_or(UNTOLD_WAIT)
    }

    /// Maps a 5xx status to an error. The server may have failed after it accepted the message, or the one behind the gateway may
    /// have it. Only an answer that says that the request was not taken is tried again: 503, and that of a proxy that did not
    /// reach the server.
    pub fn server_error(&self, messenger: &str) -> SendError {
        let text = format!("{messenger} answered {}", self.status);
        match self.status.as_u16() {
            503 | 521 | 522 | 523 | 525 | 526 => SendError::Later(text),
            _ => SendError::Unknown(text),
        }
    }
}

/// Text from outside, made safe for our own messages: short, and on one line.
pub(super) fn word(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_that_did_not_take_the_message_is_sent_it_again() {
        for (status, is_sent_again) in
            [(500, false), (502, false), (503, true), (504, false), (520, false), (521, true), (524, false)]
        {
            let status = StatusCode::from_u16(status).unwrap();
            let answer = Answer { status, headers: HeaderMap::new(), body: Vec::new() };
            let error = answer.server_error("Slack");
            assert_eq!(matches!(error, SendError::Later(_)), is_sent_again, "{error:?}");
        }
    }
}
