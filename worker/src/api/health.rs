//! Whether the process lives, and whether it should be sent requests.

use crate::Ctx;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// 200 as long as the process answers. Never asks the database: a process is not killed for its database's sake.
pub(super) async fn live() -> Json<serde_json::Value> {
    Json(json!({"status": "ok"}))
}

/// 200 when requests can be served; 503 with the check that fails, and while draining.
pub(super) async fn ready(State(ctx): State<Arc<Ctx>>) -> Response {
    let database = match tokio::time::timeout(Duration::from_secs(2), ctx.store.ping()).await {
        Ok(Ok(())) => "ok".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer within 2 s".to_owned(),
    };
    let draining = ctx.draining.is_cancelled();
    let ready = database == "ok" && !draining;
    let body = json!({
        "status": if ready { "ok" } else { "unavailable" },
        "checks": {"database": database, "draining": if draining { "draining" } else { "ok" }},
    });
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}
