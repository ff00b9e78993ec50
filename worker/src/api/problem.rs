//! Errors as `application/problem+json` (RFC 9457).

use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tracing::error;
use wakeful_workflow::session::SessionStatus;

/// The field that says how many messages wait.
const PENDING: &str = "pending";

/// An answer that says what was wrong.
#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    detail: String,
    more: Map<String, Value>,
    retry_after_s: Option<u32>,
}

impl Problem {
    /// A problem with a sentence for the person who reads it.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Problem {
        Problem { status, detail: detail.into(), more: Map::new(), retry_after_s: None }
    }

    /// 400.
    pub fn bad_request(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::BAD_REQUEST, detail)
    }

    /// What it is answered with.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// 429, with a time to come again.
    pub fn too_many(detail: impl Into<String>, retry_after_s: u32) -> Problem {
        let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, detail);
        Problem { retry_after_s: Some(retry_after_s), ..problem }
    }

    /// 503, with a time to come again.
    pub fn unavailable(detail: impl Into<String>, retry_after_s: u32) -> Problem {
        let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail);
        Problem { retry_after_s: Some(retry_after_s), ..problem }
    }

    /// How many messages wait in the session that takes no more. `None`: that is not what is wrong.
    pub(crate) fn pending(&self) -> Option<i64> {
        self.more.get(PENDING)?.as_i64()
    }

    /// The same under another status: webhooks' senders have words of their own for what is refused for good.
    pub(crate) fn under(self, status: StatusCode) -> Problem {
        Problem { status, ..self }
    }

    fn with(mut self, key: &str, value: impl Into<Value>) -> Problem {
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

/// The verbs of `POST /v1/sessions/{id}/…` that a session of this status takes.
pub fn valid_verbs(status: SessionStatus) -> &'static [&'static str] {
    match status {
        SessionStatus::Created | SessionStatus::Completed => &["messages", "archive", "terminate"],
        SessionStatus::Queued | SessionStatus::Running | SessionStatus::WaitingInput => {
            &["messages", "cancel"]
        }
        SessionStatus::NeedsAttention => &["messages", "resolve", "retry", "cancel"],
        SessionStatus::Failed => &["messages", "retry", "archive", "terminate"],
        SessionStatus::Archived => &["terminate"],
        SessionStatus::Terminated => &[],
    }
}

impl From<wakeful_store::Error> for Problem {
    fn from(failed: wakeful_store::Error) -> Problem {
        use wakeful_store::Error;
        let detail = failed.to_string();
        if let Some(outage) = failed.outage() {
            error!(error = %detail, "A request was refused: {}", outage.as_str());
            let detail = format!("{}; nothing was taken", outage.as_str());
            return Problem {
                retry_after_s: Some(2),
                ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
            };
        }
        match failed {
            Error::NotFound { .. } => Problem::new(StatusCode::NOT_FOUND, detail),
            Error::Conflict { status, .. } => Problem::new(StatusCode::CONFLICT, detail)
                .with("session_status", status.as_str())
                .with("valid", valid_verbs(status).iter().copied().map(Value::from).collect::<Vec<_>>()),
            Error::Refused { .. } | Error::Schedule { .. } => Problem::new(StatusCode::CONFLICT, detail),
            Error::KeyReused { .. } => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail),
            Error::InboxFull { pending } => Problem {
                retry_after_s: Some(5),
                ..Problem::new(StatusCode::TOO_MANY_REQUESTS, detail).with(PENDING, pending)
            },
            Error::Bundle(_) => Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail),
            // What the database says may quote what it holds: it goes to the log and not to the client.
            Error::Database(_) | Error::Schema(_) | Error::File { .. } | Error::Corrupt { .. } => {
                error!(error = %detail, "A request failed");
                Problem::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "the request failed; the server's log says why",
                )
            }
        }
    }
}

impl From<crate::origin::CannotBegin> for Problem {
    fn from(cannot: crate::origin::CannotBegin) -> Problem {
        Problem::bad_request(cannot.to_string())
    }
}

impl From<BytesRejection> for Problem {
    fn from(rejection: BytesRejection) -> Problem {
        if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            return Problem::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the body is larger than {} bytes", super::BODY_LIMIT_BYTES),
            );
        }
        Problem::new(rejection.status(), rejection.body_text())
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Problem {
        Problem::bad_request(rejection.body_text())
    }
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Problem {
        Problem::bad_request(rejection.body_text())
    }
}

pub(super) async fn no_route(uri: Uri) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", uri.path()))
}

pub(super) async fn no_method(method: Method, uri: Uri) -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not take {method}", uri.path()))
}
