//! Versions of documents: `ETag`, `If-None-Match`, `If-Match`.
//!
//! A strong tag is a digest of the document as it is sent. So two documents with one tag are the same bytes, whatever rows they are
//! made of, and a client that has the document already gets 304 without a body.
//!
//! A document that can be edited also has what moves by itself: each tick moves a schedule. So its tag has two digests, of what clients
//! set and of the whole, and `If-Match` compares only the first one.

use crate::problem::Problem;
use axum::body::{Body, to_bytes};
use axum::extract::{MatchedPath, Request};
use axum::http::header::{ETAG, IF_MATCH, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
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

/// The fields of an edited document that no client sets.
const MOVES: [&str; 2] = ["last_tick", "next_at"];

fn digits_of(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The tag of a document.
fn tag_of(bytes: &[u8]) -> String {
    format!("\"{}\"", digits_of(bytes))
}

/// The digits of what clients set in a document.
fn edited(mut document: Value) -> String {
    if let Value::Object(fields) = &mut document {
        fields.retain(|name, _| !MOVES.contains(&name.as_str()));
    }
    digits_of(document.to_string().as_bytes())
}

/// The tag of a document that can be edited.
fn tag_of_edited(bytes: &[u8]) -> String {
    let document = serde_json::from_slice(bytes).unwrap_or_default();
    format!("\"{}-{}\"", edited(document), digits_of(bytes))
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

    /// Whether what clients set in the document is still what the request is for. Weak tags match nothing (RFC 9110).
    pub fn is(&self, document: &impl Serialize) -> bool {
        let Ok(document) = serde_json::to_value(document) else { return false };
        let begins = format!("\"{}-", edited(document));
        let values = self.0.get_all(IF_MATCH).iter().filter_map(|value| value.to_str().ok());
        values
            .flat_map(|value| value.split(','))
            .any(|one| one.trim() == "*" || one.trim().starts_with(&begins))
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
    let tag = if EDITED.contains(&&*path) { tag_of_edited(&bytes) } else { tag_of(&bytes) };
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
        let document = serde_json::json!({"cron": "* * * * *", "next_at": "2026-11-28T09:00:00Z"});
        let tag = tag_of_edited(document.to_string().as_bytes());
        let is = |value: &str| IfMatch::of(&with(IF_MATCH, value)).unwrap().is(&document);
        assert!(is(&tag) && is("*") && !is(&format!("W/{tag}")) && !is("\"other\""));
        let moved = serde_json::json!({"cron": "* * * * *", "next_at": "2026-11-28T09:01:00Z"});
        let changed = serde_json::json!({"cron": "0 * * * *", "next_at": "2026-11-28T09:00:00Z"});
        let if_match = IfMatch::of(&with(IF_MATCH, &tag)).unwrap();
        assert!(if_match.is(&moved) && !if_match.is(&changed));
        assert_ne!(tag_of_edited(moved.to_string().as_bytes()), tag, "the client has another document");
        assert!(IfMatch::of(&HeaderMap::new()).is_none());
    }
}
