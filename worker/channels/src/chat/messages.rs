//! A chat message comes in by HTTP: its session is chosen, the message is handed to ingest, and the sender gets 202.

use super::legacy::{self, Cache};
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_config::DEFAULT_AGENT;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::{ingest, new_session};
use wakeful_http::access::Caller;
use wakeful_http::body::{Body, accepted, check_text, key_of, message_text, parse};
use wakeful_http::openapi::{Operation, of};
use wakeful_http::problem::Problem;
use wakeful_store::legacy::LegacyCount;
use wakeful_store::wake::{ChatWoken, NewMessage, NewSession, Woken};
use wakeful_workflow::trigger::{CHAT, separate_session_type};

/// State shared by the routes of chats.
#[derive(Clone)]
pub(super) struct Chats {
    pub ctx: Arc<Ctx>,
    /// The cache of chats that are older than sessions, if one is configured.
    pub cache: Arc<Option<Cache>>,
}

/// The body of `POST /v1/chat/{conversation_id}/messages`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ChatMessage {
    user_id: Option<String>,
    text: String,
    client_key: Option<String>,
    /// The agent of the session that this message begins: the first of a conversation, or a chat about a notice. A message that
    /// continues a session does not use it; if that session is of another agent, the answer has a `warning`.
    agent: Option<String>,
    /// The repository of that session. A message that continues a session does not use it.
    repository_id: Option<String>,
}

/// What became of a chat message.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatAccepted")]
pub(super) struct Sent {
    #[serde(flatten)]
    woken: Woken,
    /// That the message names an agent, and continues a session of another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

/// Accepts a message: 202, or 200 with the first answer when its `client_key` was used before.
pub(super) async fn post_message(
    State(chats): State<Chats>,
    caller: Caller,
    conversation_id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Sent>), Problem> {
    let Path(conversation_id) = conversation_id?;
    let mut message: ChatMessage = parse(&body?)?;
    message.client_key = key_of("client_key", message.client_key, &headers)?;
    let conversation_id = caller.conversation(&conversation_id)?;
    check_text("user_id", message.user_id.as_deref(), 256)?;
    check_text("repository_id", message.repository_id.as_deref(), 256)?;
    let text = message_text(message.text)?;
    let (client_key, trace_context) = (message.client_key, None);
    let attachments = Vec::new();
    let sender = caller.speaker(message.user_id.as_deref(), false)?.user_id().map(str::to_owned);
    let new = NewMessage { client_key, text, sender, trace_context, attachments };
    let (agent, repository_id) = (caller.agent(message.agent.as_deref())?, message.repository_id);
    let (woken, latest_agent) = wake(&chats, &caller, conversation_id, agent, repository_id, new).await?;
    // The message may have begun a new session with the named agent all the same, so look at the session that got it.
    let warning = match (agent, latest_agent) {
        (Some(agent), Some(latest)) if agent != latest => {
            let session = chats.ctx.store.session_within(&caller.reach, &woken.session_id).await?;
            let is_other = session.agent != agent;
            is_other.then(|| {
                let goes_on = format!("the message continues a session of the agent {}", session.agent);
                format!("{goes_on}; `agent` is for a session that a message begins")
            })
        }
        (_, _) => None,
    };
    let (status, Json(woken)) = accepted(woken);
    Ok((status, Json(Sent { woken, warning })))
}

/// Gives the message to the conversation's latest session, or to a new one. Also returns the agent that the latest session had
/// before, if that was read.
async fn wake(
    chats: &Chats,
    caller: &Caller,
    conversation_id: String,
    agent: Option<&str>,
    repository_id: Option<String>,
    message: NewMessage,
) -> Result<(Woken, Option<String>), Problem> {
    let ctx = &*chats.ctx;
    // From the configuration: the agent's model and tools, and its system prompt as the only seed.
    let of_agent = |agent: Option<&str>, shared: bool| -> Result<NewSession, Problem> {
        let new = new_session::of_chat(&ctx.config, &ctx.plugins.tools, conversation_id.clone(), agent)?;
        let speaker = Some(caller.speaker(message.sender.as_deref(), shared)?);
        let only_agent = caller.reach.agent.is_some();
        Ok(NewSession { repository_id: repository_id.clone(), speaker, only_agent, ..new })
    };
    // Usually nothing depends on the agent of the conversation, so nothing is read to learn it.
    if agent.is_none()
        && caller.reach.agent.is_none()
        && caller.begins(&conversation_id)
        && chats.cache.is_none()
        && let Some(shared) = ctx.config.shared_by_all()
        && let Ok(new) = of_agent(None, shared)
        && let ChatWoken::Accepted(woken) = ingest::accept_chat(ctx, new, message.clone()).await?
    {
        return Ok((woken, None));
    }
    let latest = {
        // The query needs a permit too, so an overload refuses it with the same error.
        let _permit = ctx.intake.enter().await?;
        ctx.store.latest_trigger(&conversation_id).await?
    };
    let latest_agent = latest.as_ref().map(|(_, agent)| agent.clone());
    caller.enters(&conversation_id, latest_agent.as_deref())?;
    // Who may write is a setting of the conversation's agent, and of the agent of a new conversation.
    let shared = ctx.config.is_shared(latest_agent.as_deref().or(agent).unwrap_or(DEFAULT_AGENT));
    let agent = match agent {
        Some(agent) => Some(agent.to_owned()),
        // After a herald's notice, a chat message gets a session of its own with the same agent.
        None => {
            latest.filter(|(latest, _)| separate_session_type(latest, CHAT).is_some()).map(|(_, agent)| agent)
        }
    };
    let new = of_agent(agent.as_deref(), shared)?;
    // `Some` only if a cache of old chats is configured and it has this conversation.
    let woken = match legacy::find(ctx, (*chats.cache).as_ref(), &new, message.sender.as_deref()).await? {
        Some(chat) => {
            let (new, imported) = chat.into_session(new);
            ingest::accept_imported(ctx, new, message, &imported).await?
        }
        None => ingest::accept(ctx, new, message).await?,
    };
    Ok((woken, latest_agent))
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

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post("/v1/chat/{conversation_id}/messages", "Sends a message to a conversation")
            .body::<ChatMessage>()
            .answers(StatusCode::ACCEPTED, "accepted", of::<Sent>())
            .answers(StatusCode::OK, "the first answer to this key", of::<Sent>()),
        Operation::get("/v1/chat/legacy", "How often the cache of old chats was read").answers(
            StatusCode::OK,
            "the counts",
            wakeful_http::object! {"enabled": bool, "advice": Option<String>, "items": Vec<LegacyCount>},
        ),
    ]
}
