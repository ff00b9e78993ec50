//! Messengers.

use crate::Ctx;
use crate::channel::Channel;
use crate::config::Config;
use axum::Router;
use std::sync::Arc;

/// What sends to messengers.
pub(super) fn senders(_: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    Ok(Vec::new())
}

/// `/v1/triggers/messenger/…`: messages come in.
pub(super) fn webhooks(_: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    Router::new()
}
