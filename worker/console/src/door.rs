//! The middleware before all pages: finds out who visits, refuses forms of other sites, and makes pages of refusals.

use crate::form::see_other;
use crate::frame::{Frame, page};
use crate::refusal::Refusal;
use crate::typed::Typed;
use crate::visit::{Visit, is_of_this_site};
use crate::{Console, Outside};
use askama::Template;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName,
    HeaderValue, REFERRER_POLICY, RETRY_AFTER, SET_COOKIE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use tracing::Instrument as _;

/// Everything comes from here, nothing is inline, and no other page may show this one.
const POLICY: &str = "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

#[derive(Template)]
#[template(path = "refused.html")]
struct Refused {
    frame: Frame,
    status: u16,
    title: &'static str,
    detail: String,
    login: bool,
}

pub(crate) async fn door(State(console): State<Arc<Console>>, mut request: Request, next: Next) -> Response {
    let outside = request.extensions_mut().remove::<Outside>().unwrap_or_default();
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let visit = Visit::of(&console, request.headers(), path, outside);
    let looks = matches!(*request.method(), Method::GET | Method::HEAD);
    // A page that looks again by itself shows no note: it is for the page that the person was led to.
    let is_read = request.headers().get("sec-fetch-mode").is_none_or(|mode| mode.as_bytes() == b"navigate");
    let mut response = if !looks && !is_of_this_site(request.headers()) {
        let detail = "this form does not come from a page of this console; nothing was done";
        Refusal::new(StatusCode::FORBIDDEN, detail).into_response()
    } else {
        request.extensions_mut().insert(visit.clone());
        if looks { next.run(request).await } else { to_the_end(next.run(request)).await }
    };
    if let Some(refusal) = response.extensions_mut().remove::<Refusal>() {
        response = refused(&visit, refusal, looks);
    } else if !looks && is_problem(&response) {
        response = of_problem(&visit, response).await;
    }
    let is_page =
        response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
    if is_page
        && is_read
        && let Some(read) = visit.note_was_read()
    {
        response.headers_mut().append(SET_COOKIE, read);
        if let Some(typed) = visit.typed() {
            response = with_typed(response, &typed).await;
        }
    }
    harden(response.headers_mut());
    response
}

/// The page with what was typed in its form.
async fn with_typed(response: Response, typed: &Typed) -> Response {
    let (mut parts, body) = response.into_parts();
    let Ok(page) = to_bytes(body, usize::MAX).await else {
        return Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the page broke off").into_response();
    };
    parts.headers.remove(CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(typed.fill(&String::from_utf8_lossy(&page))))
}

/// Does what a form asks for to its end, also if the browser goes away: at a second press it leaves the first one, whose act the
/// second one waits for.
async fn to_the_end(acts: impl Future<Output = Response> + Send + 'static) -> Response {
    match tokio::spawn(acts.in_current_span()).await {
        Ok(response) => response,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "this process is ending").into_response(),
        },
    }
}

fn is_problem(response: &Response) -> bool {
    let kind = response.headers().get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes() == b"application/problem+json")
}

/// The page that shows what the server's door says of a form. Its headers stay: the connection ends if the
/// form did not.
async fn of_problem(visit: &Visit, response: Response) -> Response {
    let (parts, body) = response.into_parts();
    let said = to_bytes(body, 64 << 10).await.unwrap_or_default();
    let mut page = refused(visit, Refusal::of(parts.status, &said), false);
    for name in [CONNECTION, RETRY_AFTER] {
        if let Some(value) = parts.headers.get(&name) {
            page.headers_mut().insert(name, value.clone());
        }
    }
    page
}

fn harden(headers: &mut HeaderMap) {
    let rules = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // With `no-referrer`, forms would say that they come from nowhere.
        (REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in rules {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
}

fn refused(visit: &Visit, refusal: Refusal, looks: bool) -> Response {
    if refusal.status == StatusCode::UNAUTHORIZED && looks {
        let query = crate::api::query(&[("next", &visit.here)]);
        return see_other(&format!("{}/login{query}", visit.base()));
    }
    let title = match refusal.status {
        StatusCode::NOT_FOUND => "There is no such thing",
        StatusCode::FORBIDDEN => "This is not allowed",
        StatusCode::UNAUTHORIZED => "Log in first",
        StatusCode::SERVICE_UNAVAILABLE => "The database does not answer",
        StatusCode::TOO_MANY_REQUESTS => "Too many requests",
        status if status.is_client_error() => "This cannot be shown",
        _ => "Something broke",
    };
    let login = refusal.status == StatusCode::UNAUTHORIZED || refusal.status == StatusCode::FORBIDDEN;
    let mut response = page(&Refused {
        frame: Frame::bare(visit, title),
        status: refusal.status.as_u16(),
        title,
        detail: refusal.detail,
        login,
    });
    *response.status_mut() = refusal.status;
    response
}
