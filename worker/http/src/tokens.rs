//! Tokens: made, listed, revoked; and those that an application asks for on behalf of its users.

use super::sessions::{Answer, limit, next_page, page};
use crate::access::{Caller, Who, configured_fingerprint};
use crate::body::{Body, Id, check_cursor, check_text, parse};
use crate::openapi::Operation;
use crate::openapi::{both, of};
use crate::problem::Problem;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use chrono::Utc;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use wakeful_engine::ctx::Ctx;
use wakeful_store::token::{NewToken, Token, UserClaims};
use wakeful_workflow::access::{Scope, is_space};

/// The longest life of a token: ten years.
const LONGEST_S: u64 = 10 * 366 * 24 * 3600;
/// How long a user's token lives by default, and at most. It cannot be revoked alone, so its life is short.
const USER_S: u64 = 15 * 60;
const USER_LONGEST_S: u64 = 24 * 3600;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    cursor: Option<String>,
    limit: Option<i64>,
}

/// Tokens, newest first, without their secrets.
pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_cursor(query.cursor.as_deref(), "tok")?;
    let limit = limit(query.limit)?;
    let items = ctx.store.tokens(None, query.cursor.as_deref(), limit).await?;
    let next = next_page(&items, limit, |last| json!(last.token_id));
    page(&items, next)
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewToken")]
struct TokenInput {
    #[schemars(extend("enum" = Scope::ALL.map(Scope::as_str)))]
    scope: String,
    space: Option<String>,
    agent: Option<String>,
    name: Option<String>,
    expires_s: Option<u64>,
}

/// What the command line and the API check alike.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn check(new: &NewToken) -> Result<(), String> {
    if let Some(space) = new.space_id.as_deref().filter(|space| !is_space(space)) {
        return Err(format!("{space:?} names no space: it has 1 to 64 letters, digits, -, _ and ."));
    }
    let short = |text: &Option<String>| {
        text.as_ref()
            .is_none_or(|text| (1..=256).contains(&text.len()) && !text.chars().any(char::is_control))
    };
    if !short(&new.name) || !short(&new.agent) {
        return Err("a token's name and agent have 1 to 256 bytes and no control characters".to_owned());
    }
    if new.scope == Scope::Admin && (new.space_id.is_some() || new.agent.is_some()) {
        return Err("an admin token is of the whole installation: it has no space and no agent".to_owned());
    }
    match new.expires_in.map(|after| after.as_secs()) {
        Some(seconds) if !(1..=LONGEST_S).contains(&seconds) => {
            Err("a token expires after one second to ten years".to_owned())
        }
        _ => Ok(()),
    }
}

/// Makes a token: 201. The answer is the only place that ever shows it.
pub(super) async fn create(
    State(ctx): State<Arc<Ctx>>,
    body: Body,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let asked: TokenInput = parse(&body?)?;
    let scope = Scope::parse(&asked.scope)
        .ok_or_else(|| Problem::bad_request("`scope` is `read`, `operate` or `admin`"))?;
    let new = NewToken {
        scope,
        space_id: asked.space,
        agent: asked.agent,
        name: asked.name,
        expires_in: asked.expires_s.map(Duration::from_secs),
    };
    check(&new).map_err(Problem::bad_request)?;
    let (token, secret) = ctx.store.create_token(&new).await?;
    Ok((StatusCode::CREATED, Json(shown_once(&token, &secret))))
}

/// A new token as it is shown, with its secret.
pub fn shown_once(token: &Token, secret: &str) -> Value {
    let mut shown = json!(token);
    if let Value::Object(fields) = &mut shown {
        fields.insert("token".to_owned(), json!(secret));
    }
    shown
}

/// Revokes a token. Repeating it changes nothing.
pub(super) async fn revoke(State(ctx): State<Arc<Ctx>>, Id(id): Id) -> Result<Json<Token>, Problem> {
    Ok(Json(ctx.store.revoke_token(None, &id).await?.0))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewUserToken")]
struct UserTokenInput {
    user_id: String,
    agent: Option<String>,
    expires_s: Option<u64>,
}

/// Signs a token for a user of the caller's application: 201. It lives no longer than the caller's own token.
pub(super) async fn of_user(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    body: Body,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let asked: UserTokenInput = parse(&body?)?;
    check_text("user_id", Some(&asked.user_id), 256)?;
    check_text("agent", asked.agent.as_deref(), 256)?;
    let seconds = asked.expires_s.unwrap_or(USER_S);
    if !(1..=USER_LONGEST_S).contains(&seconds) {
        return Err(Problem::bad_request(format!("`expires_s` is from 1 to {USER_LONGEST_S}")));
    }
    let wanted = Utc::now().timestamp() + seconds as i64;
    let expires_at = caller.expires_at.map_or(wanted, |own| wanted.min(own.timestamp()));
    let issuer = match &caller.who {
        Who::Token { token_id, .. } => Some(token_id.clone()),
        Who::Configuration | Who::ThisMachine | Who::User { .. } => None,
    };
    let claims = UserClaims {
        space_id: caller.space().to_owned(),
        agent: caller.agent(asked.agent.as_deref())?.map(str::to_owned),
        user_id: asked.user_id,
        expires_at,
        issuer,
        configured: match caller.who {
            Who::Configuration => configured_fingerprint(&ctx).await?,
            Who::Token { .. } | Who::ThisMachine | Who::User { .. } => None,
        },
    };
    let token = ctx.store.sign_user_token(&claims).await?;
    let body = json!({
        "token": token, "user_id": claims.user_id, "space": claims.space_id, "agent": claims.agent,
        "expires_at": claims.expires(),
    });
    Ok((StatusCode::CREATED, Json(body)))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/tokens", "Tokens, newest first, without their secrets")
            .query::<ListQuery>()
            .lists::<Token>(),
        Operation::post("/v1/tokens", "Makes a token, and shows it once").body::<TokenInput>().answers(
            StatusCode::CREATED,
            "made; `token` is shown here only, and null when a request is repeated",
            both(of::<Token>(), crate::object! {"token": Option<String>}),
        ),
        Operation::delete("/v1/tokens/{id}", "Revokes a token").shows::<Token>(),
        Operation::post("/v1/user-tokens", "Signs a token for a user").body::<UserTokenInput>().answers(
            StatusCode::CREATED,
            "signed",
            crate::object! {
                "token": String, "user_id": String, "space": String, "agent": Option<String>,
                "expires_at": chrono::DateTime<Utc>,
            },
        ),
    ]
}
