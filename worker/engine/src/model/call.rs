//! One streamed call: posts a body, reads server-sent events, and turns every failure into a [`Fault`].
//!
//! All providers use this module.

use super::provider_error::{ProviderError, bad_response, shorten};
use bytes::Bytes;
use eventsource_stream::{EventStreamError, Eventsource};
use futures::{Stream, StreamExt};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use secrecy::SecretString;
use serde_json::Value;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{is_too_deep, storable, without_nul};

/// Address of a provider, and its time limits.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub client: reqwest::Client,
    /// Without a trailing slash; each provider's file says what it appends.
    pub base_url: String,
    /// `None` for servers that need no key.
    pub api_key: Option<SecretString>,
    /// Longest silence, both before the response's head and between two of its bytes. Keep-alives end a
    /// silence.
    pub idle_timeout_ms: u64,
    /// Longest duration of the whole call.
    pub total_timeout_ms: u64,
}

/// Largest answer accepted. Without this limit, one server could use up the worker's memory.
const MAX_BODY_BYTES: usize = 32 << 20;
const MAX_ERROR_BYTES: usize = 64 << 10;
const MAX_RETRY_AFTER_MS: f64 = 86_400_000.0;
/// How long a response may take to end after its last event.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Why the byte stream ended early.
#[derive(Debug)]
enum StreamError {
    Idle,
    TooLarge,
    Broken,
}

impl std::fmt::Display for StreamError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}

impl std::error::Error for StreamError {}

type Data = Result<String, EventStreamError<StreamError>>;

/// The events of one response.
pub struct Events {
    events: Pin<Box<dyn Stream<Item = Data> + Send>>,
    deadline: Instant,
    idle_timeout_ms: u64,
    total_timeout_ms: u64,
    /// An event came. The provider answers from there on, and what it wrote is paid for.
    began: bool,
}

impl Events {
    /// Returns the `data` of the next event.
    ///
    /// # Errors
    /// [`Fault::StreamCut`] when the stream ends: the caller stops at its protocol's end marker, so any end
    /// seen here comes too early. [`Fault::Timeout`] before the first event, [`Fault::Stalled`] after it.
    pub async fn next(&mut self) -> Result<String, Fault> {
        let late = |began: bool, after_ms: u64| match began {
            true => Fault::Stalled { after_ms },
            false => Fault::Timeout { after_ms },
        };
        let event = timeout_at(self.deadline, self.events.next())
            .await
            .map_err(|_| late(self.began, self.total_timeout_ms))?;
        match event {
            Some(Ok(data)) => {
                self.began = true;
                Ok(data)
            }
            None => Err(Fault::StreamCut),
            Some(Err(EventStreamError::Transport(StreamError::Idle))) => {
                Err(late(self.began, self.idle_timeout_ms))
            }
            Some(Err(EventStreamError::Transport(StreamError::Broken))) => Err(Fault::StreamCut),
            Some(Err(EventStreamError::Transport(StreamError::TooLarge))) => {
                Err(bad_response(format!("more than {MAX_BODY_BYTES} bytes")))
            }
            Some(Err(error @ (EventStreamError::Utf8(_) | EventStreamError::Parser(_)))) => {
                Err(bad_response(error))
            }
        }
    }

    /// Reads the response to its end after its last event, beside what the caller goes on to do. A connection whose response was
    /// not read to its end is closed, and the next call would have to make a new one.
    pub fn end(mut self) {
        tokio::spawn(timeout(
            ENDS_WITHIN,
            async move { while let Some(Ok(_)) = self.events.next().await {} },
        ));
    }
}

