//! Slack: the Events API comes in, `chat.postMessage` goes out.

mod event;
mod send;
mod text;

pub(super) use send::Slack;

use super::{Incoming, ignored, parsed, received, take, unsigned};
use crate::signed;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use event::{Event, Said};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument, warn};
use wakeful_config::messenger::Answers;
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;
use wakeful_workflow::policy::ReplyRoute;

/// The word in `deliveries.channel`.
const NAME: &str = "slack";

/// What Slack advises as a message's length. It cuts at 40,000, which 4,000 do not reach even when each of them is escaped to five.
const SPLIT_AT: usize = 4000;

/// Slack waits three seconds for an answer, and holds a silence against the app. What is not committed by then is told to come
/// again, with time left for its way.
const ANSWER: Duration = Duration::from_millis(2_500);

/// Takes one event. It is answered when the message is committed, or with 503 in time: Slack sends it again then, and what has
/// been committed meanwhile is known.
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
    // It goes on behind a late answer: what was broken off would still hold its connection, and nobody else could have its turn.
    let taking = tokio::spawn(admit(Arc::clone(&ctx), said).in_current_span());
    match tokio::time::timeout(ANSWER, taking).await {
        Ok(Ok(taken)) => Ok(taken?.into_response()),
        Ok(Err(panicked)) => std::panic::resume_unwind(panicked.into_panic()),
        Err(_) => {
            warn!("A message from Slack was not taken in time: Slack sends it again");
            Err(Problem::unavailable("the message was not taken in time; send it again", 1))
        }
    }
}

/// Takes the message if it is for the agent.
async fn admit(ctx: Arc<Ctx>, said: Said) -> Result<StatusCode, Problem> {
    let config = &ctx.config.messenger.slack;
    if config.answers == Answers::Mentions && !said.addressed && !is_known(&ctx, &said).await? {
        return ignored("Slack", "it mentions nobody of us, in no thread of ours");
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
    received("Slack", take(&ctx, incoming).await)
}

/// Whether the agent is in that thread already.
async fn is_known(ctx: &Ctx, said: &Said) -> Result<bool, Problem> {
    // It is refused as the message itself would be, when too much comes in.
    let _turn = ctx.intake.enter().await?;
    let conversation_id = wakeful_workflow::id::stored_conversation_id(&said.conversation_id())?;
    Ok(ctx.store.latest_agent(&conversation_id).await?.is_some())
}
