//! A conversation: its sessions, its history, and starting a new session in it.

use super::sessions::{Answer, limit, next_page, page};
use crate::access::Caller;
use crate::body::{Body, Id, NO_CURSOR, check_cursor, check_text, key_of, parse_if_any};
use crate::openapi::{Operation, Shape, both, page_of};
use crate::problem::Problem;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::new_session;
use wakeful_store::history;
use wakeful_store::page::{PAGE_BYTES, Page};
use wakeful_store::session::SessionSummary;
use wakeful_store::wake::NewSession;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ChainQuery {
    cursor: Option<String>,
    limit: Option<i64>,
}

/// Every session of a conversation's chain, including parent and child conversations, newest first. 404 if
/// the conversation does not exist.
pub(super) async fn sessions(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<ChainQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_cursor(query.cursor.as_deref(), "sess")?;
    let conversation_id = caller.conversation(&id)?;
    let limit = limit(query.limit)?;
    let items = ctx.store.chain(&conversation_id, query.cursor.as_deref(), limit).await?;
    let next = next_page(&items, limit, |last| json!(last.session_id));
    page(&items, next)
}

/// The history of a conversation and its parents and children, newest first, with totals over all of it. 404
/// if the conversation does not exist.
pub(super) async fn history(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<ChainQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_text("cursor", query.cursor.as_deref(), 512)?;
    if let Some(cursor) = &query.cursor
        && history::parse(cursor).is_none()
    {
        return Err(Problem::bad_request(NO_CURSOR));
    }
    let conversation_id = caller.conversation(&id)?;
    let limit = limit(query.limit)?;
    let cursor = query.cursor.as_deref();
    let Page { items, more, .. } =
        ctx.store.history(&conversation_id, true, cursor, limit, PAGE_BYTES).await?;
    let next = items.last().filter(|_| more).map(|last| &last.cursor);
    let totals = ctx.store.history_totals(&conversation_id, true).await?;
    Ok(Json(json!({"items": items, "next": next, "totals": totals})))
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewSession")]
struct Anew {
    agent: Option<String>,
    repository_id: Option<String>,
    client_key: Option<String>,
}

/// Starts a new session without a message: 201, or 200 with the session that the same `client_key` made
/// before. The conversation's next message goes to it. 404 if the conversation does not exist.
pub(super) async fn restart(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let asked: Anew = parse_if_any(&body?)?;
    let client_key = key_of("client_key", asked.client_key, &headers)?;
    check_text("repository_id", asked.repository_id.as_deref(), 256)?;
    let conversation_id = caller.conversation(&id)?;
    let agent = match asked.agent {
        Some(agent) => Some(agent),
        None => ctx.store.latest_agent(&conversation_id).await?,
    };
    let new = new_session::of_chat(&ctx.config, &ctx.plugins.tools, conversation_id, agent.as_deref())?;
    let new = NewSession { repository_id: asked.repository_id, ..new };
    let begun = ctx.store.restart(&new, client_key.as_deref()).await?;
    let status = if begun.duplicate { StatusCode::OK } else { StatusCode::CREATED };
    Ok((
        status,
        Json(json!({
            "session_id": begun.session_id, "conversation_id": id, "status": begun.status, "agent": new.agent,
        })),
    ))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(
            "/v1/conversations/{id}/sessions",
            "The sessions of a conversation and of its forks, newest first",
        )
        .query::<ChainQuery>()
        .lists::<SessionSummary>(),
        Operation::get(
            "/v1/conversations/{id}/history",
            "The history of a conversation and its forks, newest first",
        )
        .query::<ChainQuery>()
        .answers(
            StatusCode::OK,
            "a page, with totals over all of it",
            both(page_of::<history::HistoryItem>(), crate::object! {"totals": history::HistoryTotals}),
        ),
        Operation::post(
            "/v1/conversations/{id}/new",
            "A new session, to which the conversation's next message goes",
        )
        .body_if_any::<Anew>()
        .answers(StatusCode::CREATED, "made", made())
        .answers(StatusCode::OK, "the first answer to this key", made()),
    ]
}

fn made() -> Shape {
    crate::object! {"session_id": String, "conversation_id": String, "status": String, "agent": String}
}
