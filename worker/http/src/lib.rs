//! The HTTP API. A trigger verifies, translates and wakes; it never runs an agent. A 2xx means that the row
//! is committed.

mod bundle;
pub(crate) mod chat;
pub(crate) mod context;
mod conversations;
mod deliveries;
mod fork;
mod health;
mod problem;
mod sessions;
mod steer;
mod stream;

pub use bundle::INTERNAL_TOKEN;
pub use problem::{Problem, valid_verbs};
pub use sessions::detail;
pub(crate) use sessions::no_trigger;

use crate::ingest::shed;
use crate::{Ctx, channel};
use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path, Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use secrecy::ExposeSecret;
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// Largest request body.
pub const BODY_LIMIT_BYTES: usize = 1 << 20;

/// The space of a caller who names none.
pub const DEFAULT_SPACE: &str = "default";

/// All routes of Wakeful.
pub fn router(ctx: Arc<Ctx>) -> Router {
    let v1 = Router::new()
        .route(
            "/chat/{conversation_id}/messages",
            post(chat::post_message).layer(from_fn_with_state(Arc::clone(&ctx), shed)),
        )
        .route("/chat/legacy", get(chat::legacy_counts))
        .route("/sessions", get(sessions::list))
        .route("/sessions/{id}", get(sessions::show))
        .route("/sessions/{id}/messages", get(sessions::messages).post(sessions::send))
        .route("/sessions/{id}/steps", get(sessions::steps))
        .route("/sessions/{id}/events", get(sessions::events))
        .route("/sessions/{id}/diff/{other}", get(sessions::diff))
        .route("/sessions/{id}/context", get(context::show))
        .route("/sessions/{id}/retry", post(steer::retry))
        .route("/sessions/{id}/cancel", post(steer::cancel))
        .route("/sessions/{id}/wake", post(steer::wake))
        .route("/sessions/{id}/resolve", post(steer::resolve))
        .route("/sessions/{id}/archive", post(steer::archive))
        .route("/sessions/{id}/terminate", post(steer::terminate))
        .route("/sessions/{id}/fork", post(fork::fork))
        .route("/sessions/{id}/tree", get(fork::tree))
        .route("/sessions/{id}/stream", get(stream::stream))
        .route("/sessions/import", post(bundle::import))
        .route("/deliveries", get(deliveries::list))
        .route("/deliveries/{id}", get(deliveries::show))
        .route("/deliveries/{id}/resend", post(deliveries::resend))
        .route("/conversations/{id}/sessions", get(conversations::sessions))
        .route("/conversations/{id}/history", get(conversations::history))
        .route("/conversations/{id}/new", post(conversations::begin_anew))
        .merge(channel::guarded())
        .route_layer(from_fn_with_state(Arc::clone(&ctx), guard))
        // Outside the guard: an export needs its own token instead of the bearer token.
        .route("/sessions/{id}/export", get(bundle::export))
        .nest("/triggers", channel::webhooks(&ctx).layer(from_fn_with_state(Arc::clone(&ctx), shed)));
    Router::new()
        .nest("/v1", v1)
        .route("/sessions/{id}/export", get(bundle::export))
        .route("/healthz", get(health::live))
        .route("/readyz", get(health::ready))
        .fallback(problem::no_route)
        .method_not_allowed_fallback(problem::no_method)
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .with_state(ctx)
}

/// Requires the bearer token, if one is configured.
pub(crate) async fn guard(State(ctx): State<Arc<Ctx>>, request: Request, next: Next) -> Response {
    let Some(token) = &ctx.config.server.token else {
        // Without a token the process listens on loopback only. A web page in a browser on this machine can
        // reach loopback too, so refuse a foreign `Host` or `Origin`.
        let stranger = [HOST, ORIGIN].into_iter().find(|name| {
            request.headers().get(name).is_some_and(|value| !value.to_str().is_ok_and(is_local))
        });
        return match stranger {
            None => next.run(request).await,
            Some(name) => {
                let detail = format!("`{name}` is not this machine; set WAKEFUL_TOKEN to serve others");
                Problem::new(StatusCode::FORBIDDEN, detail).into_response()
            }
        };
    };
    let given = request
        .headers()
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer"))
        .map_or("", |(_, token)| token.trim());
    if bool::from(given.as_bytes().ct_eq(token.expose_secret().as_bytes())) {
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

/// The id of any row, from the path. 400 for a text that cannot be an id.
pub(crate) struct Id(pub(crate) String);

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

/// Whether a `Host` or an `Origin` names this machine.
fn is_local(value: &str) -> bool {
    let authority = value.split_once("://").map_or(value, |(_, authority)| authority);
    let Ok(authority) = authority.parse::<axum::http::uri::Authority>() else {
        return false;
    };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The id under which a conversation is stored.
///
/// # Errors
/// 400 if it is empty, longer than 256 bytes, or has control characters.
pub(crate) fn stored_conversation_id(id: &str) -> Result<String, Problem> {
    if id.is_empty() || id.len() > 256 || id.chars().any(char::is_control) {
        return Err(Problem::bad_request("a conversation id has 1 to 256 bytes and no control characters"));
    }
    Ok(format!("{DEFAULT_SPACE}/{id}"))
}
