//! Helpers that handlers share: they read ids, keys and bodies, and answer an accepted message.

use crate::plain;
use crate::problem::Problem;
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use schemars::JsonSchema;
use serde::Deserialize;
use wakeful_store::wake::Woken;

/// The longest key of a request, in bytes.
pub(crate) const KEY_BYTES: usize = 256;

/// Largest request body.
pub const BODY_LIMIT_BYTES: usize = 1 << 20;

/// The longest reason, in bytes. The journal keeps it as one line.
pub const REASON_BYTES: usize = 1000;

/// The bytes of a body, or why they did not come.
pub type Body = Result<Bytes, BytesRejection>;

/// An optional body that says why somebody acts.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    reason: Option<String>,
}

impl Reason {
    /// Reads the reason.
    ///
    /// # Errors
    /// 400 for a body that is another one, and for a text that is no reason.
    pub fn of(body: &[u8]) -> Result<Option<String>, Problem> {
        let Reason { reason } = parse_if_any(body)?;
        check_text("reason", reason.as_deref(), REASON_BYTES)?;
        Ok(reason)
    }
}

/// The id of any row, from the path. 400 for a text that cannot be an id.
pub struct Id(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Id, Problem> {
        let Path(id) = Path::<String>::from_request_parts(parts, state).await?;
        // Postgres stores no NUL in a text, and none of our ids has a control character.
        if id.chars().any(char::is_control) {
            return Err(Problem::bad_request("an id has no control characters"));
        }
        Ok(Id(id))
    }
}

/// 202, or 200 for a message that was accepted before.
pub fn accepted(woken: Woken) -> (StatusCode, Json<Woken>) {
    let status = if woken.duplicate { StatusCode::OK } else { StatusCode::ACCEPTED };
    (status, Json(woken))
}

/// The header `Idempotency-Key`: means the same as `client_key`, for clients that set it on every request.
pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let key = key.to_str().map_err(|_| Problem::bad_request("`Idempotency-Key` is not ASCII"))?;
    Ok(Some(key.to_owned()))
}

/// The key of a request: that of its body, whose field has this name, or the header `Idempotency-Key`.
///
/// # Errors
/// 400 for two keys that differ, and for one that is no key.
pub fn key_of(name: &str, in_body: Option<String>, headers: &HeaderMap) -> Result<Option<String>, Problem> {
    check_text(name, in_body.as_deref(), KEY_BYTES)?;
    let in_header = idempotency_key(headers)?;
    check_text("Idempotency-Key", in_header.as_deref(), KEY_BYTES)?;
    if let (Some(one), Some(other)) = (&in_body, &in_header)
        && one != other
    {
        return Err(Problem::bad_request(format!(
            "the request has two keys: `{name}` and the header `Idempotency-Key` mean the same, so give one of them"
        )));
    }
    Ok(in_body.or(in_header))
}

/// Like [`parse`]. An empty body is one that leaves every field out.
///
/// # Errors
/// Those of [`parse`].
pub fn parse_if_any<T: serde::de::DeserializeOwned + Default>(body: &[u8]) -> Result<T, Problem> {
    if body.is_empty() { Ok(T::default()) } else { parse(body) }
}

/// Parses a JSON body. The error says where it is wrong.
pub fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let text = std::str::from_utf8(body).map_err(|error| {
        Problem::bad_request(format!("the body is not UTF-8: invalid at byte {}", error.valid_up_to()))
    })?;
    if text.trim().is_empty() {
        return Err(Problem::bad_request("the body is empty; a JSON object is expected"));
    }
    // serde would also accept an array, and read the fields in order.
    if !text.trim_start().starts_with('{') {
        return Err(Problem::bad_request("the body is not the JSON that is expected: an object, at line 1"));
    }
    let wrong = |path: &str, error: serde_json::Error| {
        let reason = plain::reason(path, &error.to_string());
        Problem::bad_request(format!("the body is not the JSON that is expected: {reason}"))
    };
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        wrong(&path, error.into_inner())
    })?;
    json.end().map_err(|error| wrong("", error))?;
    Ok(parsed)
}

/// Checks a message's text: not empty, and without NUL, which the database cannot store.
pub fn message_text(text: String) -> Result<String, Problem> {
    if text.trim().is_empty() {
        return Err(Problem::bad_request("`text` is empty"));
    }
    if text.contains('\0') {
        return Err(Problem::bad_request("`text` contains a NUL character"));
    }
    Ok(text)
}

/// The error for a cursor of another list.
pub(crate) const NO_CURSOR: &str =
    "`cursor` does not belong to this list: give the `next` of the previous page";

/// Checks the cursor of a list whose cursors are ids that begin with `prefix`.
///
/// # Errors
/// 400 for what is not such an id.
pub(crate) fn check_cursor(cursor: Option<&str>, prefix: &str) -> Result<(), Problem> {
    let is_id = |cursor: &str| {
        let rest = cursor.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_'));
        rest.is_some_and(|rest| {
            (1..=64).contains(&rest.len()) && rest.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
    };
    match cursor {
        Some(cursor) if !is_id(cursor) => Err(Problem::bad_request(NO_CURSOR)),
        Some(_) | None => Ok(()),
    }
}

/// Checks a word of a request that is one of a few.
///
/// # Errors
/// A sentence that lists them, for another word.
pub fn check_word(name: &str, word: Option<&str>, known: &[&str]) -> Result<(), Problem> {
    match word {
        Some(word) if !known.contains(&word) => {
            let word: String = word.chars().take(100).collect();
            Err(Problem::bad_request(format!("`{name}` is {word:?}: it is one of {}", known.join(", "))))
        }
        Some(_) | None => Ok(()),
    }
}

/// Checks a short text of a request.
///
/// # Errors
/// 400 for an empty text, one of more than `limit` bytes, or one with control characters.
pub fn check_text(name: &str, text: Option<&str>, limit: usize) -> Result<(), Problem> {
    match text {
        Some(text) if text.is_empty() || text.len() > limit || text.chars().any(char::is_control) => {
            Err(Problem::bad_request(format!("`{name}` has 1 to {limit} bytes and no control characters")))
        }
        Some(_) | None => Ok(()),
    }
}
