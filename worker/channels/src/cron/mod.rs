//! Schedules: a tick that is due becomes a session.

use crate::Ctx;
use axum::Router;
use std::sync::Arc;

mod api;
pub(crate) mod definition;
mod scheduler;
pub(crate) mod view;

/// `/v1/schedules`.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    api::routes()
}

/// Fires what is due, until the process drains. Neither a database outage nor another fault ends it.
///
/// # Errors
/// None yet.
pub async fn run(ctx: Arc<Ctx>) -> anyhow::Result<()> {
    scheduler::run(ctx).await;
    Ok(())
}
