//! Messengers: Slack, Telegram, and a signed webhook for everything else.
//!
//! A webhook is verified over its raw bytes, translated and committed in one transaction; then it is answered
//! with 2xx. Replies are deliveries along the reply route with which the session starts.
#![doc = include_str!("README.md")]

mod http;
mod limits;
mod slack;
mod telegram;
mod webhook;

use super::signed::SignatureError;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{FromRequest as _, Request};
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::Value;
use std::sync::Arc;
use tracing::{info, warn};
use wakeful_config::Config;
use wakeful_config::Invalid;
use wakeful_config::webhook::webhook_key;
use wakeful_engine::channel::Channel;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::Refused;
use wakeful_engine::{ingest, new_session};
use wakeful_http::openapi::{Operation, Proof, of};
use wakeful_http::problem::Problem;
use wakeful_http::seldom::Seldom;
use wakeful_store::Error;
use wakeful_store::space::{self, Scope};
use wakeful_store::wake::{NewMessage, Woken};
use wakeful_workflow::id::conversation_id_in;
use wakeful_workflow::policy::ReplyRoute;

/// Builds the channels that send to messengers. Also checks rules that span several configuration keys.
pub(super) fn senders(config: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    check(config).map_err(Invalid)?;
    let messenger = &config.messenger;
    let mut senders: Vec<Arc<dyn Channel>> = Vec::new();
    if let Some(token) = &messenger.slack.token {
        senders.push(Arc::new(slack::Slack::new(token.clone(), messenger.slack.base_url.clone())?));
    }
    if let Some(token) = &messenger.telegram.token {
        senders.push(Arc::new(telegram::Telegram::new(token.clone(), &messenger.telegram.base_url)?));
    }
    if let Some(webhook) = webhook::Webhook::new(&messenger.webhook)? {
        senders.push(Arc::new(webhook));
    }
    Ok(senders)
}

/// `/v1/triggers/messenger/…`: incoming messages. A messenger without a secret answers 404 and names the keys
/// to set.
pub(super) fn webhooks(ctx: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    let messenger = &ctx.config.messenger;
    let closed = |name: &'static str, keys: &'static str| post(move || async move { not_set_up(name, keys) });
    let slack = match messenger.slack.signing_secrets.is_empty() {
        true => closed("Slack", "`token` and `signing_secrets` in [messenger.slack]"),
        false => post(slack::receive),
    };
    let actions = match messenger.slack.signing_secrets.is_empty() {
        true => closed("Slack", "`token` and `signing_secrets` in [messenger.slack]"),
        false => post(slack::act),
    };
    let telegram = match messenger.telegram.webhook_secrets.is_empty() {
        true => closed("Telegram", "`token`, `webhook_secrets` and `allow_users` in [messenger.telegram]"),
        false => post(telegram::receive),
    };
    let webhook = match messenger.webhook.secrets.is_empty() {
        true => closed("the signed webhook", "`secrets` in [messenger.webhook]"),
        false => post(webhook::receive),
    };
    Router::new()
        .route("/messenger/slack", slack)
        .route("/messenger/slack/actions", actions)
        .route("/messenger/telegram", telegram)
        .route("/messenger/webhook", webhook)
}

/// 404 that names the keys to set.
fn not_set_up(messenger: &str, keys: &str) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("{messenger} is not set up here: set {keys}"))
}

/// # Errors
/// A sentence that says what to change.
fn check(config: &Config) -> Result<(), String> {
    let messenger = &config.messenger;
    if !messenger.slack.signing_secrets.is_empty() && messenger.slack.token.is_none() {
        return Err("messenger.slack.signing_secrets is set and messenger.slack.token is not: messages would come in, and \
                    no reply go out, so set the token too"
            .to_owned());
    }
    let telegram = &messenger.telegram;
    if !telegram.webhook_secrets.is_empty() {
        if telegram.token.is_none() {
            return Err("messenger.telegram.webhook_secrets is set and messenger.telegram.token is not: a \
                        conversation is named after its bot, so set the token too"
                .to_owned());
        }
        if telegram.allow.users.is_none() {
            return Err("messenger.telegram.allow_users is not set, so anybody who finds the bot could write to it: name \
                        the ids of those who may, or set it to [\"*\"] for everybody"
                .to_owned());
        }
    }
    if let Some(at) = messenger.webhook.secrets.iter().position(|secret| webhook_key(secret).is_none()) {
        return Err(format!(
            "messenger.webhook.secrets: number {} is not a secret of Standard Webhooks: use whsec_ and the Base64 of at \
             least 24 random bytes, such as what `echo whsec_$(head -c 24 /dev/urandom | base64)` prints",
            at + 1
        ));
    }
    if messenger.webhook.reply_url.is_some() && messenger.webhook.secrets.is_empty() {
        return Err("messenger.webhook.reply_url is set and messenger.webhook.secrets is not: replies are signed, so set \
                    a secret"
            .to_owned());
    }
    Ok(())
}

