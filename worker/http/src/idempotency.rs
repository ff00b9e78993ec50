//! The header `Idempotency-Key`: a POST that was answered before gets the same answer again, from any process.
//!
//! Routes that take a `client_key` keep their own rule and read the header as that key ([`OWN_RULE`]). All other POSTs go
//! through [`once`]. Only a success is kept: a refused request has changed nothing, so it may be sent again under its key. After a
//! fault of the process the change may have been committed or not, so the key stays taken until its time is over.
//!
//! A request with a key runs to its end, also if its client goes away (see [`crate::guard`]): else its change could be committed and its
//! answer not kept.

use crate::access::{Caller, Rule, Who};
use crate::body::{KEY_BYTES, idempotency_key};
use crate::problem::Problem;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use tracing::{error, warn};
use wakeful_engine::ctx::Ctx;
use wakeful_store::audit::act;
use wakeful_store::idempotency::{KeyUse, Keyed, RENEW};

/// An answer that is given again has this header.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// Routes that recognise a repeated request by themselves: by `client_key`, or by the mail.
const OWN_RULE: &[&str] = &[
    "/v1/chat/{conversation_id}/messages",
    "/v1/sessions/{id}/messages",
    "/v1/sessions/{id}/fork",
    "/v1/conversations/{id}/new",
    "/v1/batches",
    "/v1/schedules/{id}/trigger",
    "/v1/triggers/herald",
    "/v1/triggers/absurd",
    "/v1/triggers/email/raw",
    // Signs a token and stores nothing.
    "/v1/user-tokens",
];

/// The body of an import may be larger than the memory, so it is not compared.
const UNREAD_BODY: &str = "/v1/sessions/import";

/// Runs a request with a key once. Without the header it only passes the request on.
pub(crate) async fn once(State(ctx): State<Arc<Ctx>>, request: Request, next: Next) -> Response {
    let is_keyed = request.headers().contains_key("idempotency-key");
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let rule = path.as_deref().and_then(|path| Rule::of(request.method().as_str(), path));
    match rule {
        Some(rule) if is_keyed && rule.method == "POST" && !OWN_RULE.contains(&rule.path) => {
            match run(&ctx, rule, request, next).await {
                Ok(response) => response,
                Err(problem) => problem.into_response(),
            }
        }
        _ => next.run(request).await,
    }
}

async fn run(ctx: &Ctx, rule: &Rule, request: Request, next: Next) -> Result<Response, Problem> {
    let key = idempotency_key(request.headers())?.unwrap_or_default();
    if key.is_empty() || key.len() > KEY_BYTES || key.chars().any(char::is_control) {
        let said = format!("`Idempotency-Key` has 1 to {KEY_BYTES} bytes and no control characters");
        return Err(Problem::bad_request(said));
    }
    let caller = request.extensions().get::<Caller>().cloned();
    let caller =
        caller.ok_or_else(|| Problem::new(StatusCode::UNAUTHORIZED, "this route knows no caller"))?;
    let uri = request.uri();
    // A nested router sees the path without its beginning, always the same one.
    let asked = format!("POST {}", uri.path_and_query().map_or(uri.path(), |whole| whole.as_str()));
    let mut hash = Sha256::new();
    let request = if rule.path == UNREAD_BODY {
        request
    } else {
        let (parts, body) = request.into_parts();
        // As the handlers read it: within the limit, and through the door.
        let body: Result<Bytes, BytesRejection> =
            Bytes::from_request(Request::from_parts(parts.clone(), body), &()).await;
        let body = body?;
        hash.update(&body);
        Request::from_parts(parts, Body::from(body))
    };
    let principal = principal(&caller);
    let body_sha256 = hash.finalize();
    let keyed = Keyed {
        space_id: caller.space(),
        principal: &principal,
        key: &key,
        request: &asked,
        body_sha256: &body_sha256,
    };
    let claim = match ctx.store.claim_key(&keyed).await? {
        KeyUse::Claimed { claim } => claim,
        KeyUse::Answered { status, answer } => {
            act::repeats();
            return Ok(again(status, answer));
        }
        KeyUse::AtWork => {
            let said = "the first request with this `Idempotency-Key` is still at work; send it again later";
            return Err(Problem::new(StatusCode::CONFLICT, said).retry_after(1));
        }
        KeyUse::Other => {
            let said = "this `Idempotency-Key` belongs to another request: its path or its body differs";
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, said));
        }
    };
    let response = tokio::select! {
        response = next.run(request) => response,
        response = renew(ctx, &keyed, &claim) => response,
    };
    if !response.status().is_success() {
        if response.status().is_server_error() {
            return Ok(response);
        }
        if let Err(error) = ctx.store.free_key(&keyed, &claim).await {
            error!(%error, "An idempotency key could not be given back; it is free after two minutes");
        }
        return Ok(response);
    }
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await;
    let body = body.map_err(|error| Problem::unavailable(format!("the answer broke off: {error}"), 1))?;
    let answer = without_secret(rule, &body);
    // The change is committed, so the caller gets the answer whether or not it can be kept.
    if let Err(error) = ctx.store.answer_key(&keyed, &claim, parts.status.as_u16(), &answer).await {
        error!(%error, "An answer could not be kept for its idempotency key");
    }
    Ok(Response::from_parts(parts, Body::from(body)))
}

/// Keeps the key for the request while its handler runs. Never answers.
async fn renew(ctx: &Ctx, keyed: &Keyed<'_>, claim: &str) -> Response {
    loop {
        tokio::time::sleep(RENEW).await;
        if let Err(error) = ctx.store.renew_key(keyed, claim).await {
            warn!(%error, "An idempotency key could not be renewed; trying again");
        }
    }
}

/// Whose key it is. Two tokens may use the same one.
fn principal(caller: &Caller) -> String {
    match &caller.who {
        Who::ThisMachine => "machine".to_owned(),
        Who::Configuration => "configuration".to_owned(),
        Who::Token { token_id, .. } => format!("token {token_id}"),
        Who::User { user_id, .. } => format!("user {user_id}"),
    }
}

/// A new token is shown once. It is not kept here, so a repeated answer has null in its place.
fn without_secret(rule: &Rule, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body).into_owned();
    if rule.path != "/v1/tokens" {
        return text;
    }
    match serde_json::from_str::<Value>(&text) {
        Ok(mut answer) => {
            answer["token"] = Value::Null;
            answer.to_string()
        }
        Err(_) => String::new(),
    }
}

fn again(status: u16, answer: String) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    let replayed = [
        (REPLAYED, HeaderValue::from_static("true")),
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
    ];
    (status, replayed, answer).into_response()
}
