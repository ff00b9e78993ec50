//! The pool: apalis runs the jobs, a heartbeat extends their leases, and a drain ends both in order.

use super::{batches, delayed, deliver::deliver, expire, gates, heal, memory, search, step::step, timer};
use crate::ctx::{Ctx, Shutdown};
use apalis::prelude::{Monitor, ParallelizeExt, WorkerBuilder};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use wakeful_store::queue::{Heartbeat, Holdings, Kind, Liveness, News, Queue, Served, Settings};

/// How often at most a notification makes the heartbeat ask whether the worker is to drain.
const ASKED_EVERY: Duration = Duration::from_secs(1);

/// Runs jobs until `ctx.shutdown.draining` fires, then lets the running ones finish for at most `[queue] drain_s`. What still runs
/// then is dropped, and its lease is given back.
///
/// # Errors
/// When apalis' monitor fails (a failing job or database does not cause that), or when the watchdog had
/// decided to end the process.
pub async fn run(ctx: Arc<Ctx>, news: News) -> anyhow::Result<()> {
    let queue = ctx.config.queue;
    let holdings = Arc::new(Holdings::default());
    ctx.store.open_for_commits();
    let heartbeat_stop = CancellationToken::new();
    let (heartbeat, liveness) = keep_alive(&ctx, &holdings, true, &heartbeat_stop);
    let healer = timer("healer", &ctx, heal::run);
    let expiry = timer("expiry", &ctx, expire::run);
    let delays = timer("delays", &ctx, delayed::run);
    let search = {
        let (ctx, holdings) = (Arc::clone(&ctx), Arc::clone(&holdings));
        timer::start("search", move || search::run(Arc::clone(&ctx), Arc::clone(&holdings)))
    };
    let batches = timer("batches", &ctx, batches::run);
    let memory = timer("memory", &ctx, memory::run);
    know_gates_and_pauses(&ctx).await;
    let gates = gates_and_pauses(&ctx, &heartbeat_stop);
    let draining = ctx.shutdown.draining.clone();
    // Slightly longer than the drain: jobs that are dropped at its end still have to give back their leases.
    let last = queue.drain + Duration::from_secs(2);
    ctx.watchdog.start(queue.lease, draining.clone(), last);
    let deadline = tokio::spawn(abort_after_drain(ctx.shutdown.clone(), queue.drain));
    let asked = tokio::spawn(drain_when_asked(Arc::clone(&ctx), Arc::clone(&holdings)));

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
    // No job calls a tool any more.
    tokio::select! {
        () = ctx.plugins.tools.close() => {}
        () = ctx.shutdown.abort.cancelled() => {}
    }
    deadline.abort();
    asked.abort();
    healer.abort();
    expiry.abort();
    delays.abort();
    search.abort();
    batches.abort();
    memory.abort();
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
    let (heartbeat, liveness) = keep_alive(&ctx, &holdings, false, &heartbeat_stop);
    know_gates_and_pauses(&ctx).await;
    let gates = gates_and_pauses(&ctx, &heartbeat_stop);
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

fn timer<T>(name: &'static str, ctx: &Arc<Ctx>, run: fn(Arc<Ctx>) -> T) -> JoinHandle<()>
where
    T: Future<Output = ()> + Send + 'static,
{
    let ctx = Arc::clone(ctx);
    timer::start(name, move || run(Arc::clone(&ctx)))
}

fn gates_and_pauses(ctx: &Arc<Ctx>, stop: &CancellationToken) -> JoinHandle<()> {
    let (ctx, stop) = (Arc::clone(ctx), stop.clone());
    timer::start("gates and pauses", move || gates::run(Arc::clone(&ctx), stop.clone()))
}

/// Reads the gates and the pauses before the first claim, so that a new process makes no call that they forbid.
async fn know_gates_and_pauses(ctx: &Ctx) {
    if let Err(error) = ctx.gates.look(&ctx.store).await {
        warn!(%error, "The providers' gates could not be read; trying again");
    }
    if let Err(error) = ctx.pauses.look(&ctx.store).await {
        warn!(%error, "The pauses could not be read; trying again");
    }
}

/// Starts the heartbeat and the liveness lock, and starts them again should one panic: without them the process's leases end, and
/// its steps are taken from it.
fn keep_alive(
    ctx: &Arc<Ctx>,
    holdings: &Arc<Holdings>,
    listed: bool,
    stop: &CancellationToken,
) -> (JoinHandle<()>, JoinHandle<()>) {
    let (heartbeat, stop_it) = (heartbeat(ctx, holdings, listed), stop.clone());
    let (liveness, stop_too) = (liveness(ctx, holdings), stop.clone());
    (
        timer::start("heartbeat", move || heartbeat.clone().run(stop_it.clone())),
        timer::start("liveness lock", move || liveness.clone().run(stop_too.clone())),
    )
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
        agents: served(ctx).iter().map(Served::shown).collect(),
        every: queue.heartbeat,
        holdings: Arc::clone(holdings),
        drain_asked: ctx.shutdown.asked.clone(),
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
        // A replay's process takes its own jobs only.
        agents: if runner.is_empty() { served(ctx).into() } else { Arc::default() },
    }
}

/// The agents that this process has.
fn served(ctx: &Ctx) -> Vec<Served> {
    let mut served = Vec::new();
    for (agent, spaces) in
        ctx.config.served_agents().into_iter().filter(|(agent, _)| !ctx.lacks_git_for(agent))
    {
        match spaces {
            None => served.push(Served { agent, space_id: None }),
            Some(spaces) => served.extend(
                spaces.into_iter().map(|space| Served { agent: agent.clone(), space_id: Some(space) }),
            ),
        }
    }
    served
}

/// Waits for a drain to begin, and then as long as a drain may take. Then makes every running job stop and give back its
/// lease. An operator who asked for the drain waits; a supervisor that sent a signal does not.
async fn abort_after_drain(shutdown: Shutdown, drain: Duration) {
    shutdown.draining.cancelled().await;
    if shutdown.asked.is_cancelled() {
        shutdown.signalled.cancelled().await;
    }
    tokio::time::sleep(drain).await;
    shutdown.abort.cancel();
}

/// Drains when an operator asks for it. The heartbeat's answer tells; a notification makes it beat at once.
async fn drain_when_asked(ctx: Arc<Ctx>, holdings: Arc<Holdings>) {
    let mut news = ctx.bus.news.gates();
    loop {
        tokio::select! {
            () = ctx.shutdown.asked.cancelled() => break,
            heard = news.recv() => match heard {
                Ok(()) | Err(RecvError::Lagged(_)) => {
                    holdings.beat();
                    // A pause that ends at a rate notifies many times a second, and each beat writes every lease.
                    tokio::time::sleep(ASKED_EVERY).await;
                }
                Err(RecvError::Closed) => ctx.shutdown.asked.cancelled().await,
            },
        }
    }
    info!(
        "An operator asked for it. Draining: no new work is started, and the process ends when what runs has ended"
    );
    ctx.shutdown.draining.cancel();
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::{advance, timeout};

    #[tokio::test(start_paused = true)]
    async fn what_runs_is_dropped_when_the_time_of_a_signals_drain_is_over_and_never_for_an_operator_who_asked()
     {
        let drain = Duration::from_secs(300);
        let shutdown = Shutdown::default();
        let ends = tokio::spawn(abort_after_drain(shutdown.clone(), drain));
        shutdown.asked.cancel();
        shutdown.draining.cancel();
        assert!(timeout(10 * drain, shutdown.abort.cancelled()).await.is_err(), "an operator asked for it");
        shutdown.signalled.cancel();
        assert!(timeout(drain - Duration::from_secs(1), shutdown.abort.cancelled()).await.is_err());
        advance(Duration::from_secs(2)).await;
        ends.await.unwrap();
        assert!(shutdown.abort.is_cancelled());
    }
}
