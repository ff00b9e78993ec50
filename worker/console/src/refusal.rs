//! Why a page cannot be shown or an act was not done: what the API answered.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

/// An answer of the API that is not a success. The middleware of the pages makes a page of it.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub status: StatusCode,
    /// A sentence that says what to do.
    pub detail: String,
}

impl Refusal {
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Refusal {
        Refusal { status, detail: detail.into() }
    }

    /// What the API's problem says.
    pub fn of(status: StatusCode, body: &[u8]) -> Refusal {
        let problem: Value = serde_json::from_slice(body).unwrap_or_default();
        let detail = problem["detail"].as_str().unwrap_or("the server's log says why").to_owned();
        Refusal { status, detail }
    }

    pub fn broken(what: &str, error: &impl std::fmt::Display) -> Refusal {
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{what} could not be read: {error}"))
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
