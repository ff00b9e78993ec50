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

    /// What the API's problem says. People filled in a form: they sent no JSON, and it has no lines.
    pub fn of(status: StatusCode, body: &[u8]) -> Refusal {
        let problem: Value = serde_json::from_slice(body).unwrap_or_default();
        let detail = problem["detail"].as_str().unwrap_or("the server's log says why");
        let detail = match detail.strip_prefix("the body is not the JSON that is expected: ") {
            Some(reason) => reason.rsplit_once(" at line ").map_or(reason, |(reason, _)| reason),
            None => detail,
        };
        Refusal { status, detail: detail.to_owned() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_filled_in_a_form_reads_nothing_of_json() {
        let said = |detail: &str| {
            let problem = serde_json::json!({"detail": detail}).to_string();
            Refusal::of(StatusCode::BAD_REQUEST, problem.as_bytes()).detail
        };
        let of_json = "the body is not the JSON that is expected: `for_s` is \"x\", and a number is expected at line 1 column 14";
        assert_eq!(said(of_json), "`for_s` is \"x\", and a number is expected");
        assert_eq!(said("`rate` is above 0"), "`rate` is above 0");
    }
}
