//! The middleware before the handlers. It finds out who asks, checks the caller against the rule of the route, and refuses
//! messages while the intake is full.

use crate::access::{Caller, Issuer, Rule, Who};
use crate::audit;
use crate::door::is_of_sns;
use crate::paces::Paces;
use crate::problem::Problem;
use crate::scope;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{HOST, ORIGIN, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::time::Instant;
use tracing::Instrument;
use wakeful_engine::ctx::Ctx;
use wakeful_store::space::Scope;

/// Lets a request pass if its caller has what the route needs.
pub async fn guard(State(ctx): State<Arc<Ctx>>, mut request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let rule = path.as_deref().and_then(|path| Rule::of(request.method().as_str(), path));
    let mut act = audit::act_of(&request, rule);
    let issuer = request.extensions().get::<Option<Arc<Issuer>>>().and_then(Option::as_ref);
    let caller = match Caller::identify(&ctx, issuer, request.headers()).await {
        Ok(caller) => caller,
        Err(problem) => {
            let response = refused(problem, "Bearer");
            audit::refused(&ctx, act, response.status()).await;
            return response;
        }
    };
    audit::name(&mut act, &caller);
    let permitted = match (rule, of_a_stranger(&caller, request.version(), request.headers())) {
        (_, Some(problem)) => Err(problem),
        (None, None) => Err(Problem::new(StatusCode::FORBIDDEN, "no rule says which scope this route needs")),
        (Some(rule), None) => caller.may(rule).map(|()| rule),
    };
    let rule = match permitted {
        Ok(rule) => rule,
        Err(problem) => {
            let response = refused(problem, "Bearer error=\"insufficient_scope\"");
            audit::refused(&ctx, act, response.status()).await;
            return response;
        }
    };
    // All that a user's token may do, other than look, is to send messages.
    let mut counted = None;
    if rule.verb.is_some()
        && let Some(paces) = request.extensions().get::<Arc<Paces>>()
    {
        match paces.count(&caller, Instant::now()) {
            Ok(message) => counted = message.map(|message| (Arc::clone(paces), message)),
            Err(seconds) => {
                let detail =
                    "this user has sent as many messages as one may in a minute (server.user_messages)";
                let response = refused(Problem::too_many(detail, seconds), "Bearer");
                audit::refused(&ctx, act, response.status()).await;
                return response;
            }
        }
    }
    let scope = Scope::of(caller.space());
    request.extensions_mut().insert(caller);
    let is_keyed = request.headers().contains_key("idempotency-key");
    let answer = scope::answered(scope, next.run(request));
    if rule.verb.is_none() {
        return answer.await;
    }
    let acts = async move {
        let response = audit::carry_out(&ctx, act, answer).await;
        // A new message is answered with 202.
        if let Some((paces, message)) = counted.filter(|_| response.status() == StatusCode::OK) {
            paces.was_repeated(&message);
        }
        response
    };
    if is_keyed { to_the_end(acts).await } else { acts.await }
}

/// Runs a request with a key to its end, also if its client goes away: what it commits and what is kept of its answer belong
/// together.
async fn to_the_end(acts: impl Future<Output = Response> + Send + 'static) -> Response {
    match tokio::spawn(acts.in_current_span()).await {
        Ok(response) => response,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Problem::unavailable("this process is ending", 1).into_response(),
        },
    }
}

fn refused(problem: Problem, challenge: &'static str) -> Response {
    let mut response = problem.into_response();
    if matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}

/// Without a token the process listens on loopback only. A web page in a browser on this machine can reach loopback too,
/// so a foreign `Host` or `Origin` is refused.
fn of_a_stranger(caller: &Caller, version: Version, headers: &HeaderMap) -> Option<Problem> {
    if caller.who != Who::ThisMachine {
        return None;
    }
    // A proxy without any setting adds no header and writes this machine's name into `Host`. But nginx speaks HTTP/1.0 then, as
    // hardly anything else does.
    if version < Version::HTTP_11 {
        let detail = "HTTP/1.0 comes from proxies; speak HTTP/1.1, or set WAKEFUL_TOKEN to serve others";
        return Some(Problem::new(StatusCode::FORBIDDEN, detail));
    }
    let stranger = [HOST, ORIGIN]
        .into_iter()
        .find(|name| headers.get_all(name).iter().any(|value| !value.to_str().is_ok_and(is_local)))?;
    let detail = format!("`{stranger}` is not this machine; set WAKEFUL_TOKEN to serve others");
    Some(Problem::new(StatusCode::FORBIDDEN, detail))
}

/// Refuses a POST before its body is read, while the intake is full.
pub async fn shed(State(ctx): State<Arc<Ctx>>, request: Request, next: Next) -> Response {
    if request.method() == Method::POST && ctx.intake.is_full() {
        let full = Problem::from(ctx.intake.refuse());
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
