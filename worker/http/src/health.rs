//! Liveness and readiness of the process.

use crate::openapi::{Operation, Proof, Shape};
use crate::seldom::Seldom;
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
            let (well, lost) = (ctx.store.last_well(), ctx.store.no_statement_since());
            let since = first_seen(seen.away_since, well, lost, Instant::now());
            seen.away_since = Some(since);
            said.database = format!("{}; first seen {} s ago", said.database, since.elapsed().as_secs());
        }
        seen.last = Some((Instant::now(), said.clone()));
        said
    }
}

/// When the present outage was first seen. `before`: when a look first saw an outage whose end no later look has seen. `well`:
/// when the work last found the database to be well. `lost`: since when no statement has got a connection.
fn first_seen(
    before: Option<Instant>,
    well: Option<Instant>,
    lost: Option<Instant>,
    now: Instant,
) -> Instant {
    // Nobody may have asked here between two outages.
    let looked = before.filter(|before| well.is_none_or(|well| well < *before)).unwrap_or(now);
    // The work may have met it before anybody asked here. Other connections say nothing of it: one of them may have been lost for long,
    // while everything else went on.
    lost.map_or(looked, |lost| lost.min(looked))
}

async fn look(ctx: &Ctx) -> Look {
    let database = match ctx.store.readiness().await {
        Ok(None) => "ok".to_owned(),
        Ok(Some(outage)) => outage.as_str().to_owned(),
        Err(error) => {
            let outage = error.outage().map_or("the database cannot be asked", |outage| outage.as_str());
            // Strangers may ask this, and the error names the database and its role.
            static LINES: Seldom = Seldom::new();
            if let Some(left_out) = LINES.turn(outage) {
                warn!(%error, left_out, "Not ready: {outage}");
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_as_old_as_the_first_that_was_seen_of_it_and_no_older() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let now = at(1000);
        assert_eq!(first_seen(None, None, None, now), now);
        assert_eq!(first_seen(Some(at(900)), None, None, now), at(900), "an earlier look saw it");
        assert_eq!(first_seen(Some(at(900)), Some(at(800)), None, now), at(900));
        assert_eq!(first_seen(None, Some(at(800)), Some(at(850)), now), at(850), "the work saw it first");
        // Nobody looked between two outages.
        assert_eq!(first_seen(Some(at(100)), Some(at(800)), None, now), now);
        assert_eq!(first_seen(Some(at(100)), Some(at(800)), Some(at(990)), now), at(990));
    }
}
