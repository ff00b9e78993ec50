//! Tokens: make one, see which are used, revoke one. A new token is shown once, on the page that answers the form.

use crate::api::{part, query};
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::Token;
use crate::refusal::Refusal;
use crate::text::{Badge, badge};
use crate::visit::Visit;
use askama::Template;
use axum::extract::{Path, Query};
use axum::http::{Method, StatusCode};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

#[derive(Template)]
#[template(path = "tokens.html")]
struct Tokens {
    frame: Frame,
    items: Vec<Token>,
    /// The token that was made just now.
    made: String,
    /// Query of the next page, or empty.
    next: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    cursor: String,
}

impl Token {
    fn badge(&self) -> Badge {
        let is_over = self.expires_at.is_some_and(|at| at.0 <= chrono::Utc::now());
        badge(match (self.revoked_at, is_over) {
            (Some(_), _) => "revoked",
            (None, true) => "expired",
            (None, false) => "in_force",
        })
    }
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    shown(&visit, &asked.cursor, String::new()).await
}

async fn shown(visit: &Visit, cursor: &str, made: String) -> Result<Response, Refusal> {
    let frame = Frame::of(visit, Nav::Tokens, "Tokens").await?;
    let found: List<Token> = visit.api.get(&format!("/v1/tokens{}", query(&[("cursor", cursor)]))).await?;
    let next = found.next_link(|cursor| query(&[("cursor", cursor)]));
    Ok(page(&Tokens { frame, items: found.items, made, next }))
}

/// Makes a token. Its answer is not a redirect, because the token is nowhere else afterwards.
pub(crate) async fn create(form: Form) -> Result<Response, Refusal> {
    let (back, shown_now) = (format!("{}/tokens", form.visit.base()), OnceLock::new());
    let answer = form.act(&back, async {
        let made = form.visit.api.post("/v1/tokens", &Value::Object(wanted(&form)?), None).await?;
        let _ = shown_now.set(made["token"].as_str().unwrap_or_default().to_owned());
        Ok(done(&back, "The token was made at the first press, and shown then. If you have not seen it, revoke it and make another one."))
    });
    let answer = answer.await?;
    match shown_now.into_inner() {
        Some(token) => shown(&form.visit, "", token).await,
        None => Ok(answer),
    }
}

/// The body of the request that makes the token.
fn wanted(form: &Form) -> Result<Map<String, Value>, Refusal> {
    let mut body = Map::new();
    for name in ["scope", "name", "space", "agent"] {
        if let Some(value) = form.filled(name) {
            body.insert(name.to_owned(), value.into());
        }
    }
    if let Some(text) = form.filled("days") {
        let days: u32 = text.parse().map_err(|_| {
            let detail = format!(
                "a token expires after a whole number of days, and not after {text:?}: none was made"
            );
            Refusal::new(StatusCode::BAD_REQUEST, detail)
        })?;
        body.insert("expires_s".to_owned(), json!(i64::from(days) * 86_400));
    }
    Ok(body)
}

pub(crate) async fn revoke(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/tokens", form.visit.base());
    form.act(&back, async {
        let path = format!("/v1/tokens/{}", part(&id));
        form.visit.api.send(Method::DELETE, &path, &json!({}), None).await?;
        Ok(done(&back, "Every process refuses this token from now on."))
    })
    .await
}
