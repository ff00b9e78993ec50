//! What this server can do, for `wakeful preflight --against URL`.

use crate::openapi::{Operation, of};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::Value;
use std::sync::Arc;
use wakeful_engine::capabilities::capabilities;
use wakeful_engine::ctx::Ctx;
use wakeful_workflow::preflight::Capabilities;

/// The agents, tools, models and channels of this process. No secret and no prompt.
pub(super) async fn show(State(ctx): State<Arc<Ctx>>) -> Json<Capabilities> {
    let plugins = &ctx.plugins;
    Json(capabilities(
        &ctx.config,
        &plugins.tools,
        plugins.models.providers(),
        plugins.channels.keys().map(String::as_str),
    ))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/capabilities", "The agents, tools, models and channels of this process").answers(
            StatusCode::OK,
            "for `wakeful preflight`",
            of::<Value>(),
        ),
    ]
}
