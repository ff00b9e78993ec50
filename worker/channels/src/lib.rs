//! Channels: where messages come from and go to. One folder per medium.
//!
//! This crate is internal and not stable. Programs use the crate `wakeful`.
//!
//! An incoming message is verified, translated and handed to [`wakeful_engine::ingest`]; no trigger runs an
//! agent itself. An outgoing message is a delivery, which [`wakeful_engine::jobs::deliver`] hands to the
//! [`Channel`] of its name.

use axum::Router;
use std::sync::Arc;
use wakeful_config::Config;
use wakeful_engine::channel::Channel;
use wakeful_engine::ctx::Ctx;
use wakeful_http::openapi::Operation;

pub mod absurd;
pub mod chat;
pub mod cron;
pub mod email;
pub mod herald;
pub mod messenger;
mod notify;
pub mod signed;

/// Returns the channels that the configuration sets up for sending.
///
/// # Errors
/// A configuration from which a channel cannot be built.
pub fn senders(config: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    let mut senders = email::senders(config)?;
    senders.extend(messenger::senders(config)?);
    senders.extend(notify::senders(config)?);
    Ok(senders)
}

/// The routes of `/v1/triggers` whose callers prove themselves with a signature instead of the bearer token.
pub fn webhooks(ctx: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    Router::new().merge(email::webhooks(ctx)).merge(messenger::webhooks(ctx))
}

/// The routes of `/v1` that the bearer token guards.
///
/// # Errors
/// An invalid address of the old cache of chats.
pub fn guarded(ctx: &Arc<Ctx>) -> anyhow::Result<Router<Arc<Ctx>>> {
    let chat = chat::routes(ctx)?;
    Ok(chat.merge(absurd::routes()).merge(herald::routes()).merge(cron::routes()).merge(email::routes()))
}

/// What the OpenAPI document says of the routes of this crate.
pub fn operations() -> Vec<Operation> {
    [
        chat::operations(),
        absurd::operations(),
        herald::operations(),
        cron::operations(),
        email::operations(),
        messenger::operations(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Runs the listeners other than HTTP (LMTP) until the process drains.
///
/// # Errors
/// When a listener cannot be opened.
pub async fn listen(ctx: Arc<Ctx>) -> anyhow::Result<()> {
    email::listen(ctx).await
}
