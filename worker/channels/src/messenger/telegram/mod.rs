//! Telegram: a bot's updates come in, `sendMessage` goes out.

mod send;
mod update;

pub(super) use send::Telegram;

use super::{Incoming, accept, ignored, not_signed, parsed, received, whole_body};
use crate::signed;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use secrecy::ExposeSecret;
use std::sync::Arc;
use tracing::warn;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::Refused;
use wakeful_http::problem::Problem;
use wakeful_store::Error;
use wakeful_store::space::{self, Scope};
use wakeful_workflow::id::conversation_id_in;
use wakeful_workflow::policy::ReplyRoute;
use wakeful_workflow::reply::outgoing;

/// The word in `deliveries.channel`.
const NAME: &str = "telegram";

/// The longest message that Telegram takes, in UTF-16 units, which is how it counts.
const SPLIT_AT: usize = 4096;

/// The reply in a chat that accepts no more messages. At most one is sent per chat and minute.
const NOT_ACCEPTED: &str = "I have too many messages here to read, and did not take yours. What you write in the next minutes may be lost \
                         as well: please send it again later.";

/// Accepts one update. Telegram repeats an update until it gets a 2xx, and holds back the bot's other updates
/// meanwhile. So when one chat is full, its sender is told that the message was not accepted, and the other
/// chats go on.
pub(super) async fn receive(State(ctx): State<Arc<Ctx>>, request: Request) -> Result<StatusCode, Problem> {
    let config = &ctx.config.messenger.telegram;
    signed::telegram(&config.webhook_secrets, request.headers())
        .map_err(|error| not_signed("Telegram", error))?;
    let body = whole_body(request).await?;
    let message = match update::read(&parsed(&body)?) {
        Ok(message) => message,
        Err(why) => return ignored("Telegram", why),
    };
    if !config.allow.allows(&message.user, &message.chat.to_string()) {
        let why = "messenger.telegram.allow_users or allow_channels does not list its sender or its chat";
        return ignored("Telegram", why);
    }
    let bot = config.token.as_ref().map_or("bot", |token| bot(token.expose_secret()));
    let conversation_id = message.conversation_id(bot);
    let route = ReplyRoute { channel: NAME.to_owned(), to: message.reply_to(), split_at: Some(SPLIT_AT) };
    let incoming = Incoming {
        space_id: config.space().to_owned(),
        conversation_id: conversation_id.clone(),
        // The message number stays the same when Telegram repeats the update.
        key: format!("telegram/{}/{}", message.chat, message.number),
        reply: Some(route.clone()),
        text: message.text,
        sender: Some(message.user),
        agent: config.agent.clone(),
    };
    match accept(&ctx, incoming).await {
        Err(Refused::Store(full @ Error::InboxFull { .. })) => {
            let notice = notify_chat_full(&ctx, &conversation_id, &route, &full);
            space::within(Scope::of(config.space()), notice).await
        }
        accepted => received("Telegram", accepted),
    }
}

/// Tells the sender in a full chat that the message was not accepted. Answers 2xx once that notice is
/// committed.
async fn notify_chat_full(
    ctx: &Ctx,
    conversation_id: &str,
    route: &ReplyRoute,
    full: &Error,
) -> Result<StatusCode, Problem> {
    let _permit = ctx.intake.enter().await?;
    let stored = conversation_id_in(ctx.config.messenger.telegram.space(), conversation_id)?;
    for word in outgoing(route, NAME, NOT_ACCEPTED) {
        if ctx.store.enqueue_full_notice(&stored, NAME, &word.content).await? {
            ctx.bus.notifier.job(wakeful_store::queue::Kind::Deliver);
        }
    }
    warn!(error = %full, conversation_id, "A message from Telegram was not accepted; its sender gets a notice");
    Ok(StatusCode::OK)
}

/// The bot's own id: the public part of its token.
fn bot(token: &str) -> &str {
    token.split(':').next().unwrap_or_default()
}
