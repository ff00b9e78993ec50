//! Errors as `application/problem+json` (RFC 9457).

use crate::plain;
use crate::seldom::Seldom;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tracing::error;
use wakeful_workflow::id::InvalidConversationId;
use wakeful_workflow::session::SessionStatus;

/// An error answer that says what was wrong.
#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    detail: String,
    more: Map<String, Value>,
    retry_after_s: Option<u32>,
}

impl Problem {
    /// A problem, with a sentence for the person who reads it.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Problem {
        Problem { status, detail: detail.into(), more: Map::new(), retry_after_s: None }
    }

    /// 400.
    pub fn bad_request(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::BAD_REQUEST, detail)
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// 429 with `Retry-After`.
    pub fn too_many(detail: impl Into<String>, retry_after_s: u32) -> Problem {
        let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, detail);
        Problem { retry_after_s: Some(retry_after_s), ..problem }
    }

    /// 503 with `Retry-After`.
    pub fn unavailable(detail: impl Into<String>, retry_after_s: u32) -> Problem {
        let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail);
        Problem { retry_after_s: Some(retry_after_s), ..problem }
    }

    /// The same problem with another status: each webhook sender stops retrying at a status of its own.
    pub fn with_status(self, status: StatusCode) -> Problem {
        Problem { status, ..self }
    }

    /// The same problem with `Retry-After`.
    pub(crate) fn retry_after(self, seconds: u32) -> Problem {
        Problem { retry_after_s: Some(seconds), ..self }
    }

    pub(crate) fn with(mut self, key: &str, value: impl Into<Value>) -> Problem {
        self.more.insert(key.to_owned(), value.into());
        self
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut body = json!({
            "type": "about:blank",
            "title": self.status.canonical_reason().unwrap_or("Error"),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        if let Value::Object(fields) = &mut body {
            fields.extend(self.more);
        }
        let mut response = (self.status, body.to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// The verbs of `POST /v1/sessions/{id}/…` that a session in this status accepts.
pub fn valid_verbs(status: SessionStatus) -> &'static [&'static str] {
    match status {
        SessionStatus::Created | SessionStatus::Completed | SessionStatus::Cancelled => {
            &["messages", "archive", "terminate"]
        }
        SessionStatus::Queued | SessionStatus::Running | SessionStatus::WaitingInput => {
            &["messages", "cancel"]
        }
        SessionStatus::NeedsAttention => &["messages", "resolve", "approve", "decline", "retry", "cancel"],
        SessionStatus::Failed => &["messages", "retry", "archive", "terminate"],
        SessionStatus::Archived => &["terminate"],
        SessionStatus::Terminated => &[],
    }
}

/// The way on from an archived or terminated session.
fn new_session_hint(status: SessionStatus, wanted: &str) -> &'static str {
    let is_away = matches!(status, SessionStatus::Archived | SessionStatus::Terminated);
    if is_away && matches!(wanted, "send" | "retry") {
        "; `POST /v1/conversations/{id}/new` starts a new session in its conversation"
    } else {
        ""
    }
}

impl From<wakeful_store::Error> for Problem {
    fn from(failed: wakeful_store::Error) -> Problem {
        use wakeful_store::Error;
        let detail = failed.to_string();
        if let Some(outage) = failed.outage() {
            // While it lasts, every request of everybody ends here.
            static LINES: Seldom = Seldom::new();
            if let Some(left_out) = LINES.turn(outage.as_str()) {
                error!(error = %detail, left_out, "A request was refused: {}", outage.as_str());
            }
            let detail = format!("{}; nothing was taken", outage.as_str());
            return Problem {
                retry_after_s: Some(2),
                ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
            };
        }
        match failed {
            Error::NotFound { .. } => Problem::new(StatusCode::NOT_FOUND, detail),
            Error::Conflict { status, wanted, .. } => {
                Problem::new(StatusCode::CONFLICT, detail + new_session_hint(status, wanted))
                    .with("session_status", status.as_str())
                    .with("valid", valid_verbs(status).iter().copied().map(Value::from).collect::<Vec<_>>())
            }
            Error::Refused { .. }
            | Error::Schedule { .. }
            | Error::Batch { .. }
            | Error::Link { .. }
            | Error::NotErased { .. } => Problem::new(StatusCode::CONFLICT, detail),
            Error::OfAnotherUser { .. } => Problem::new(
                StatusCode::FORBIDDEN,
                format!("{detail}; `participants = \"anyone\"` of the agent would let it in"),
            ),
            Error::OfAUser { .. } | Error::OfASchedule { .. } => Problem::new(StatusCode::FORBIDDEN, detail),
            Error::KeyReused { .. } => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail),
            Error::Outdated { .. } => Problem::new(StatusCode::PRECONDITION_FAILED, detail),
            Error::InboxFull { pending } => Problem {
                retry_after_s: Some(5),
                ..Problem::new(StatusCode::TOO_MANY_REQUESTS, detail).with("pending", pending)
            },
            Error::Bundle(_) => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail),
            // The database's message may quote stored data, so it goes to the log and not to the client.
            Error::Database(_)
            | Error::Schema(_)
            | Error::Keys { .. }
            | Error::BlobStore { .. }
            | Error::File { .. }
            | Error::Corrupt { .. } => {
                error!(error = %detail, "A request failed");
                Problem::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "the request failed; the server's log says why",
                )
            }
        }
    }
}

