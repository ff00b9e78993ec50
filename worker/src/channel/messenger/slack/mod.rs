//! Slack: the Events API comes in, `chat.postMessage` goes out.

mod event;
mod send;
mod text;

pub(super) use send::Slack;

use super::{Incoming, ignored, parsed, received, take, unsigned};
use crate::api::Problem;
use crate::channel::signed;
use crate::config::messenger::Answers;
use crate::{Ctx, api};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use event::{Event, Said};
use serde_json::json;
use std::sync::Arc;
use wakeful_workflow::policy::ReplyRoute;

/// The word in `deliveries.channel`.
const NAME: &str = "slack";

/// What Slack advises as a message's length. It cuts at 40,000, which 4,000 do not reach even when each of them is escaped to five.
const SPLIT_AT: usize = 4000;

/// Takes one event. Slack wants its answer within three seconds, and gets it when the message is committed.
pub(super) async fn receive(
    State(ctx): State<Arc<Ctx>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    let body = body?;
    let config = &ctx.config.messenger.slack;
    let now = chrono::Utc::now().timestamp();
    signed::slack(&config.signing_secrets, &headers, &body, now).map_err(|error| unsigned("Slack", error))?;
    let said = match event::read(&parsed(&body)?) {
        Event::Challenge(challenge) => return Ok(Json(json!({ "challenge": challenge })).into_response()),
        Event::NotForUs(why) => return Ok(ignored("Slack", why)?.into_response()),
        Event::Said(said) => said,
    };
    if !config.allow.allows(&said.user, &said.channel) {
        let why = "messenger.slack.allow_users or allow_channels does not have its sender or its channel";
        return Ok(ignored("Slack", why)?.into_response());
    }
    if config.answers == Answers::Mentions && !said.addressed && !is_known(&ctx, &said).await? {
        return Ok(ignored("Slack", "it mentions nobody of us, in no thread of ours")?.into_response());
    }
    let incoming = Incoming {
        conversation_id: said.conversation_id(),
        // A mention comes as two events of one message, and each of them again when its answer was lost.
        key: format!("slack/{}/{}", said.channel, said.ts),
        reply: Some(ReplyRoute { channel: NAME.to_owned(), to: said.reply_to(), split_at: Some(SPLIT_AT) }),
        text: said.text,
        sender: Some(said.user),
        agent: config.agent.clone(),
    };
    Ok(received("Slack", take(&ctx, incoming).await)?.into_response())
}

/// Whether the agent is in that thread already.
async fn is_known(ctx: &Ctx, said: &Said) -> Result<bool, Problem> {
    let conversation_id = api::stored_conversation_id(&said.conversation_id())?;
    Ok(ctx.store.latest_agent(&conversation_id).await?.is_some())
}
