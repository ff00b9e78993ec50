//! The middleware before the handlers. It checks the bearer token, and refuses messages while the intake is
//! full.

use crate::door::is_of_sns;
use crate::problem::Problem;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use secrecy::{ExposeSecret, SecretString};
use std::sync::Arc;
use subtle::ConstantTimeEq;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::Refused;

/// Requires the bearer token, if one is configured.
pub async fn guard(State(ctx): State<Arc<Ctx>>, request: Request, next: Next) -> Response {
    let Some(token) = &ctx.config.server.token else {
        // Without a token the process listens on loopback only. A web page in a browser on this machine can
        // reach loopback too, so refuse a foreign `Host` or `Origin`.
        let stranger = [HOST, ORIGIN].into_iter().find(|name| {
            request.headers().get_all(name).iter().any(|value| !value.to_str().is_ok_and(is_local))
        });
        return match stranger {
            None => next.run(request).await,
            Some(name) => {
                let detail = format!("`{name}` is not this machine; set WAKEFUL_TOKEN to serve others");
                Problem::new(StatusCode::FORBIDDEN, detail).into_response()
            }
        };
    };
    let given = given_token(request.headers());
    if is_token(given, token) {
        return next.run(request).await;
    }
    let detail = if given.is_empty() {
        "a bearer token is needed: `Authorization: Bearer …`"
    } else {
        "this bearer token is not the server's (WAKEFUL_TOKEN)"
    };
    let problem = Problem::new(StatusCode::UNAUTHORIZED, detail);
    let mut response = problem.into_response();
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Returns whether the request has the bearer token. Without one configured, only this machine can ask.
pub fn has_token(ctx: &Ctx, headers: &HeaderMap) -> bool {
    ctx.config.server.token.as_ref().is_none_or(|token| is_token(given_token(headers), token))
}

/// The bearer token that the request gives, or an empty text.
fn given_token(headers: &HeaderMap) -> &str {
    headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer"))
        .map_or("", |(_, token)| token.trim())
}

fn is_token(given: &str, token: &SecretString) -> bool {
    bool::from(given.as_bytes().ct_eq(token.expose_secret().as_bytes()))
}

/// Refuses a POST before its body is read, while the intake is full.
pub async fn shed(State(ctx): State<Arc<Ctx>>, request: Request, next: Next) -> Response {
    if request.method() == Method::POST && ctx.intake.is_full() {
        let full = Problem::from(Refused::Full);
        let is_sns = is_of_sns(request.headers());
        // SNS repeats a request that is answered with 5xx, but not one that is answered with 4xx.
        let told = if is_sns { full.with_status(StatusCode::SERVICE_UNAVAILABLE) } else { full };
        return told.into_response();
    }
    next.run(request).await
}

/// Returns whether a `Host` or an `Origin` names this machine.
fn is_local(value: &str) -> bool {
    let authority = value.split_once("://").map_or(value, |(_, authority)| authority);
    let Ok(authority) = authority.parse::<axum::http::uri::Authority>() else {
        return false;
    };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
