//! Email.

use crate::Ctx;
use crate::channel::Channel;
use crate::cli::Usage;
use crate::config::Config;
use axum::Router;
use std::sync::Arc;

pub mod incoming;
pub mod maildir;

/// What sends mail, if anything does.
pub(super) fn senders(config: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    let Some(dir) = &config.email.maildir else { return Ok(Vec::new()) };
    let from = config.email.from.as_deref().unwrap_or("Wakeful <wakeful@localhost>");
    let maildir =
        maildir::Maildir::new(dir.clone(), from).map_err(|error| Usage(format!("email.from: {error}")))?;
    Ok(vec![Arc::new(maildir)])
}

/// `/v1/triggers/email/…`: mail comes in.
pub(super) fn webhooks(_: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    Router::new()
}

/// What is to be read of mail.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new()
}

/// Mail comes in by LMTP, until the process drains.
pub(super) async fn listen(ctx: Arc<Ctx>) -> anyhow::Result<()> {
    ctx.draining.cancelled().await;
    Ok(())
}