impl From<wakeful_engine::new_session::CannotBegin> for Problem {
    fn from(cannot: wakeful_engine::new_session::CannotBegin) -> Problem {
        Problem::bad_request(cannot.to_string())
    }
}

impl From<wakeful_engine::ingest::Refused> for Problem {
    fn from(refused: wakeful_engine::ingest::Refused) -> Problem {
        use wakeful_engine::ingest::{RETRY_AFTER_S, Refused};
        match refused {
            Refused::Full => Problem::too_many(refused.to_string(), RETRY_AFTER_S),
            Refused::CannotBegin(cannot) => cannot.into(),
            Refused::ConversationId(invalid) => invalid.into(),
            Refused::Store(error) => error.into(),
        }
    }
}

impl From<InvalidConversationId> for Problem {
    fn from(invalid: InvalidConversationId) -> Problem {
        Problem::bad_request(invalid.to_string())
    }
}

impl From<BytesRejection> for Problem {
    fn from(rejection: BytesRejection) -> Problem {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            return Problem::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the body is larger than {} bytes", crate::body::BODY_LIMIT_BYTES),
            );
        }
        Problem::new(rejection.status(), rejection.body_text())
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Problem {
        Problem::bad_request(of_query(&rejection.body_text()))
    }
}

/// Rewrites axum's error about a query in our own words; its text exposes the parser.
fn of_query(said: &str) -> String {
    let said = said.strip_prefix("Failed to deserialize query string: ").unwrap_or(said);
    let named = |what: &str| said.split_once(what).and_then(|(_, rest)| rest.split_once('`'));
    if let Some((name, rest)) = named("unknown field `") {
        let known = rest.trim_start_matches(", expected ").trim_start_matches("one of ");
        return format!("there is no query parameter `{name}`; there is {known}");
    }
    if let Some((name, _)) = named("missing field `") {
        return format!("the query parameter `{name}` is missing");
    }
    if let Some((name, _)) = named("duplicate field `") {
        return format!("the query parameter `{name}` is given more than once");
    }
    let Some((name, reason)) = said.split_once(": ") else {
        return format!("the query cannot be read: {said}");
    };
    match plain::value(reason) {
        Some(wanted) => format!("the query parameter `{name}` must be {wanted}"),
        None => format!("the query parameter {}", plain::reason(name, reason)),
    }
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Problem {
        Problem::bad_request(rejection.body_text())
    }
}

pub(crate) async fn no_route(uri: Uri) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", uri.path()))
}

pub(crate) async fn no_method(method: Method, uri: Uri) -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::extract::Query;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "the test reads only the error")]
    struct TestQuery {
        limit: Option<i64>,
        all: Option<bool>,
        over: Option<f64>,
        since: Option<chrono::DateTime<chrono::Utc>>,
    }

    #[test]
    fn a_query_that_cannot_be_read_is_told_in_our_words() {
        for (query, said) in [
            ("limit=many", "the query parameter `limit` must be a whole number that fits"),
            ("limit=", "the query parameter `limit` must be a whole number that fits"),
            ("all=yes", "the query parameter `all` must be `true` or `false`"),
            ("over=abc", "the query parameter `over` must be a number such as 0.25"),
            ("since=yesterday", "the query parameter `since` must be a time such as 2026-11-23T08:00:00Z"),
            ("limit=1&limit=2", "the query parameter `limit` is given more than once"),
            ("limits=1", "there is no query parameter `limits`; there is `limit`, `all`, `over`, `since`"),
        ] {
            let uri: Uri = format!("/x?{query}").parse().unwrap();
            let refused = Query::<TestQuery>::try_from_uri(&uri).unwrap_err();
            assert_eq!(Problem::from(refused).to_string(), said, "{query}");
        }
    }
}
