//! The pool: apalis runs the jobs, a heartbeat extends their leases, and a drain ends both in order.

use super::{batches, delayed, deliver::deliver, expire, gates, heal, search, step::step};
use crate::ctx::Ctx;
use apalis::prelude::{Monitor, ParallelizeExt, WorkerBuilder};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use wakeful_store::queue::{Heartbeat, Holdings, Kind, Liveness, News, Queue, Settings};

/// How long running jobs may go on after a drain begins. Then they are dropped and their leases are given
/// back.
const DRAIN: Duration = Duration::from_secs(20);

/// Runs jobs until `ctx.shutdown.draining` fires, then lets the running ones finish for at most `DRAIN`.
///
/// # Errors
/// When apalis' monitor fails (a failing job or database does not cause that), or when the watchdog had
/// decided to end the process.
pub async fn run(ctx: Arc<Ctx>, news: News) -> anyhow::Result<()> {
    let queue = ctx.config.queue;
    let holdings = Arc::new(Holdings::default());
    ctx.store.open_for_commits();
    let heartbeat_stop = CancellationToken::new();
    let heartbeat = tokio::spawn(heartbeat(&ctx, &holdings, true).run(heartbeat_stop.clone()));
    let liveness = tokio::spawn(liveness(&ctx, &holdings).run(heartbeat_stop.clone()));
    let healer = tokio::spawn(heal::run(Arc::clone(&ctx)));
    let expiry = tokio::spawn(expire::run(Arc::clone(&ctx)));
    let delays = tokio::spawn(delayed::run(Arc::clone(&ctx)));
    let search = tokio::spawn(search::run(Arc::clone(&ctx)));
    let batches = tokio::spawn(batches::run(Arc::clone(&ctx)));
    know_the_gates(&ctx).await;
    let gates = tokio::spawn(gates::run(Arc::clone(&ctx), heartbeat_stop.clone()));
    let draining = ctx.shutdown.draining.clone();
    // Slightly longer than the drain: jobs that are dropped at its end still have to give back their leases.
    let last = DRAIN + Duration::from_secs(2);
    ctx.watchdog.start(queue.lease, draining.clone(), last);
    let deadline = tokio::spawn(abort_after_drain(Arc::clone(&ctx)));

    let start = {
        let (ctx, news, holdings) = (Arc::clone(&ctx), news.clone(), Arc::clone(&holdings));
        move |kind: Kind| {
            let settings = settings(&ctx, kind, "", ctx.config.queue.concurrency);
            let (store, worker_id) = (ctx.store.clone(), Arc::clone(&ctx.identity.worker_id));
            Queue::start(
                store,
                settings,
                worker_id,
                Arc::clone(&holdings),
                &news,
                ctx.shutdown.draining.clone(),
            )
        }
    };
    let (start_steps, start_deliveries) = (start.clone(), start);
    let (step_ctx, deliver_ctx) = (Arc::clone(&ctx), Arc::clone(&ctx));
    let ran = Monitor::new()
        .register(move |_| {
            WorkerBuilder::new("step")
                .backend(start_steps(Kind::Step))
                .data(Arc::clone(&step_ctx))
                .parallelize(tokio::spawn)
                .build(step)
        })
        .register(move |_| {
            WorkerBuilder::new("deliver")
                .backend(start_deliveries(Kind::Deliver))
                .data(Arc::clone(&deliver_ctx))
                .parallelize(tokio::spawn)
                .build(deliver)
        })
        .should_restart(|_, error| {
            error!(%error, "A worker ended; starting it again");
            true
        })
        .run_with_signal(async move {
            draining.cancelled().await;
            Ok(())
        })
        .await;
    deadline.abort();
    healer.abort();
    expiry.abort();
    delays.abort();
    search.abort();
    batches.abort();
    heartbeat_stop.cancel();
    let _ = gates.await;
    // Wait for the heartbeat, which continues until the last lease is given back.
    let _ = heartbeat.await;
    let _ = liveness.await;
    info!("No job is running any more");
    if ctx.watchdog.is_ending() {
        // The blocked thread came back before the watchdog ended the process. Fail anyway, for supervisors
        // that restart a process only after a failure.
        anyhow::bail!("something blocked a thread for too long; the log above names it");
    }
    ran.map_err(|error| anyhow::anyhow!("the job runtime failed: {error}"))
}

