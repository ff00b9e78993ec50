//! Schedules.

use crate::Ctx;
use axum::Router;
use std::sync::Arc;

/// `/v1/schedules`.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new()
}

/// Fires what is due, until the process drains.
pub async fn run(ctx: Arc<Ctx>) -> anyhow::Result<()> {
    ctx.draining.cancelled().await;
    Ok(())
}
