//! Asks the API in this process, as the person who looks at the page would: with the same token, from the same address. So
//! scopes, spaces and the audit hold here as they do outside.

use crate::recent::Reach;
use crate::refusal::Refusal;
use crate::text::{has_command, visible};
use crate::{Console, Outside};
use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use axum::http::{HeaderMap, Method, Request, Response, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::sync::Arc;
use tower::ServiceExt as _;

/// The largest answer that a page is made of.
const ANSWER_BYTES: usize = 64 << 20;

/// What stays as it is in a part of a path.
const PART: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Headers of the page's request that say nothing of who asks: of its body, of what the browser has and takes, of the connection,
/// and of what the page's own requests to the API have instead. All others reach the API, so that it finds out as much of the
/// visitor, and of a proxy between, as if it had been asked itself.
const OF_THE_PAGE: [&str; 26] = [
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "cache-control",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "idempotency-key",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "keep-alive",
    "last-event-id",
    "pragma",
    "range",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-wakeful-space",
];

/// The API, for one visitor.
#[derive(Clone)]
pub(crate) struct Api {
    console: Arc<Console>,
    headers: HeaderMap,
    outside: Outside,
    /// If set: an answer that others of this reach got a moment ago will do.
    shares: Option<Reach>,
}

impl Api {
    pub fn new(console: &Arc<Console>, headers: &HeaderMap, outside: Outside) -> Api {
        let passes = |name: &HeaderName| !OF_THE_PAGE.contains(&name.as_str());
        let headers = headers.iter().filter(|(name, _)| passes(name));
        let headers = headers.map(|(name, value)| (name.clone(), value.clone())).collect();
        Api { console: Arc::clone(console), headers, outside, shares: None }
    }

    /// The API under another token.
    #[must_use]
    pub fn under(mut self, token: &str) -> Api {
        if let Ok(value) = HeaderValue::from_str(&format!("Bearer {token}")) {
            self.headers.insert(AUTHORIZATION, value);
        }
        self
    }

    /// The API in a space that the token may name.
    #[must_use]
    pub fn in_space(mut self, space: &str) -> Api {
        if let Ok(value) = HeaderValue::from_str(space) {
            self.headers.insert("x-wakeful-space", value);
        }
        self
    }

    /// The API, or what others of this reach have just been told.
    #[must_use]
    pub fn sharing(mut self, reach: Reach) -> Api {
        self.shares = Some(reach);
        self
    }

    /// # Errors
    /// What the API answers if it is not a success.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Refusal> {
        let ask = async { Ok(self.ask(Method::GET, path, None, None).await?.1) };
        let body = match &self.shares {
            Some(reach) => self.console.recent.answer(reach, path, ask).await?,
            None => ask.await?,
        };
        let read = match commands_a_reader(&body) {
            false => serde_json::from_slice(&body),
            true => serde_json::from_slice(&body).and_then(|mut value| {
                show_commands(&mut value);
                serde_json::from_value(value)
            }),
        };
        read.map_err(|error| Refusal::broken(path, &error))
    }

    /// # Errors
    /// Like [`Api::get`].
    pub async fn post(&self, path: &str, body: &Value, key: Option<&str>) -> Result<Value, Refusal> {
        self.send(Method::POST, path, body, key).await
    }

    /// Asks something whose answer depends on a body. Nothing changes, so what others were told stays good.
    ///
    /// # Errors
    /// Like [`Api::get`].
    pub async fn look(&self, path: &str, body: &Value) -> Result<Value, Refusal> {
        let (_, body) = self.ask(Method::POST, path, Some(body), None).await?;
        Ok(serde_json::from_slice(&body).unwrap_or_default())
    }

    /// # Errors
    /// Like [`Api::get`].
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: &Value,
        key: Option<&str>,
    ) -> Result<Value, Refusal> {
        let answer = self.ask(method, path, Some(body), key).await;
        self.console.recent.forget();
        let (_, body) = answer?;
        Ok(serde_json::from_slice(&body).unwrap_or_default())
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        key: Option<&str>,
    ) -> Result<(StatusCode, Bytes), Refusal> {
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let mut request = self.request(method, path, body)?;
        if let Some(key) = key.and_then(|key| HeaderValue::from_str(key).ok()) {
            request.headers_mut().insert("idempotency-key", key);
        }
        let response = self.call(request).await;
        let status = response.status();
        let body = to_bytes(response.into_body(), ANSWER_BYTES).await;
        let body = body.map_err(|error| Refusal::broken(path, &error))?;
        if status.is_success() { Ok((status, body)) } else { Err(Refusal::of(status, &body)) }
    }

    /// An answer as it comes, for streams.
    ///
    /// # Errors
    /// When `path` is not a valid path.
    pub async fn stream(&self, path: &str, last: Option<&HeaderValue>) -> Result<Response<Body>, Refusal> {
        let mut request = self.request(Method::GET, path, Body::empty())?;
        if let Some(last) = last {
            request.headers_mut().insert("last-event-id", last.clone());
        }
        Ok(self.call(request).await)
    }

    fn request(&self, method: Method, path: &str, body: Body) -> Result<Request<Body>, Refusal> {
        let mut request = Request::builder().method(method).uri(path).body(body).map_err(|error| {
            Refusal::new(StatusCode::BAD_REQUEST, format!("the address cannot be asked for: {error}"))
        })?;
        *request.headers_mut() = self.headers.clone();
        *request.extensions_mut() = self.outside.extensions.clone();
        // A proxy without any setting is known by its HTTP/1.0 alone.
        *request.version_mut() = self.outside.version;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(request)
    }

    async fn call(&self, request: Request<Body>) -> Response<Body> {
        match self.console.api.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

/// Whether these bytes may hold a character that changes how the text after it is shown. Quick, and never wrongly
/// false.
fn commands_a_reader(body: &[u8]) -> bool {
    body.windows(2).any(|pair| matches!(pair, [b'\\', b'u' | b'b' | b'f' | b'r'] | [0xe2, 0x80 | 0x81]))
}

/// Makes visible the characters that turn the direction of the text around them, and those that are no text.
fn show_commands(value: &mut Value) {
    match value {
        Value::String(text) if has_command(text) => {
            *text = visible(text);
        }
        Value::Array(list) => list.iter_mut().for_each(show_commands),
        Value::Object(fields) => fields.values_mut().for_each(show_commands),
        Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// A text as one part of a path.
pub(crate) fn part(text: &str) -> String {
    utf8_percent_encode(text, PART).to_string()
}

/// A query of those pairs that have a value, with its question mark.
pub(crate) fn query(pairs: &[(&str, &str)]) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(pairs.iter().filter(|(_, value)| !value.is_empty()));
    let query = query.finish();
    if query.is_empty() { query } else { format!("?{query}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_turns_a_text_around_is_seen() {
        let body = json!({"a": ["abc\u{202e}def\u{1b}[2J", "plain\n\ttext", 7]}).to_string();
        assert!(commands_a_reader(body.as_bytes()));
        let mut value: Value = serde_json::from_str(&body).unwrap();
        show_commands(&mut value);
        assert_eq!(value, json!({"a": ["abc\\u{202e}def\\u{1b}[2J", "plain\n\ttext", 7]}));
        assert!(!commands_a_reader(r#"{"a": "plain\ntext äöü"}"#.as_bytes()));
    }

    #[test]
    fn a_part_of_a_path_stays_one() {
        assert_eq!(part("a/b?c#d e%"), "a%2Fb%3Fc%23d%20e%25");
        assert_eq!(query(&[("a", "x y&z"), ("b", "")]), "?a=x+y%26z");
        assert_eq!(query(&[("a", "")]), "");
    }
}
