//! Email: mails come in by LMTP, as a request's body or from a provider, and replies go out by SMTP, SES or into a Maildir.
#![doc = include_str!("README.md")]

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use std::sync::Arc;
use wakeful_config::Config;
use wakeful_config::Invalid;
use wakeful_config::mail_out::Dkim;
use wakeful_engine::channel::Channel;
use wakeful_engine::ctx::Ctx;
use wakeful_http::openapi::Operation;

mod body;
pub mod bounce;
pub mod compose;
pub mod dkim;
mod html;
pub mod incoming;
mod lmtp;
mod mailbox;
pub mod maildir;
mod not_accepted;
mod parse;
mod provider;
mod raw;
#[cfg(feature = "ses")]
pub mod ses;
pub mod smtp;
mod unlabelled;

/// The sender if neither the mail nor the configuration names one.
const NOBODY: &str = "Wakeful <wakeful@localhost>";

/// Builds the channel that sends mail, if one is configured. There can be only one.
pub(super) fn senders(config: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    let from = config.email.from.as_deref().unwrap_or(NOBODY);
    let mut senders: Vec<Arc<dyn Channel>> = Vec::new();
    if let Some(dir) = &config.email.maildir {
        let maildir = maildir::Maildir::new(dir.clone(), from)
            .map_err(|error| Invalid(format!("email.from: {error}")))?;
        senders.push(Arc::new(maildir));
    }
    if let Some(smtp) = smtp_sender(config)? {
        senders.push(Arc::new(smtp));
    }
    if let Some(config) = config.email.providers.ses.as_ref().filter(|ses| ses.send) {
        senders.push(ses_sender(config, from)?);
    }
    if senders.len() > 1 {
        let text = "[email] sets several ways to send mail, but only one can be used: keep one of email.maildir, \
                    email.smtp and email.ses.send";
        return Err(Invalid(text.to_owned()).into());
    }
    Ok(senders)
}

/// The SMTP channel of the configuration, if there is one.
///
/// # Errors
/// A certificate or a key that cannot be used.
pub fn smtp_sender(config: &Config) -> anyhow::Result<Option<smtp::Smtp>> {
    let Some(server) = &config.email.smtp else { return Ok(None) };
    let from = config.email.from.as_deref().unwrap_or(NOBODY);
    let from = from.parse().map_err(|error| Invalid(format!("email.from: {error}")))?;
    let signer = config.email.dkim.as_ref().map(signer).transpose()?;
    let hello = wakeful_engine::identity::host_name();
    Ok(Some(smtp::Smtp::new(server, from, &hello, signer).map_err(Invalid)?))
}

fn signer(config: &Dkim) -> Result<dkim::Signer, Invalid> {
    let shown = config.key_file.display();
    let pem = std::fs::read(&config.key_file)
        .map_err(|error| Invalid(format!("email.dkim.key_file: cannot read {shown}: {error}")))?;
    dkim::Signer::new(&config.domain, &config.selector, &pem)
        .map_err(|error| Invalid(format!("email.dkim.key_file: {shown}: {error}")))
}

#[cfg(feature = "ses")]
fn ses_sender(
    config: &wakeful_config::email_providers::Ses,
    from: &str,
) -> Result<Arc<dyn Channel>, Invalid> {
    let ses = ses::Ses::new(config, from).map_err(|error| Invalid(format!("email.from: {error}")))?;
    Ok(Arc::new(ses))
}

#[cfg(not(feature = "ses"))]
fn ses_sender(_: &wakeful_config::email_providers::Ses, _: &str) -> Result<Arc<dyn Channel>, Invalid> {
    let text = "email.ses.send: this program was built without it: build it with `--features ses`, or send by other means";
    Err(Invalid(text.to_owned()))
}

/// `/v1/triggers/email/…`: incoming mail.
pub(super) fn webhooks(ctx: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    Router::new()
        .route("/email/raw", post(raw::post))
        .route_layer(from_fn_with_state(Arc::clone(ctx), raw::door))
        .merge(provider::webhooks(ctx))
}

/// The list of incoming mails, `/v1/mails`.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new().route("/mails", get(raw::list))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    raw::operations().into_iter().chain(provider::operations()).collect()
}

/// Accepts mail by LMTP until the process drains.
pub(super) async fn listen(ctx: Arc<Ctx>) -> anyhow::Result<()> {
    match ctx.config.email.incoming.lmtp_listen {
        Some(address) => lmtp::listen(ctx, address).await,
        None => {
            ctx.shutdown.draining.cancelled().await;
            Ok(())
        }
    }
}