/// Runs only the step jobs with this `runner`, until `stop` fires and the running ones have finished. A
/// replay uses it to have its own pool next to the deployed workers. This pool does not heal or deliver, and
/// it is not listed among the workers.
///
/// # Errors
/// As [`run`].
pub async fn run_steps(ctx: Arc<Ctx>, runner: Arc<str>, stop: CancellationToken) -> anyhow::Result<()> {
    let holdings = Arc::new(Holdings::default());
    let heartbeat_stop = CancellationToken::new();
    let heartbeat = tokio::spawn(heartbeat(&ctx, &holdings, false).run(heartbeat_stop.clone()));
    let liveness = tokio::spawn(liveness(&ctx, &holdings).run(heartbeat_stop.clone()));
    know_the_gates(&ctx).await;
    let gates = tokio::spawn(gates::run(Arc::clone(&ctx), heartbeat_stop.clone()));
    let settings = settings(&ctx, Kind::Step, &runner, 1);
    let (step_ctx, stopped) = (Arc::clone(&ctx), stop.clone());
    let ran = Monitor::new()
        .register(move |_| {
            let (store, worker_id) = (ctx.store.clone(), Arc::clone(&ctx.identity.worker_id));
            let (settings, holdings) = (settings.clone(), Arc::clone(&holdings));
            let queue = Queue::start(store, settings, worker_id, holdings, &ctx.bus.news, stop.clone());
            WorkerBuilder::new("replay")
                .backend(queue)
                .data(Arc::clone(&step_ctx))
                .parallelize(tokio::spawn)
                .build(step)
        })
        .should_restart(|_, error| {
            error!(%error, "A replay's worker ended; starting it again");
            true
        })
        .run_with_signal(async move {
            stopped.cancelled().await;
            Ok(())
        })
        .await;
    heartbeat_stop.cancel();
    let _ = gates.await;
    let _ = heartbeat.await;
    let _ = liveness.await;
    ran.map_err(|error| anyhow::anyhow!("the job runtime failed: {error}"))
}

/// Reads the gates before the first claim, so that a new process makes no call that a shut gate forbids.
async fn know_the_gates(ctx: &Ctx) {
    if let Err(error) = ctx.gates.look(&ctx.store).await {
        warn!(%error, "The providers' gates could not be read; trying again");
    }
}

fn heartbeat(ctx: &Ctx, holdings: &Arc<Holdings>, listed: bool) -> Heartbeat {
    let queue = ctx.config.queue;
    Heartbeat {
        store: ctx.store.clone(),
        worker_id: Arc::clone(&ctx.identity.worker_id),
        listed,
        host: ctx.identity.host.clone(),
        concurrency: i32::try_from(queue.concurrency).unwrap_or(i32::MAX),
        connections: i32::try_from(ctx.config.database.max_connections).unwrap_or(i32::MAX),
        lease: queue.lease,
        every: queue.heartbeat,
        holdings: Arc::clone(holdings),
    }
}

fn liveness(ctx: &Ctx, holdings: &Arc<Holdings>) -> Liveness {
    Liveness { store: ctx.store.clone(), holdings: Arc::clone(holdings), notifier: ctx.bus.notifier.clone() }
}

fn settings(ctx: &Ctx, kind: Kind, runner: &str, concurrency: usize) -> Settings {
    let queue = ctx.config.queue;
    Settings {
        kind,
        runner: Arc::from(runner),
        concurrency,
        lease: queue.lease,
        poll: Duration::from_millis(queue.poll_ms),
    }
}

/// Waits for a drain to begin and then for `DRAIN`. Then makes every running job stop and give back its
/// lease.
async fn abort_after_drain(ctx: Arc<Ctx>) {
    ctx.shutdown.draining.cancelled().await;
    tokio::time::sleep(DRAIN).await;
    ctx.shutdown.abort.cancel();
}
