//! The chat trigger.

use super::{Problem, stored_conversation_id};
use crate::channel::chat::legacy;
use crate::{Ctx, ingest, origin};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_store::wake::{NewMessage, NewSession, Woken};
use wakeful_workflow::trigger::{CHAT, opens_beside};

/// The body of `POST /v1/chat/{conversation_id}/messages`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChatMessage {
    user_id: Option<String>,
    text: String,
    client_key: Option<String>,
    /// Only a conversation's first message uses this field and the next.
    agent: Option<String>,
    repository_id: Option<String>,
}

/// Accepts a message: 202, or 200 with the first answer when its `client_key` was used before.
pub(super) async fn post_message(
    State(ctx): State<Arc<Ctx>>,
    conversation_id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<Woken>), Problem> {
    let Path(conversation_id) = conversation_id?;
    let mut message: ChatMessage = parse(&body?)?;
    message.client_key = message.client_key.or(idempotency_key(&headers)?);
    let conversation_id = stored_conversation_id(&conversation_id)?;
    check_text("user_id", message.user_id.as_deref(), 256)?;
    check_text("client_key", message.client_key.as_deref(), 256)?;
    check_text("repository_id", message.repository_id.as_deref(), 256)?;
    let text = message_text(message.text)?;
    let (client_key, trace_context) = (message.client_key, None);
    let attachments = Vec::new();
    let new = NewMessage { client_key, text, sender: message.user_id, trace_context, attachments };
    let (agent, repository_id) = (message.agent.as_deref(), message.repository_id);
    Ok(answer(wake(&ctx, conversation_id, agent, repository_id, new).await?))
}

/// Wakes the conversation's latest session with a message.
pub(crate) async fn wake(
    ctx: &Ctx,
    conversation_id: String,
    agent: Option<&str>,
    repository_id: Option<String>,
    message: NewMessage,
) -> Result<Woken, Problem> {
    let agent = match agent {
        Some(agent) => Some(agent.to_owned()),
        // If the latest session is of a type that a chat does not continue, such as a notice's, the chat
        // opens a session of its own with the same agent.
        None => {
            // When too much comes in, this query is refused just as the message would be.
            let _turn = ctx.intake.enter().await?;
            let latest = ctx.store.latest_trigger(&conversation_id).await?;
            latest.filter(|(latest, _)| opens_beside(latest, CHAT).is_some()).map(|(_, agent)| agent)
        }
    };
    let new = origin::of_chat(&ctx.config, &ctx.tools, conversation_id, agent.as_deref())?;
    let new = NewSession { repository_id, ..new };
    match legacy::find(ctx, &new, message.sender.as_deref()).await? {
        Some(chat) => {
            let (new, imported) = chat.begins(new);
            ingest::take_imported(ctx, new, message, &imported).await
        }
        None => ingest::take(ctx, new, message).await,
    }
}

/// 202, or 200 for a message that was accepted before.
pub(crate) fn answer(woken: Woken) -> (StatusCode, Json<Woken>) {
    let status = if woken.duplicate { StatusCode::OK } else { StatusCode::ACCEPTED };
    (status, Json(woken))
}

/// The header `Idempotency-Key`: means the same as `client_key`, for clients that set it on every request.
pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let key = key.to_str().map_err(|_| Problem::bad_request("`Idempotency-Key` is not ASCII"))?;
    Ok(Some(key.to_owned()))
}

/// Parses a JSON body. The error says where it is wrong.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let text = std::str::from_utf8(body).map_err(|error| {
        Problem::bad_request(format!("the body is not UTF-8: invalid at byte {}", error.valid_up_to()))
    })?;
    if text.trim().is_empty() {
        return Err(Problem::bad_request("the body is empty; a JSON object is expected"));
    }
    // serde would also accept an array, and read the fields in order.
    if !text.trim_start().starts_with('{') {
        return Err(Problem::bad_request("the body is not the JSON that is expected: an object, at line 1"));
    }
    serde_json::from_str(text)
        .map_err(|error| Problem::bad_request(format!("the body is not the JSON that is expected: {error}")))
}

/// Checks a message's text: not empty, and without NUL, which the database cannot store.
pub(crate) fn message_text(text: String) -> Result<String, Problem> {
    if text.trim().is_empty() {
        return Err(Problem::bad_request("`text` is empty"));
    }
    if text.contains('\0') {
        return Err(Problem::bad_request("`text` contains a NUL character"));
    }
    Ok(text)
}

pub(crate) fn check_text(name: &str, text: Option<&str>, limit: usize) -> Result<(), Problem> {
    match text {
        Some(text) if text.is_empty() || text.len() > limit || text.chars().any(char::is_control) => {
            Err(Problem::bad_request(format!("`{name}` has 1 to {limit} bytes and no control characters")))
        }
        Some(_) | None => Ok(()),
    }
}

/// The lookups in the cache of old chats, counted per day, and advice about turning it off.
pub(super) async fn legacy_counts(State(ctx): State<Arc<Ctx>>) -> Result<Json<Value>, Problem> {
    let settings = &ctx.config.chat.legacy;
    let counts = ctx.store.legacy_counts().await?;
    Ok(Json(json!({
        "enabled": ctx.legacy.is_some(),
        "advice": legacy::advice(settings, &counts),
        "items": counts,
    })))
}
