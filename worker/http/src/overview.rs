//! What an operator looks at first: who asks, what is open or in trouble, the queue and the workers.

use crate::access::{Caller, Who};
use crate::openapi::Operation;
use crate::sessions::Answer;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;
use wakeful_engine::ctx::Ctx;
use wakeful_store::gate::ClosedGate;
use wakeful_store::overview::{Day, QueueSample};
use wakeful_store::queue::{Depth, WaitingSpace};
use wakeful_store::space::{Scope as Space, within};
use wakeful_workflow::access::Reach;
use wakeful_workflow::access::Scope;

/// How often the queue's depth is written down.
const SAMPLE_EVERY: Duration = Duration::from_secs(60);

/// What the request's token is.
pub(super) async fn me(caller: Caller) -> Json<Value> {
    let (who, name) = match &caller.who {
        Who::ThisMachine => ("machine", None),
        Who::Configuration => ("configuration", None),
        Who::Token { token_id, name } => ("token", Some(name.as_ref().unwrap_or(token_id).clone())),
        Who::User { user_id, .. } => ("user", Some(user_id.clone())),
    };
    Json(json!({
        "who": who,
        "name": name,
        "scope": caller.scope.as_str(),
        "space_id": caller.space(),
        "everywhere": caller.everywhere,
        "agent": caller.reach.agent,
        "user_id": caller.reach.user_id,
        "expires_at": caller.expires_at,
    }))
}

/// How many sessions are open or in trouble, and what became of the runs of the last day.
pub(super) async fn show(State(ctx): State<Arc<Ctx>>, caller: Caller) -> Answer {
    let reach = Reach { space_id: Some(caller.space().to_owned()), ..caller.reach.clone() };
    let (counted, day) = tokio::try_join!(ctx.store.count_sessions(&reach), ctx.store.recent_runs(&reach))?;
    let of = |status: &str| counted.iter().find(|one| one.status == status).map_or(0, |one| one.count);
    let sessions: Map<String, Value> = ["queued", "running", "waiting_input", "needs_attention", "failed"]
        .into_iter()
        .map(|status| (status.to_owned(), json!(of(status))))
        .collect();
    Ok(Json(json!({"sessions": sessions, "counted_to": wakeful_store::overview::COUNTED, "day": day})))
}

/// The queue, what it was over the last day, and the gates that are not open.
pub(super) async fn queue(State(ctx): State<Arc<Ctx>>) -> Answer {
    let (queues, gates) = (ctx.store.queue_depth().await?, ctx.store.closed_gates().await?);
    let (history, spaces) = (ctx.store.queue_history().await?, ctx.store.waiting_spaces().await?);
    Ok(Json(json!({"queues": queues, "spaces": spaces, "gates": gates, "history": history})))
}

/// Writes the queue's depth down and forgets old idempotency keys, until the process ends.
pub(super) fn sample_queue(ctx: &Arc<Ctx>) {
    let ctx = Arc::clone(ctx);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = ctx.shutdown.draining.cancelled() => return,
                () = tokio::time::sleep(SAMPLE_EVERY) => {}
            }
            if let Err(error) = ctx.store.sample_queue().await {
                debug!(%error, "The queue's depth could not be written down; again in a minute");
            }
            if let Err(error) = within(Space::All, ctx.store.forget_keys()).await {
                debug!(%error, "Old idempotency keys could not be forgotten; again in a minute");
            }
        }
    });
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/me", "What the request's token is").answers(
            StatusCode::OK,
            "the caller",
            crate::object! {
                "who": String, "name": Option<String>, "scope": Scope, "space_id": String, "everywhere": bool,
                "agent": Option<String>, "user_id": Option<String>, "expires_at": Option<DateTime<Utc>>,
            },
        ),
        Operation::get(
            "/v1/overview",
            "How many sessions are open or in trouble, and the runs of the last day",
        )
        .answers(
            StatusCode::OK,
            "the counts",
            crate::object! {"sessions": BTreeMap<String, i64>, "counted_to": i64, "day": Day},
        ),
        Operation::get("/v1/queue", "The queue, its last day, and the gates that are not open").answers(
            StatusCode::OK,
            "the queue",
            crate::object! {
                "queues": Vec<Depth>, "spaces": Vec<WaitingSpace>, "gates": Vec<ClosedGate>, "history": Vec<QueueSample>,
            },
        ),
    ]
}
