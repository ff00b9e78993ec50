//! Schedules: a tick that is due becomes a session.

pub(crate) use api::operations;

use axum::Router;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;

mod api;
pub mod definition;
mod scheduler;
pub mod view;

/// `/v1/schedules`.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    api::routes()
}

/// Fires every due tick, until the process drains. Neither a database outage nor another fault ends it.
///
/// # Errors
/// None yet.
pub async fn run(ctx: Arc<Ctx>) -> anyhow::Result<()> {
    scheduler::run(ctx).await;
    Ok(())
}
