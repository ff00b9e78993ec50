//! What this server can do, for `wakeful preflight --against URL`.

use axum::Json;
use axum::extract::State;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::offer::offer;
use wakeful_workflow::preflight::Offer;

/// The agents, tools, models and channels of this process. No secret and no prompt.
pub(super) async fn show(State(ctx): State<Arc<Ctx>>) -> Json<Offer> {
    let plugins = &ctx.plugins;
    Json(offer(
        &ctx.config,
        &plugins.tools,
        plugins.models.providers(),
        plugins.channels.keys().map(String::as_str),
    ))
}
