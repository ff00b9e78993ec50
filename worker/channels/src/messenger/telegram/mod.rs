//! Telegram: updates of a bot come in, `sendMessage` goes out.

mod send;
mod update;

pub(super) use send::Telegram;

use super::{Incoming, ignored, parsed, received, take, unsigned};
use crate::signed;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode};
use secrecy::ExposeSecret;
use std::sync::Arc;
use tracing::warn;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::Refused;
use wakeful_http::problem::Problem;
use wakeful_store::Error;
use wakeful_workflow::id::stored_conversation_id;
use wakeful_workflow::policy::ReplyRoute;
use wakeful_workflow::reply::outgoing;

/// The word in `deliveries.channel`.
const NAME: &str = "telegram";

/// The most that Telegram takes in one message, in the UTF-16 units in which it counts.
const SPLIT_AT: usize = 4096;

/// What is said in a chat that takes no more. For a minute it stands for all that is written there.
const NOT_TAKEN: &str = "I have too many messages here to read, and did not take yours. What you write in the next minutes may be lost \
                         as well: please send it again later.";

/// Takes one update. Telegram sends it again until it is answered with 2xx, and the bot's next ones wait for that. So where one
/// chat is full, whoever writes there is told that this was not taken, and the other chats go on.
pub(super) async fn receive(
    State(ctx): State<Arc<Ctx>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<StatusCode, Problem> {
    let body = body?;
    let config = &ctx.config.messenger.telegram;
    signed::telegram(&config.webhook_secrets, &headers).map_err(|error| unsigned("Telegram", error))?;
    let said = match update::read(&parsed(&body)?) {
        Ok(said) => said,
        Err(why) => return ignored("Telegram", why),
    };
    if !config.allow.allows(&said.user, &said.chat.to_string()) {
        let why = "messenger.telegram.allow_users or allow_channels does not have its sender or its chat";
        return ignored("Telegram", why);
    }
    let bot = config.token.as_ref().map_or("bot", |token| bot(token.expose_secret()));
    let conversation_id = said.conversation_id(bot);
    let route = ReplyRoute { channel: NAME.to_owned(), to: said.reply_to(), split_at: Some(SPLIT_AT) };
    let incoming = Incoming {
        conversation_id: conversation_id.clone(),
        // The same message has the same number whenever its update comes.
        key: format!("telegram/{}/{}", said.chat, said.message),
        reply: Some(route.clone()),
        text: said.text,
        sender: Some(said.user),
        agent: config.agent.clone(),
    };
    match take(&ctx, incoming).await {
        Err(Refused::Store(full @ Error::InboxFull { .. })) => {
            turn_away(&ctx, &conversation_id, &route, &full).await
        }
        taken => received("Telegram", taken),
    }
}

/// Tells whoever writes to a chat that is full that nothing more is taken there. When that is durable, the update is received.
async fn turn_away(
    ctx: &Ctx,
    conversation_id: &str,
    route: &ReplyRoute,
    full: &Error,
) -> Result<StatusCode, Problem> {
    let _turn = ctx.intake.enter().await?;
    let stored = stored_conversation_id(conversation_id)?;
    for word in outgoing(route, NAME, NOT_TAKEN) {
        if ctx.store.turn_away(&stored, NAME, &word.content).await? {
            ctx.bus.notifier.job();
        }
    }
    warn!(error = %full, conversation_id, "A message from Telegram was not taken, and its sender is told");
    Ok(StatusCode::OK)
}

/// The bot's own id, which is the part of its token that is no secret.
fn bot(token: &str) -> &str {
    token.split(':').next().unwrap_or_default()
}
