//! What a monitoring system asks of any process, also of one without the API: liveness, readiness and metrics. It has a listener of
//! its own (`[monitoring] listen`) and asks for no token.

use crate::health;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use prometheus_client::encoding::prometheus_text::{self, CONTENT_TYPE as TEXT};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tracing::warn;
use wakeful_engine::ctx::Ctx;
use wakeful_store::Result;
use wakeful_store::gate::ClosedGate;
use wakeful_store::overview::Counted;
use wakeful_store::queue::{Connections, Depth, WorkerCounts};
use wakeful_store::space::{Scope, within};
use wakeful_workflow::access::Reach;

/// All names begin so.
const PREFIX: &str = "wakeful";

/// How old the database's answer may be. Scrapers usually ask every 15 seconds.
const SHARED: Duration = Duration::from_secs(5);

/// The longest wait for the database. Scrapers give up after ten seconds by default.
const ANSWER: Duration = Duration::from_secs(3);

/// The routes `/healthz`, `/readyz` and `/metrics`. `roles` are those of the process, for people.
pub fn router(ctx: Arc<Ctx>, roles: &str) -> Router {
    let measured = Arc::new(Measured::of(&ctx, roles));
    Router::new()
        .route("/healthz", get(health::live))
        .route("/readyz", get(health::ready).layer(Extension(health::Looks::default())))
        .route("/metrics", get(metrics).layer(Extension(measured)))
        .with_state(ctx)
}

/// What `/metrics` shows.
struct Measured {
    /// What this process counts as it works.
    own: Registry,
    /// Its version and its roles.
    build: Labels,
    /// What the database said last, as text.
    fleet: Mutex<Option<(Instant, String)>>,
}

impl Measured {
    fn of(ctx: &Ctx, roles: &str) -> Measured {
        let mut own = Registry::with_prefix(PREFIX);
        ctx.metrics.register(&mut own);
        ctx.store.register_metrics(&mut own);
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let build = [("version", version), ("roles", roles.to_owned())];
        Measured { own, build, fleet: Mutex::default() }
    }

    /// What the database says of the whole fleet. All who ask within [`SHARED`] get the same answer.
    async fn fleet(&self, ctx: &Ctx) -> String {
        let mut seen = self.fleet.lock().await;
        if let Some((at, said)) = &*seen
            && at.elapsed() < SHARED
        {
            return said.clone();
        }
        let is_up = matches!(ctx.store.readiness().await, Ok(None));
        let fleet = if is_up { Measured::look(ctx).await } else { None };
        let said = text(&self.gauges(ctx, is_up, fleet.as_ref()));
        *seen = Some((Instant::now(), said.clone()));
        said
    }

    /// `fleet`: `None` when the database does not say. Then old numbers would mislead, so there are none.
    fn gauges(&self, ctx: &Ctx, is_up: bool, fleet: Option<&Fleet>) -> Registry {
        let mut registry = Registry::with_prefix(PREFIX);
        let build = Family::<Labels, Gauge>::default();
        build.get_or_create(&self.build).set(1);
        registry.register("build_info", "The version and the roles of this process, as labels", build);
        let up = Gauge::<i64>::default();
        up.set(i64::from(is_up));
        registry.register("database_up", "Whether the database serves this process, as /readyz says it", up);
        let lost = Family::<Label, Gauge<f64, AtomicU64>>::default();
        for (what, lost_for) in ctx.store.lost_connections() {
            lost.get_or_create(&[("use", what.to_owned())]).set(lost_for.as_secs_f64());
        }
        registry.register(
            "lost_connection_seconds",
            "For how long this process has had no connection for this use; nothing when it has them all",
            lost,
        );
        let open = Gauge::<i64>::default();
        open.set(i64::try_from(ctx.store.open_connections()).unwrap_or(i64::MAX));
        registry.register("pool_connections", "Open connections of this process for statements", open);
        if let Some(fleet) = fleet {
            fleet.register(&mut registry);
        }
        registry
    }

    async fn look(ctx: &Ctx) -> Option<Fleet> {
        match tokio::time::timeout(ANSWER, within(Scope::All, Fleet::look(ctx))).await {
            Ok(Ok(fleet)) => Some(fleet),
            Ok(Err(error)) => {
                warn!(%error, "The fleet could not be measured for /metrics");
                None
            }
            Err(_) => {
                warn!("The database answered too slowly: /metrics lacks what it says of the fleet");
                None
            }
        }
    }
}

