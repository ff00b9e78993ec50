//! Email.

use crate::Ctx;
use crate::channel::Channel;
use crate::cli::Usage;
use crate::config::Config;
use axum::Router;
use std::sync::Arc;

pub mod incoming;
pub mod maildir;
mod provider;
#[cfg(feature = "ses")]
pub mod ses;

/// The sender of mail that names none, where the configuration names none either.
const NOBODY: &str = "Wakeful <wakeful@localhost>";

/// What sends mail, if anything does: one way, which the configuration names.
pub(super) fn senders(config: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    let mut senders: Vec<Arc<dyn Channel>> = Vec::new();
    let from = config.email.from.as_deref().unwrap_or(NOBODY);
    if let Some(dir) = &config.email.maildir {
        let maildir = maildir::Maildir::new(dir.clone(), from)
            .map_err(|error| Usage(format!("email.from: {error}")))?;
        senders.push(Arc::new(maildir));
    }
    if let Some(config) = config.email.providers.ses.as_ref().filter(|ses| ses.send) {
        senders.push(ses_sender(config, from)?);
    }
    if senders.len() > 1 {
        let text = "[email] names several ways for mail to go out, and it goes one way only: keep email.maildir or \
                    email.ses.send";
        return Err(Usage(text.to_owned()).into());
    }
    Ok(senders)
}

#[cfg(feature = "ses")]
fn ses_sender(config: &crate::config::email_providers::Ses, from: &str) -> Result<Arc<dyn Channel>, Usage> {
    let ses = ses::Ses::new(config, from).map_err(|error| Usage(format!("email.from: {error}")))?;
    Ok(Arc::new(ses))
}

#[cfg(not(feature = "ses"))]
fn ses_sender(_: &crate::config::email_providers::Ses, _: &str) -> Result<Arc<dyn Channel>, Usage> {
    let text = "email.ses.send: this program was built without it: build it with `--features ses`, or send by other means";
    Err(Usage(text.to_owned()))
}

/// `/v1/triggers/email/…`: mail comes in.
pub(super) fn webhooks(ctx: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    Router::new().merge(provider::webhooks(ctx))
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
