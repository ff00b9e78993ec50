//! The worker processes: which there are, and how one is told to end.

use crate::body::{Body, Id, Reason};
use crate::openapi::Operation;
use crate::problem::Problem;
use crate::sessions::Answer;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_store::audit::act::because;
use wakeful_store::queue::WorkerView;

/// The workers of the last day.
pub(super) async fn list(State(ctx): State<Arc<Ctx>>) -> Answer {
    let workers = ctx.store.workers().await?;
    let silent_after_s = ctx.config.queue.silent_after_s();
    let items: Vec<Value> = workers
        .iter()
        .map(|worker| {
            let mut shown = json!(worker);
            shown["alive"] = json!(worker.is_fresh(silent_after_s));
            shown["state"] = json!(worker.state(silent_after_s));
            shown
        })
        .collect();
    Ok(Json(json!({"items": items, "next": null})))
}

/// Asks a worker to take no more jobs, to finish what it holds, and to end: 202. One that sends no heartbeat any more does not hear of
/// it, and the answer says so.
pub(super) async fn drain(
    State(ctx): State<Arc<Ctx>>,
    Id(id): Id,
    body: Body,
) -> Result<(StatusCode, Json<Value>), Problem> {
    because(Reason::of(&body?)?.as_deref());
    ctx.store.drain_workers(Some(&id)).await?;
    let workers = ctx.store.workers().await?;
    let state = workers
        .iter()
        .find(|worker| worker.worker_id == id)
        .map_or("gone", |worker| worker.state(ctx.config.queue.silent_after_s()));
    Ok((StatusCode::ACCEPTED, Json(json!({"worker_id": id, "state": state}))))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/workers", "The workers of the last day").answers(
            StatusCode::OK,
            "a page",
            crate::object! {"items": Vec<WorkerView>, "next": Option<String>},
        ),
        Operation::post("/v1/workers/{id}/drain", "Tells a worker to finish what it holds and to end")
            .body_if_any::<Reason>()
            .answers(StatusCode::ACCEPTED, "accepted", crate::object! {"worker_id": String, "state": String}),
    ]
}
