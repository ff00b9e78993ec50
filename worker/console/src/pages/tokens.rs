//! Tokens: make one, see which are used, revoke one. A new token is shown once, on the page that answers the form.

use crate::api::part;
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::Token;
use crate::refusal::Refusal;
use crate::text::{Badge, badge};
use crate::visit::Visit;
use askama::Template;
use axum::extract::Path;
use axum::http::Method;
use axum::response::Response;
use serde_json::{Map, Value, json};

#[derive(Template)]
#[template(path = "tokens.html")]
struct Tokens {
    frame: Frame,
    items: Vec<Token>,
    /// The token that was made just now.
    made: String,
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

pub(crate) async fn list(visit: Visit) -> Result<Response, Refusal> {
    shown(&visit, String::new()).await
}

async fn shown(visit: &Visit, made: String) -> Result<Response, Refusal> {
    let frame = Frame::of(visit, Nav::Tokens, "Tokens").await?;
    let found: List<Token> = visit.api.get("/v1/tokens").await?;
    Ok(page(&Tokens { frame, items: found.items, made }))
}

/// Makes a token. Its answer is not a redirect, because the token is nowhere else afterwards.
pub(crate) async fn create(form: Form) -> Result<Response, Refusal> {
    let mut body = Map::new();
    for name in ["scope", "name", "space", "agent"] {
        if let Some(value) = form.filled(name) {
            body.insert(name.to_owned(), value.into());
        }
    }
    if let Some(days) = form.filled("days").and_then(|days| days.parse::<i64>().ok()) {
        body.insert("expires_s".to_owned(), json!(days.saturating_mul(86_400)));
    }
    let made = form.visit.api.post("/v1/tokens", &Value::Object(body), None).await?;
    shown(&form.visit, made["token"].as_str().unwrap_or_default().to_owned()).await
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
