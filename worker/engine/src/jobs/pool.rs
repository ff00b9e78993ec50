//! The pool: apalis runs the jobs, the heart keeps their leases, and a drain ends both in order.

use super::{deliver::deliver, expire, heal, step::step};
use crate::ctx::Ctx;
use apalis::prelude::{Monitor, ParallelizeExt, WorkerBuilder};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};
use wakeful_store::queue::{Heart, Holdings, Kind, News, Queue, Settings};

/// How long running steps may take to end after a drain begins; then their leases are given back as they stand.
pub const DRAIN: Duration = Duration::from_secs(20);

/// Runs jobs until `ctx.shutdown.draining` fires, then until none is in hand.
///
/// # Errors
/// When apalis' monitor fails, which no fault of a job or of the database does.
pub async fn run(ctx: Arc<Ctx>, news: News) -> anyhow::Result<()> {
    let queue = ctx.config.queue;
    let holdings = Arc::new(Holdings::default());
    let heart_stop = CancellationToken::new();
    let heart = tokio::spawn(heart(&ctx, &holdings, true).run(heart_stop.clone()));
    let healer = tokio::spawn(heal::run(Arc::clone(&ctx)));
    let expiry = tokio::spawn(expire::run(Arc::clone(&ctx)));
    let draining = ctx.shutdown.draining.clone();
    // A little more than the drain, so that the leases of what is dropped then are given back.
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
    heart_stop.cancel();
    // The heart beats until the last lease is given back.
    let _ = heart.await;
    info!("No job is in hand");
    if ctx.watchdog.is_ending() {
        // It came back after all. A supervisor that restarts failures only must see one.
        anyhow::bail!("something kept a thread for longer than it may; the log above names it");
    }
    ran.map_err(|error| anyhow::anyhow!("the job runtime failed: {error}"))
}

/// Runs the step jobs that `runner` names, and no others, until `stop` fires and none is in hand: a pool of a replay's own,
/// beside those of the deployed workers. It heals nothing, delivers nothing, and is not listed among the workers.
///
/// # Errors
/// As [`run`].
pub async fn run_steps(ctx: Arc<Ctx>, runner: Arc<str>, stop: CancellationToken) -> anyhow::Result<()> {
    let holdings = Arc::new(Holdings::default());
    let heart_stop = CancellationToken::new();
    let heart = tokio::spawn(heart(&ctx, &holdings, false).run(heart_stop.clone()));
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
    heart_stop.cancel();
    let _ = heart.await;
    ran.map_err(|error| anyhow::anyhow!("the job runtime failed: {error}"))
}

fn heart(ctx: &Ctx, holdings: &Arc<Holdings>, listed: bool) -> Heart {
    let queue = ctx.config.queue;
    Heart {
        store: ctx.store.clone(),
        worker_id: Arc::clone(&ctx.identity.worker_id),
        listed,
        host: ctx.identity.host.clone(),
        concurrency: i32::try_from(queue.concurrency).unwrap_or(i32::MAX),
        lease: queue.lease,
        every: queue.heartbeat,
        holdings: Arc::clone(holdings),
    }
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

/// After the drain's time is up, every step that still runs is dropped and its lease given back.
async fn abort_after_drain(ctx: Arc<Ctx>) {
    ctx.shutdown.draining.cancelled().await;
    tokio::time::sleep(DRAIN).await;
    ctx.shutdown.abort.cancel();
}
