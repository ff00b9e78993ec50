//! Versions of documents: `ETag`, `If-None-Match`, `If-Match`.
//!
//! A strong tag is a digest of the document as it is sent. So two documents with one tag are the same bytes, whatever rows they are
//! made of, and a client that has the document already gets 304 without a body.

use crate::problem::Problem;
use axum::body::{Body, to_bytes};
use axum::extract::{MatchedPath, Request};
use axum::http::header::{ETAG, IF_MATCH, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use sha2::{Digest, Sha256};

/// Routes whose GET gives one document.
pub const DOCUMENTS: &[&str] = &[
    "/v1/openapi.json",
    "/v1/sessions/{id}",
    "/v1/deliveries/{id}",
    "/v1/batches/{id}",
    "/v1/errors/{id}",
    "/v1/schedules/{id}",
];

/// Routes whose writes replace or remove a document. They compare the tag inside the write's own transaction.
pub const EDITED: &[&str] = &["/v1/schedules/{id}"];

/// The tag of a document.
pub fn tag_of(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let digits: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("\"{digits}\"")
}

/// Whether one of the tags that the header names is `tag`.
fn names(headers: &HeaderMap, header: &HeaderName, tag: &str) -> bool {
    let values = headers.get_all(header).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|one| {
        let one = one.trim();
        one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag
    })
}

/// The tag that a write is for, if the request names one.
pub struct IfMatch(HeaderMap);

impl IfMatch {
    pub fn of(headers: &HeaderMap) -> Option<IfMatch> {
        headers.contains_key(IF_MATCH).then(|| IfMatch(headers.clone()))
    }

    /// Whether the document is still the one that the request is for. Weak tags match nothing (RFC 9110).
    pub fn is(&self, document: &impl Serialize) -> bool {
        let Ok(bytes) = serde_json::to_vec(document) else { return false };
        let tag = tag_of(&bytes);
        let values = self.0.get_all(IF_MATCH).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|one| one.trim() == "*" || one.trim() == tag)
    }
}

/// Gives documents their tag, and answers 304 to a client that has the document. Refuses `If-Match` where nothing compares it.
pub(crate) async fn tagged(request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let path = path.unwrap_or_default();
    let headers = request.headers();
    if request.method() != Method::GET {
        let is_compared =
            matches!(*request.method(), Method::PUT | Method::DELETE) && EDITED.contains(&&*path);
        if headers.contains_key(IF_MATCH) && request.method() != Method::HEAD && !is_compared {
            let said =
                "`If-Match` is for PUT and DELETE of /v1/schedules/{id}; this request compares no version";
            return Problem::bad_request(said).into_response();
        }
        return next.run(request).await;
    }
    if !DOCUMENTS.contains(&&*path) {
        return next.run(request).await;
    }
    let headers = headers.clone();
    let response = next.run(request).await;
    if response.status() != StatusCode::OK {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(bytes) = to_bytes(body, usize::MAX).await else {
        return Problem::unavailable("the answer broke off", 1).into_response();
    };
    let tag = tag_of(&bytes);
    let Ok(value) = HeaderValue::from_str(&tag) else {
        return Response::from_parts(parts, Body::from(bytes));
    };
    if names(&headers, &IF_NONE_MATCH, &tag) {
        return (StatusCode::NOT_MODIFIED, [(ETAG, value)]).into_response();
    }
    parts.headers.insert(ETAG, value);
    Response::from_parts(parts, Body::from(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_compared_as_rfc_9110_says() {
        let tag = tag_of(b"{}");
        let with = |header: HeaderName, value: &str| {
            HeaderMap::from_iter([(header, HeaderValue::from_str(value).unwrap())])
        };
        for (value, is_it) in [
            (tag.clone(), true),
            (format!("\"other\", {tag}"), true),
            ("*".to_owned(), true),
            (format!("W/{tag}"), true),
            ("\"other\"".to_owned(), false),
            (tag.trim_matches('"').to_owned(), false),
        ] {
            assert_eq!(names(&with(IF_NONE_MATCH, &value), &IF_NONE_MATCH, &tag), is_it, "{value}");
        }
        let is = |value: &str| IfMatch::of(&with(IF_MATCH, value)).unwrap().is(&serde_json::json!({}));
        assert!(is(&tag) && is("*") && !is(&format!("W/{tag}")) && !is("\"other\""));
        assert!(IfMatch::of(&HeaderMap::new()).is_none());
    }
}