/// Sends `body` to `url` and waits for the head of a successful response.
///
/// # Errors
/// The fault for the status and the body of any other response.
pub async fn open(
    endpoint: &Endpoint,
    url: String,
    headers: HeaderMap,
    body: Vec<u8>,
) -> Result<Events, Fault> {
    let idle = Duration::from_millis(endpoint.idle_timeout_ms);
    let total = Duration::from_millis(endpoint.total_timeout_ms);
    let deadline = Instant::now() + total;

    let request = endpoint
        .client
        .post(url)
        .headers(headers)
        .header(CONTENT_TYPE, "application/json")
        .header(ACCEPT, "text/event-stream")
        .body(body);
    let first = idle.min(total);
    let response = timeout(first, request.send())
        .await
        .map_err(|_| Fault::Timeout { after_ms: first.as_millis() as u64 })?
        .map_err(|error| not_sent(error, first))?;

    let status = response.status().as_u16();
    if response.status().is_redirection() {
        let message = "the server redirects to another address, and redirects are not followed: set the \
                       provider's base_url to that address if you trust it";
        return Err(Fault::Refused { status, message: message.to_owned() });
    }
    let is_json = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|kind| kind.starts_with("application/json"));
    if status != 200 || is_json {
        let retry_after_ms = retry_after_ms(response.headers(), chrono::Utc::now());
        // The status is the important part. Read only as much of the body as arrives in time.
        let mut body = Vec::new();
        let mut bytes = response.bytes_stream();
        let _ = timeout(first, async {
            while let Some(Ok(chunk)) = bytes.next().await {
                body.extend_from_slice(&chunk);
                if body.len() > MAX_ERROR_BYTES {
                    break;
                }
            }
        })
        .await;
        let error = ProviderError::read(&body);
        if status == 200 && error.is_none() {
            return Err(bad_response("JSON where a stream of events was asked for"));
        }
        let error = error.unwrap_or_else(|| ProviderError::plain(&body));
        let status = if status == 200 { error.status() } else { status };
        return Err(error.fault(status, retry_after_ms));
    }

    let mut read = 0_usize;
    let bytes = tokio_stream::StreamExt::timeout(response.bytes_stream(), idle).map(move |chunk| {
        let chunk: Bytes = chunk.map_err(|_| StreamError::Idle)?.map_err(|_| StreamError::Broken)?;
        read += chunk.len();
        if read > MAX_BODY_BYTES { Err(StreamError::TooLarge) } else { Ok(chunk) }
    });
    Ok(Events {
        events: Box::pin(bytes.eventsource().map(|event| event.map(|event| event.data))),
        deadline,
        idle_timeout_ms: endpoint.idle_timeout_ms,
        total_timeout_ms: endpoint.total_timeout_ms,
        began: false,
    })
}

