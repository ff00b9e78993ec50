//! Slack: events come in through the Events API, `chat.postMessage` goes out.

mod action;
mod event;
mod mrkdwn;
mod send;
mod text;

pub(super) use action::act;
pub(super) use send::Slack;

use super::{Incoming, accept, ignored, not_signed, parsed, received, whole_body};
use crate::signed;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use event::{Event, PersonMessage};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument, warn};
use wakeful_config::messenger::Answers;
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;
use wakeful_store::space::{self, Scope};
use wakeful_workflow::policy::ReplyRoute;

/// The word in `deliveries.channel`.
const NAME: &str = "slack";

/// The message length that Slack recommends. Slack cuts at 40,000; 4,000 characters stay below that even if
/// escaping makes each five times as long.
const SPLIT_AT: usize = 4000;

/// Slack waits three seconds for an answer and counts a timeout against the app. At this limit we answer 503,
/// early enough to arrive in time, and Slack sends the event again.
const ANSWER: Duration = Duration::from_millis(2_500);

/// Accepts one event. Answers once the message is committed, or 503 at the time limit. Slack then repeats the
/// event; if the message was committed meanwhile, its key marks the repeat as a duplicate.
pub(super) async fn receive(State(ctx): State<Arc<Ctx>>, request: Request) -> Result<Response, Problem> {
    let config = &ctx.config.messenger.slack;
    let body = signed_body(config, request).await?;
    let message = match event::read(&parsed(&body)?) {
        Event::Challenge(challenge) => return Ok(Json(json!({ "challenge": challenge })).into_response()),
        Event::NotForUs(why) => return Ok(ignored("Slack", why)?.into_response()),
        Event::Message(message) => message,
    };
    if !config.allow.allows(&message.user, &message.channel) {
        let why = "messenger.slack.allow_users or allow_channels does not list its sender or its channel";
        return Ok(ignored("Slack", why)?.into_response());
    }
    // Run as a task of its own, so that a late answer does not cancel the write. A cancelled write would free
    // its permit while its connection is still busy.
    let admitted = space::within(Scope::of(config.space()), admit(Arc::clone(&ctx), message));
    let taking = tokio::spawn(admitted.in_current_span());
    match tokio::time::timeout(ANSWER, taking).await {
        Ok(Ok(accepted)) => Ok(accepted?.into_response()),
        Ok(Err(panicked)) => std::panic::resume_unwind(panicked.into_panic()),
        Err(_) => {
            warn!("A message from Slack was not taken in time: Slack sends it again");
            Err(Problem::unavailable("the message was not taken in time; send it again", 1))
        }
    }
}

/// Reads a request that Slack has signed. An old one is refused before its body is read.
async fn signed_body(config: &wakeful_config::messenger::Slack, request: Request) -> Result<Bytes, Problem> {
    let (now, headers) = (chrono::Utc::now().timestamp(), request.headers().clone());
    let refused = |error| not_signed("Slack", error);
    signed::slack_is_fresh(&headers, now).map_err(refused)?;
    let body = whole_body(request).await?;
    signed::slack(&config.signing_secrets, &headers, &body, now).map_err(refused)?;
    Ok(body)
}

/// Takes the message if it is for the agent.
async fn admit(ctx: Arc<Ctx>, message: PersonMessage) -> Result<StatusCode, Problem> {
    let config = &ctx.config.messenger.slack;
    if config.answers == Answers::Mentions && !message.addressed && !is_known(&ctx, &message).await? {
        return ignored("Slack", "it does not mention the agent, and the agent is not in its thread");
    }
    let incoming = Incoming {
        space_id: config.space().to_owned(),
        conversation_id: message.conversation_id(),
        // A mention arrives as two events for one message, and Slack repeats each event whose answer got
        // lost.
        key: format!("slack/{}/{}", message.channel, message.ts),
        reply: Some(ReplyRoute {
            channel: NAME.to_owned(),
            to: message.reply_to(),
            split_at: Some(SPLIT_AT),
        }),
        text: message.text,
        sender: Some(message.user),
        agent: config.agent.clone(),
    };
    received("Slack", accept(&ctx, incoming).await)
}

/// Returns whether the thread already has a session.
async fn is_known(ctx: &Ctx, message: &PersonMessage) -> Result<bool, Problem> {
    // When too much comes in, this query is refused just as the message would be.
    let _permit = ctx.intake.enter().await?;
    let space = ctx.config.messenger.slack.space();
    let conversation_id = wakeful_workflow::id::conversation_id_in(space, &message.conversation_id())?;
    Ok(ctx.store.latest_agent(&conversation_id).await?.is_some())
}
