//! Log in and out; the theme; the space; the answer for an unknown page.

use crate::form::{Form, see_other};
use crate::frame::{Frame, Me, page};
use crate::refusal::Refusal;
use crate::visit::{Login, THEME, Visit, kept};
use askama::Template;
use axum::extract::Query;
use axum::http::StatusCode;
use axum::http::header::SET_COOKIE;
use axum::response::Response;
use serde::Deserialize;

#[derive(Template)]
#[template(path = "login.html")]
struct LoginPage {
    frame: Frame,
    next: String,
    wrong: String,
}

#[derive(Deserialize)]
pub(crate) struct Next {
    #[serde(default)]
    next: String,
}

pub(crate) async fn login_page(visit: Visit, Query(Next { next }): Query<Next>) -> Response {
    page(&LoginPage { frame: Frame::bare(&visit, "Log in"), next, wrong: String::new() })
}

/// Takes a token, asks the API whether it is one, and keeps it in a cookie that only this console can open.
pub(crate) async fn login(form: Form) -> Result<Response, Refusal> {
    let token = form.get("token").trim().to_owned();
    let next = form.back();
    let known: Result<Me, Refusal> = match token.is_empty() {
        true => Err(Refusal::new(StatusCode::UNAUTHORIZED, "the field is empty")),
        false => form.visit.api.clone().under(&token).get("/v1/me").await,
    };
    match known {
        Ok(_) => {
            let cookie = form.visit.log_in(&Login::new(&token))?;
            let mut response = see_other(&next);
            response.headers_mut().append(SET_COOKIE, cookie);
            Ok(response)
        }
        Err(refusal) if refusal.status == StatusCode::UNAUTHORIZED => {
            let frame = Frame::bare(&form.visit, "Log in");
            let mut response = page(&LoginPage { frame, next, wrong: refusal.detail });
            *response.status_mut() = StatusCode::UNAUTHORIZED;
            Ok(response)
        }
        Err(refusal) => Err(refusal),
    }
}

pub(crate) async fn logout(form: Form) -> Response {
    let mut response = see_other(&format!("{}/login", form.visit.base()));
    for cookie in form.visit.log_out() {
        response.headers_mut().append(SET_COOKIE, cookie);
    }
    response
}

pub(crate) async fn theme(form: Form) -> Response {
    let theme = match form.get("theme") {
        "dark" => "dark",
        "light" => "light",
        _ => "",
    };
    let mut response = see_other(&form.back());
    response.headers_mut().append(SET_COOKIE, kept(THEME, theme));
    response
}

/// Looks at another space, if the token may name one.
pub(crate) async fn space(form: Form) -> Result<Response, Refusal> {
    let space = form.get("space").trim();
    // The API says whether it is a name.
    let _: Me = form
        .visit
        .api
        .clone()
        .in_space(if space.is_empty() { "default" } else { space })
        .get("/v1/me")
        .await?;
    let mut response = see_other(&format!("{}/", form.visit.base()));
    response.headers_mut().append(SET_COOKIE, form.visit.choose(space)?);
    Ok(response)
}

pub(crate) async fn no_page() -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, "the console has no page at this address")
}