/// A message, translated from a messenger's format.
struct Incoming {
    space_id: String,
    /// The conversation id without the space.
    conversation_id: String,
    /// The deduplication key: the same when the messenger repeats the message.
    key: String,
    text: String,
    sender: Option<String>,
    agent: Option<String>,
    reply: Option<ReplyRoute>,
}

/// Commits the message in its space. It goes to the latest session of its conversation, or starts one.
async fn accept(ctx: &Ctx, incoming: Incoming) -> Result<Woken, Refused> {
    space::within(Scope::of(&incoming.space_id), accept_in(ctx, incoming)).await
}

async fn accept_in(ctx: &Ctx, incoming: Incoming) -> Result<Woken, Refused> {
    let conversation_id = conversation_id_in(&incoming.space_id, &incoming.conversation_id)?;
    let agent = incoming.agent.as_deref();
    let new =
        new_session::of_message(&ctx.config, &ctx.plugins.tools, conversation_id, agent, incoming.reply)?;
    let message = NewMessage {
        client_key: Some(incoming.key),
        text: incoming.text,
        sender: incoming.sender,
        trace_context: None,
        attachments: Vec::new(),
    };
    ingest::accept(ctx, new, message).await
}

/// Answers a messenger that repeats a message until it gets a 2xx. A message that would be refused every time
/// is acknowledged with 200, and the log says why it was dropped.
fn received(messenger: &str, accepted: Result<Woken, Refused>) -> Result<StatusCode, Problem> {
    match accepted {
        Ok(_) => Ok(StatusCode::OK),
        Err(Refused::Store(Error::Bundle(_) | Error::KeyReused { .. })) => {
            // The same key with other text: a second event for a message that was already taken.
            Ok(StatusCode::OK)
        }
        Err(
            refused @ (Refused::CannotBegin(_)
            | Refused::ConversationId(_)
            | Refused::Store(
                Error::Conflict { .. }
                | Error::Refused { .. }
                | Error::Schedule { .. }
                | Error::OfAUser { .. },
            )),
        ) => {
            warn!(error = %Problem::from(refused), "A message from {messenger} came to nothing");
            Ok(StatusCode::OK)
        }
        Err(refused @ (Refused::Full | Refused::Store(_))) => Err(refused.into()),
    }
}

/// Acknowledges a message that is not taken: it is not for the agent, is the agent's own, or its sender is
/// not allowed.
fn ignored(messenger: &str, why: &str) -> Result<StatusCode, Problem> {
    info!(why, "A message from {messenger} is not taken");
    Ok(StatusCode::OK)
}

/// 401 for a wrong signature. The body was not parsed.
fn not_signed(messenger: &'static str, error: SignatureError) -> Problem {
    // Strangers may send as many as they like.
    static LINES: Seldom = Seldom::new();
    if let Some(left_out) = LINES.turn(messenger) {
        warn!(error = %error, left_out, "A webhook that claims to be from {messenger} was refused");
    }
    Problem::new(StatusCode::UNAUTHORIZED, error.to_string())
}

/// Reads a request's body. The caller has looked at what the headers say of the sender.
async fn whole_body(request: Request) -> Result<Bytes, Problem> {
    Ok(Bytes::from_request(request, &()).await?)
}

/// Parses a verified body as JSON.
fn parsed(body: &[u8]) -> Result<Value, Problem> {
    serde_json::from_slice(body)
        .map_err(|error| Problem::bad_request(format!("the body is not the JSON that is expected: {error}")))
}

/// Removes NUL, which the database cannot store.
fn without_nul(text: &str) -> String {
    text.replace('\0', "")
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    let messenger = |path, summary, scheme: &'static [&'static str]| {
        Operation::post(path, summary)
            .bytes(&["application/json"])
            .proved_by(Proof::Own(scheme))
            .answers_bytes(StatusCode::OK, "taken", "")
            .refuses(&[StatusCode::NOT_FOUND])
    };
    vec![
        messenger("/v1/triggers/messenger/slack", "Slack's events", &["slack"]),
        messenger("/v1/triggers/messenger/telegram", "Telegram's updates", &["telegram"]),
        Operation::post(
            "/v1/triggers/messenger/slack/actions",
            "A press of a button in a card of a notification",
        )
        .bytes(&["application/x-www-form-urlencoded"])
        .proved_by(Proof::Own(&["slack"]))
        .answers_bytes(StatusCode::OK, "taken", "")
        .refuses(&[StatusCode::NOT_FOUND]),
        Operation::post("/v1/triggers/messenger/webhook", "A message with a signature of Standard Webhooks")
            .bytes(&["application/json"])
            .proved_by(Proof::Own(&["standardWebhook"]))
            .answers(StatusCode::ACCEPTED, "accepted", of::<Woken>())
            .answers(StatusCode::OK, "the first answer to this key", of::<Woken>())
            .refuses(&[StatusCode::NOT_FOUND]),
    ]
}
