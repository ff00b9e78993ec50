//! Email.

use crate::Ctx;
use crate::channel::Channel;
use crate::cli::Usage;
use crate::config::Config;
use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use std::sync::Arc;

mod html;
pub mod incoming;
mod lmtp;
mod mailbox;
pub mod maildir;
mod parse;
mod raw;

/// What sends mail, if anything does.
pub(super) fn senders(config: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    for mailbox in &config.email.incoming.mailboxes {
        if let Some(agent) = &mailbox.agent {
            config
                .agent(agent)
                .map_err(|error| Usage(format!("email.mailboxes.{}.agent: {error}", mailbox.name)))?;
        }
    }
    let Some(dir) = &config.email.maildir else { return Ok(Vec::new()) };
    let from = config.email.from.as_deref().unwrap_or("Wakeful <wakeful@localhost>");
    let maildir =
        maildir::Maildir::new(dir.clone(), from).map_err(|error| Usage(format!("email.from: {error}")))?;
    Ok(vec![Arc::new(maildir)])
}

/// `/v1/triggers/email/…`: mail comes in.
pub(super) fn webhooks(ctx: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    Router::new()
        .route("/email/raw", post(raw::post))
        .route_layer(from_fn_with_state(Arc::clone(ctx), raw::door))
}

/// What is to be read of mail.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new().route("/mails", get(raw::list))
}

/// Mail comes in by LMTP, until the process drains.
pub(super) async fn listen(ctx: Arc<Ctx>) -> anyhow::Result<()> {
    match ctx.config.email.incoming.lmtp_listen {
        Some(address) => lmtp::listen(ctx, address).await,
        None => {
            ctx.draining.cancelled().await;
            Ok(())
        }
    }
}