async fn metrics(State(ctx): State<Arc<Ctx>>, Extension(measured): Extension<Arc<Measured>>) -> Response {
    let said = format!("{}{}", text(&measured.own), measured.fleet(&ctx).await);
    ([(CONTENT_TYPE, TEXT)], said).into_response()
}

fn text(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = prometheus_text::encode(&mut text, registry);
    text
}

/// The fleet as the database knows it. Each process that is asked says the same.
struct Fleet {
    queues: Vec<Depth>,
    sessions: Vec<Counted>,
    workers: WorkerCounts,
    gates: Vec<ClosedGate>,
    faulty_steps: Option<i64>,
    connections: Connections,
}

impl Fleet {
    async fn look(ctx: &Ctx) -> Result<Fleet> {
        let store = &ctx.store;
        // One after the other: together they would take several connections from the work.
        Ok(Fleet {
            queues: store.queue_depth().await?,
            sessions: store.count_sessions(&Reach::default()).await?,
            workers: store.count_workers(3.0 * ctx.config.queue.heartbeat.as_secs_f64()).await?,
            gates: store.closed_gates().await?,
            faulty_steps: store.count_faulty_steps().await,
            connections: store.fleet_connections(None).await?,
        })
    }
}

type Label = [(&'static str, String); 1];
type Labels = [(&'static str, String); 2];

impl Fleet {
    fn register(&self, registry: &mut Registry) {
        let jobs = Family::<Labels, Gauge>::default();
        let oldest = Family::<Label, Gauge<f64, AtomicU64>>::default();
        let absent = |kind: &str| Depth {
            kind: kind.to_owned(),
            ready: 0,
            leased: 0,
            delayed: 0,
            oldest_ready_s: 0.0,
        };
        for kind in ["step", "deliver"] {
            let depth = self.queues.iter().find(|depth| depth.kind == kind).cloned();
            let Depth { kind, ready, leased, delayed, oldest_ready_s } =
                depth.unwrap_or_else(|| absent(kind));
            for (state, count) in [("ready", ready), ("leased", leased), ("delayed", delayed)] {
                jobs.get_or_create(&[("kind", kind.clone()), ("state", state.to_owned())]).set(count);
            }
            oldest.get_or_create(&[("kind", kind)]).set(oldest_ready_s);
        }
        registry.register("jobs", "Jobs in the queue of the whole fleet", jobs);
        registry.register(
            "oldest_ready_job_seconds",
            "For how long the oldest ready job of the whole fleet has been ready",
            oldest,
        );
        let sessions = Family::<Label, Gauge>::default();
        for status in ["queued", "running", "waiting_input", "needs_attention", "failed"] {
            let count = self.sessions.iter().find(|one| one.status == status).map_or(0, |one| one.count);
            sessions.get_or_create(&[("status", status.to_owned())]).set(count);
        }
        registry.register(
            "sessions",
            "Sessions that are open or in trouble, without replays and imports; each count ends at 1000",
            sessions,
        );
        let workers = Family::<Label, Gauge>::default();
        let WorkerCounts { alive, draining, silent } = self.workers;
        for (state, count) in [("alive", alive), ("draining", draining), ("silent", silent)] {
            workers.get_or_create(&[("state", state.to_owned())]).set(count);
        }
        registry.register("workers", "Worker processes of the whole fleet, by their heartbeats", workers);
        let gates = Family::<Label, Gauge>::default();
        for gate in &self.gates {
            // A provider has a gate for each of its keys.
            gates.get_or_create(&[("provider", gate.provider.clone())]).inc_by(gate.waiting);
        }
        registry.register(
            "provider_gate_waiting_jobs",
            "Jobs that wait at the closed gate of a provider; nothing while all gates are open",
            gates,
        );
        if let Some(steps) = self.faulty_steps {
            let faulty = Gauge::<i64>::default();
            faulty.set(steps);
            registry.register("faulty_steps", "Steps that the database has failed again and again", faulty);
        }
        let Connections { wanted, limit, others, .. } = self.connections;
        for (name, help, value) in [
            (
                "connections_wanted",
                "The most connections that the workers of the fleet open together",
                wanted,
            ),
            (
                "connections_left",
                "The server's connections that other programs leave",
                (limit - others).max(0),
            ),
        ] {
            let gauge = Gauge::<i64>::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        }
    }
}
