//! Liveness and readiness of the process.

use crate::openapi::{Operation, Proof, Shape};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tracing::warn;
use wakeful_engine::ctx::Ctx;
use wakeful_store::space::{Scope, within};

/// How old the answer of the database may be.
const SHARED: Duration = Duration::from_millis(500);

/// What the database said.
#[derive(Clone, Debug)]
struct Look {
    database: String,
    /// The steps that it fails again and again. One session's step may be refused for a reason of its own, so the server stays
    /// in service.
    steps: String,
}

/// What the database said last, and when. Strangers may ask `/readyz`. All who ask share one look at the database, so that
/// a flood of them takes no connections from the work.
#[derive(Clone, Debug, Default)]
pub(super) struct Looks(Arc<Mutex<Seen>>);

/// The last look, and since when each look has found the database away.
#[derive(Debug, Default)]
struct Seen {
    last: Option<(Instant, Look)>,
    away_since: Option<Instant>,
}

impl Looks {
    async fn last(&self, ctx: &Ctx) -> Look {
        // Those who come during a look wait for its answer here.
        let mut seen = self.0.lock().await;
        if let Some((at, said)) = &seen.last
            && at.elapsed() < SHARED
        {
            return said.clone();
        }
        // The steps of all spaces count. The answer has their number only.
        let mut said = within(Scope::All, look(ctx)).await;
        if said.database == "ok" {
            seen.away_since = None;
        } else {
            let since = *seen.away_since.get_or_insert_with(Instant::now);
            // The work may have met it before anybody asked here.
            let lost = ctx.store.lost_connections().into_iter().map(|(_, lost_for)| lost_for).max();
            let away = since.elapsed().max(lost.unwrap_or_default());
            said.database = format!("{}; first seen {} s ago", said.database, away.as_secs());
        }
        seen.last = Some((Instant::now(), said.clone()));
        said
    }
}

async fn look(ctx: &Ctx) -> Look {
    let database = match ctx.store.readiness().await {
        Ok(None) => "ok".to_owned(),
        Ok(Some(outage)) => outage.as_str().to_owned(),
        Err(error) => {
            let outage = error.outage().map_or("the database cannot be asked", |outage| outage.as_str());
            // Strangers may ask this, and the error names the database and its role.
            warn!(%error, "Not ready: {outage}");
            format!("{outage}; the server's log says why")
        }
    };
    let steps = match if database == "ok" { ctx.store.count_faulty_steps().await } else { None } {
        None => "unknown".to_owned(),
        Some(0) => "ok".to_owned(),
        Some(steps) => format!("the database fails {steps} again and again; `wakeful doctor` names them"),
    };
    Look { database, steps }
}

/// 200 as long as the process answers. Never asks the database: an outage of the database must not get the
/// process killed.
pub(super) async fn live() -> Json<serde_json::Value> {
    Json(json!({"status": "ok"}))
}

/// 200 when requests can be served. 503 while draining, or with the failed check; a database that answers but
/// refuses writes is a failed check too.
pub(super) async fn ready(State(ctx): State<Arc<Ctx>>, Extension(looks): Extension<Looks>) -> Response {
    let Look { database, steps } = looks.last(&ctx).await;
    let draining = ctx.shutdown.draining.is_cancelled();
    let ready = database == "ok" && !draining;
    let body = json!({
        "status": if ready { "ok" } else { "unavailable" },
        "checks": {
            "database": database,
            // Without some of them the process works on, slowly. So they do not take it out of service.
            "connections": connections(&ctx.store.lost_connections()),
            "steps": steps,
            "draining": if draining { "draining" } else { "ok" },
        },
    });
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

/// Which connections of this process are lost, and since when.
fn connections(lost: &[(&str, Duration)]) -> String {
    if lost.is_empty() {
        return "ok".to_owned();
    }
    let lost: Vec<String> =
        lost.iter().map(|(what, lost_for)| format!("{what} for {} s", lost_for.as_secs())).collect();
    format!("lost: {}", lost.join(", "))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/healthz", "Whether the process is alive").proved_by(Proof::Open).answers(
            StatusCode::OK,
            "it is alive",
            crate::object! {"status": String},
        ),
        Operation::get("/readyz", "Whether the process is ready, with the check that fails and the connections to the database that are lost")
            .proved_by(Proof::Open)
            .answers(StatusCode::OK, "it is ready", readiness())
            .answers(StatusCode::SERVICE_UNAVAILABLE, "it is not ready", readiness()),
    ]
}

fn readiness() -> Shape {
    crate::object! {"status": String, "checks": BTreeMap<String, String>}
}
