//! Telegram: updates of a bot come in, `sendMessage` goes out.

mod send;
mod update;

pub(super) use send::Telegram;

use super::{Incoming, ignored, parsed, received, take, unsigned};
use crate::Ctx;
use crate::api::Problem;
use crate::channel::signed;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode};
use secrecy::ExposeSecret;
use std::sync::Arc;
use wakeful_workflow::policy::ReplyRoute;

/// The word in `deliveries.channel`.
const NAME: &str = "telegram";

/// The most that Telegram takes in one message, in the UTF-16 units in which it counts.
const SPLIT_AT: usize = 4096;

/// Takes one update. Telegram sends it again until it is answered with 2xx, and the bot's next ones wait for that.
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
    let incoming = Incoming {
        conversation_id: said.conversation_id(bot),
        // The same message has the same number whenever its update comes.
        key: format!("telegram/{}/{}", said.chat, said.message),
        reply: Some(ReplyRoute { channel: NAME.to_owned(), to: said.reply_to(), split_at: Some(SPLIT_AT) }),
        text: said.text,
        sender: Some(said.user),
        agent: config.agent.clone(),
    };
    received("Telegram", take(&ctx, incoming).await)
}

/// The bot's own id, which is the part of its token that is no secret.
fn bot(token: &str) -> &str {
    token.split(':').next().unwrap_or_default()
}