/// Returns a header value that logs do not show.
///
/// # Errors
/// [`Fault::NotConfigured`] if the key holds characters that a header cannot hold, such as a line break.
pub fn secret_header(value: String) -> Result<HeaderValue, Fault> {
    let mut value = HeaderValue::try_from(value).map_err(|_| Fault::NotConfigured {
        message: "the API key holds characters that cannot be sent in a header".to_owned(),
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// Parses the text of a call's arguments. `truncated` means that the output limit may have cut this text.
///
/// Returns the text as `Err` if it is not a complete JSON object, is nested too deep to be stored, or has an integer that would lose
/// digits. A call that was cut is kept as malformed: it never runs, and the model is told why. If it were dropped, the reply would
/// look as if the model had tried no call, and would be sampled again. An empty text means no arguments, unless the output limit may
/// have cut it.
pub fn arguments(text: String, truncated: bool) -> Result<Value, String> {
    if text.trim().is_empty() {
        return if truncated { Err(text) } else { Ok(Value::Object(serde_json::Map::new())) };
    }
    let loses_digits = |value: &Value| has_large_float(value) && has_large_integer(&text);
    match serde_json::from_str(&text) {
        Ok(value @ Value::Object(_)) if !is_too_deep(&value) && !loses_digits(&value) => Ok(storable(value)),
        Ok(_) | Err(_) => Err(without_nul(text)),
    }
}

/// Returns whether one of the numbers may have been an integer beyond 64 bits, which is read as a float. Few values have one, so the
/// text of others is not read again.
fn has_large_float(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64() && number.as_f64().is_some_and(|float| float.abs() >= 9e18),
        Value::Array(items) => items.iter().any(has_large_float),
        Value::Object(map) => map.values().any(has_large_float),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// Returns whether valid JSON has an integer beyond 64 bits outside its strings.
fn has_large_integer(json: &str) -> bool {
    let mut rest = json;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        rest = &rest[at..];
        if let Some(text) = rest.strip_prefix('"') {
            let mut is_escaped = false;
            let end = text.find(|c: char| {
                let ends = c == '"' && !is_escaped;
                is_escaped = c == '\\' && !is_escaped;
                ends
            });
            rest = end.map_or("", |end| &text[end + 1..]);
            continue;
        }
        let is_part = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
        let (number, after) = rest.split_at(rest.find(|c: char| !is_part(c)).unwrap_or(rest.len()));
        let is_integer = !number.contains(['.', 'e', 'E']);
        if is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
            return true;
        }
        rest = after;
    }
    false
}

/// Returns a token count, if the field exists.
pub fn tokens(usage: &Value, field: &str) -> Option<i64> {
    usage.get(field)?.as_i64().map(|count| count.max(0))
}

fn not_sent(error: reqwest::Error, limit: Duration) -> Fault {
    if error.is_timeout() {
        return Fault::Timeout { after_ms: limit.as_millis() as u64 };
    }
    let is_builder = error.is_builder();
    let error = anyhow::Error::from(error.without_url());
    let message = shorten(&format!("{error:#}"));
    if is_builder { Fault::NotConfigured { message } } else { Fault::Unreachable { message } }
}

/// Reads `Retry-After` in seconds or as an HTTP date, or OpenAI's `retry-after-ms`.
fn retry_after_ms(headers: &HeaderMap, now: chrono::DateTime<chrono::Utc>) -> Option<u64> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite());
    let ms = text("retry-after-ms").and_then(number).or_else(|| {
        let after = text(RETRY_AFTER.as_str())?;
        let date = || chrono::DateTime::parse_from_rfc2822(after).ok();
        number(after)
            .map(|seconds| seconds * 1000.0)
            .or_else(|| Some((date()?.to_utc() - now).num_milliseconds() as f64))
    });
    ms.map(|ms| ms.clamp(0.0, MAX_RETRY_AFTER_MS) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(name: &'static str, value: &str) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_str(value).unwrap());
        let now = chrono::DateTime::parse_from_rfc2822("Wed, 21 Oct 2015 07:28:00 GMT").unwrap();
        retry_after_ms(&headers, now.to_utc())
    }

    #[test]
    fn retry_after_is_read_as_seconds_as_a_date_and_as_milliseconds() {
        assert_eq!(after("retry-after", "7"), Some(7_000));
        assert_eq!(after("retry-after", "0.5"), Some(500));
        assert_eq!(after("retry-after", "Wed, 21 Oct 2015 07:28:30 GMT"), Some(30_000));
        assert_eq!(after("retry-after-ms", "120"), Some(120));
    }

    #[test]
    fn a_senseless_retry_after_neither_panics_nor_waits_for_years() {
        assert_eq!(after("retry-after", "soon"), None);
        assert_eq!(after("retry-after", "NaN"), None);
        assert_eq!(after("retry-after", "-5"), Some(0));
        assert_eq!(after("retry-after", "Wed, 21 Oct 2014 07:28:00 GMT"), None);
        assert_eq!(after("retry-after", "Tue, 21 Oct 2014 07:28:00 GMT"), Some(0));
        assert_eq!(after("retry-after", "1e300"), Some(86_400_000));
    }

    #[test]
    fn the_text_of_arguments_is_an_object_or_malformed() {
        assert_eq!(arguments("{\"a\":1}".into(), true), Ok(serde_json::json!({"a": 1})));
        assert_eq!(arguments(" ".into(), false), Ok(serde_json::json!({})));
        assert_eq!(arguments(String::new(), true), Err(String::new()));
        for text in ["{\"a\":", "[1]", "null", "nonsense"] {
            assert_eq!(arguments(text.into(), false), Err(text.to_owned()));
        }
        assert_eq!(
            arguments("{\"a\":\"x\\u0000\"}".into(), false),
            Ok(serde_json::json!({"a": "x\u{fffd}"}))
        );
    }

    #[test]
    fn an_integer_that_would_lose_digits_is_malformed() {
        for text in [
            r#"{"cents":123456789012345678901}"#,
            r#"{"a":18446744073709551616}"#,
            r#"{"a":-9223372036854775809}"#,
            r#"{"a":"\\","b":[{"c":[1, 99999999999999999999 ]}]}"#,
            r#"{"a":1e30,"b":"x\"y","c":{"d":123456789012345678901}}"#,
        ] {
            assert_eq!(arguments(text.into(), false), Err(text.to_owned()));
        }
        for text in [
            r#"{"a":18446744073709551615,"b":-9223372036854775808,"c":-0}"#,
            r#"{"a":1e30,"b":-1.5E+300,"c":123456789012345678901.5,"d":12345678901234567890123e2}"#,
            r#"{"a":"123456789012345678901","123456789012345678901":1e30}"#,
            r#"{"a":"say \"123456789012345678901\"","b":"\\","c":[1e30,true,null]}"#,
        ] {
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(arguments(text.into(), false), Ok(value));
        }
    }
}
