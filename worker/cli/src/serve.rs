//! A running process: its roles, the signals that end it, and the order in which its parts end.

use crate::App;
use anyhow::Context as _;
use futures::TryFutureExt as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use wakeful_config::Config;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::jobs::{memory, notify, pool};
use wakeful_http::{front, monitor};

/// The roles of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Role {
    /// Serves HTTP: accepts triggers and shows sessions.
    Api,
    /// Runs steps and deliveries.
    Worker,
    /// Fires schedules.
    Scheduler,
}

/// The roles as `--roles` takes them.
fn names(roles: &[Role]) -> String {
    let name = |role: &Role| match role {
        Role::Api => "api",
        Role::Worker => "worker",
        Role::Scheduler => "scheduler",
    };
    roles.iter().map(name).collect::<Vec<_>>().join(",")
}

/// The address is in use, or this process may not use it.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {listen} ({remedy})")]
pub struct CannotListen {
    listen: SocketAddr,
    /// How to choose another address.
    remedy: &'static str,
    source: std::io::Error,
}

/// Where a process listens.
#[derive(Debug, Default)]
pub struct Listeners {
    /// For the API.
    pub api: Option<TcpListener>,
    /// For what a monitoring system asks.
    pub monitoring: Option<TcpListener>,
}

/// How long the last answers to a monitoring system may take.
const MONITORING_ENDS: Duration = Duration::from_secs(1);

/// How many connections a monitoring system may hold.
const MONITORING_CONNECTIONS: usize = 32;

/// Binds before anything else starts, so that a port in use is an error and not a half-running process.
///
/// # Errors
/// [`CannotListen`].
pub async fn bind(listen: SocketAddr) -> Result<TcpListener, CannotListen> {
    let remedy = "`--listen ADDRESS` chooses another address";
    TcpListener::bind(listen).await.map_err(|source| CannotListen { listen, remedy, source })
}

/// Binds the address of `[monitoring]`, if there is one.
///
/// # Errors
/// [`CannotListen`].
pub async fn bind_monitoring(config: &Config) -> Result<Option<TcpListener>, CannotListen> {
    let Some(listen) = config.monitoring.listen else { return Ok(None) };
    let remedy = "monitoring.listen, or WAKEFUL_MONITORING__LISTEN";
    let bound = TcpListener::bind(listen).await;
    bound.map(Some).map_err(|source| CannotListen { listen, remedy, source })
}

/// Runs `roles` until a signal (SIGTERM, SIGINT) or `ctx.shutdown.draining`. Then it reports not ready,
/// finishes its running steps or gives them back, and closes connections.
///
/// # Errors
/// When a role fails.
pub async fn run(app: &App, ctx: Arc<Ctx>, roles: &[Role], listeners: Listeners) -> anyhow::Result<()> {
    let over = CancellationToken::new();
    let monitoring = listeners.monitoring.map(|listener| {
        if let Ok(address) = listener.local_addr() {
            info!(%address, "A monitoring system may ask here");
        }
        let (router, over) = (monitor::router(Arc::clone(&ctx), &names(roles)), over.clone());
        let limits = front::Limits {
            connections: MONITORING_CONNECTIONS,
            head: ctx.config.server.head_timeout,
            unread: front::UNREAD,
        };
        tokio::spawn(async move { front::serve(listener, router, limits, over.cancelled()).await })
    });
    let signals = tokio::spawn(drain_on_signal(Arc::clone(&ctx)));
    // The pool of a worker forgets by itself.
    let forgets = (!roles.contains(&Role::Worker)).then(|| tokio::spawn(memory::run(Arc::clone(&ctx))));
    let api = async {
        let Some(listener) = listeners.api else { return anyhow::Ok(()) };
        let (router, ctx) = (app.router(&ctx)?, Arc::clone(&ctx));
        let limits = limits(&ctx.config);
        let works = roles.contains(&Role::Worker);
        info!(listen = %listener.local_addr()?, "Listening");
        let stopped = async move {
            // Close connections after the workers end, so that a client sees its step end before its stream
            // ends.
            if works {
                ctx.shutdown.abort.cancelled().await;
            } else {
                drain_delay(&ctx).await;
                ctx.shutdown.abort.cancel();
            }
        };
        front::serve(listener, router, limits, stopped).await.context("the HTTP server failed")
    };
    let worker = async {
        if roles.contains(&Role::Worker) {
            info!(worker.id = %ctx.identity.worker_id, concurrency = ctx.config.queue.concurrency, "Working");
            // Messages that come in during the delay are announced to other workers, and streams go on.
            let delay = async {
                if roles.contains(&Role::Api) {
                    drain_delay(&ctx).await;
                }
            };
            let pool = pool::run(Arc::clone(&ctx), ctx.bus.news.clone())
                .inspect_err(|_| ctx.shutdown.abort.cancel());
            let (ran, ()) = tokio::join!(pool, delay);
            ctx.shutdown.abort.cancel();
            ran
        } else {
            Ok(())
        }
    };
    let listeners = async {
        if roles.contains(&Role::Api) { wakeful_channels::listen(Arc::clone(&ctx)).await } else { Ok(()) }
    };
    let notifications = async {
        if roles.contains(&Role::Api) || roles.contains(&Role::Worker) {
            notify::run(Arc::clone(&ctx)).await;
        }
        Ok(())
    };
    let scheduler = async {
        if roles.contains(&Role::Scheduler) {
            wakeful_channels::cron::run(Arc::clone(&ctx)).await
        } else {
            Ok(())
        }
    };
    let ended = tokio::try_join!(api, worker, listeners, notifications, scheduler);
    signals.abort();
    // The monitoring listener ends last, so that `/readyz` says "draining" until the work has ended. It does not wait for a request
    // that takes long.
    over.cancel();
    if let Some(monitoring) = monitoring {
        let _ = tokio::time::timeout(MONITORING_ENDS, monitoring).await;
    }
    if let Some(forgets) = forgets {
        forgets.abort();
    }
    ctx.store.close().await;
    ended.map(|_| ())
}

/// Waits until a load balancer can have heard that this process drains, or until it must end.
async fn drain_delay(ctx: &Ctx) {
    let delay = async {
        ctx.shutdown.draining.cancelled().await;
        tokio::time::sleep(ctx.config.server.drain_delay).await;
    };
    tokio::select! {
        () = delay => {}
        () = ctx.shutdown.abort.cancelled() => {}
    }
}

/// What the front line lets through. It leaves descriptors for the pool of the database, for a model call and
/// a tool of each running step, for deliveries, and for files.
fn limits(config: &Config) -> front::Limits {
    let kept =
        2 * config.database.max_connections as usize + 4 * config.queue.concurrency + 64 + front::BEYOND;
    let kept = kept + config.monitoring.listen.map_or(0, |_| MONITORING_CONNECTIONS + front::BEYOND);
    front::Limits::of_this_process(config.server.connections, kept, config.server.head_timeout)
}

/// Drains at the first signal (SIGTERM, SIGINT), and gives running work back at the second.
pub(crate) async fn drain_on_signal(ctx: Arc<Ctx>) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        warn!("No signal handler could be installed: this process ends without draining");
        return;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    info!("Draining: no new work is started");
    ctx.shutdown.signalled.cancel();
    ctx.shutdown.draining.cancel();
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    info!("A second signal: giving running work back");
    ctx.shutdown.abort.cancel();
}
