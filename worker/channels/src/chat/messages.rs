//! The chat trigger.

use super::legacy::{self, Cache};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::new_session::CannotBegin;
use wakeful_engine::{ingest, new_session};
use wakeful_http::body::{accepted, check_text, idempotency_key, message_text, parse};
use wakeful_http::problem::Problem;
use wakeful_store::wake::{ChatWoken, NewMessage, NewSession, Woken};
use wakeful_workflow::id::stored_conversation_id;
use wakeful_workflow::trigger::{CHAT, separate_session_type};

/// State shared by the routes of chats.
#[derive(Clone)]
pub(super) struct Chats {
    pub ctx: Arc<Ctx>,
    /// The cache of chats that are older than sessions, if one is configured.
    pub cache: Arc<Option<Cache>>,
}

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
    State(chats): State<Chats>,
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
    Ok(accepted(wake(&chats, conversation_id, agent, repository_id, new).await?))
}

/// Gives the message to the conversation's latest session, or to a new one.
async fn wake(
    chats: &Chats,
    conversation_id: String,
    agent: Option<&str>,
    repository_id: Option<String>,
    message: NewMessage,
) -> Result<Woken, Problem> {
    let ctx = &*chats.ctx;
    // From the configuration: the agent's model and tools, and its system prompt as the only seed.
    let of_agent = |agent: Option<&str>| {
        let new = new_session::of_chat(&ctx.config, &ctx.plugins.tools, conversation_id.clone(), agent)?;
        Ok::<_, CannotBegin>(NewSession { repository_id: repository_id.clone(), ..new })
    };
    // After a herald's notice, a chat message gets a session of its own with the same agent.
    let agent = match agent {
        Some(agent) => Some(agent.to_owned()),
        None => match of_agent(None) {
            Ok(new) if chats.cache.is_none() => match ingest::accept_chat(ctx, new, message.clone()).await? {
                ChatWoken::Accepted(woken) => return Ok(woken),
                ChatWoken::AboutNotice { agent } => Some(agent),
            },
            // A chat of the cache is read for one session, so its agent must be known before. And without a default
            // agent a chat about a notice can begin all the same.
            Ok(_) | Err(_) => agent_of_notice(ctx, &conversation_id).await?,
        },
    };
    let new = of_agent(agent.as_deref())?;
    // `Some` only if a cache of old chats is configured and it has this conversation.
    match legacy::find(ctx, (*chats.cache).as_ref(), &new, message.sender.as_deref()).await? {
        Some(chat) => {
            let (new, imported) = chat.into_session(new);
            Ok(ingest::accept_imported(ctx, new, message, &imported).await?)
        }
        None => Ok(ingest::accept(ctx, new, message).await?),
    }
}

/// The agent of the notice that a chat message would be about.
async fn agent_of_notice(ctx: &Ctx, conversation_id: &str) -> Result<Option<String>, Problem> {
    // The query needs a permit too, so an overload refuses it with the same error.
    let _permit = ctx.intake.enter().await?;
    let latest = ctx.store.latest_trigger(conversation_id).await?;
    Ok(latest.filter(|(latest, _)| separate_session_type(latest, CHAT).is_some()).map(|(_, agent)| agent))
}

/// The lookups in the cache of old chats, counted per day, and advice about turning it off.
pub(super) async fn legacy_counts(State(chats): State<Chats>) -> Result<Json<Value>, Problem> {
    let settings = &chats.ctx.config.chat.legacy;
    let counts = chats.ctx.store.legacy_counts().await?;
    Ok(Json(json!({
        "enabled": chats.cache.is_some(),
        "advice": legacy::advice(settings, &counts),
        "items": counts,
    })))
}
