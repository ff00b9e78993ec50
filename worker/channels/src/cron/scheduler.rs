//! The scheduler sleeps until a tick is due, fires it, and sleeps again. Several schedulers may run at once.

use super::definition::{of_config, session_of};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tracing::{info, warn};
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::announce;
use wakeful_engine::new_session;
use wakeful_store::queue;
use wakeful_store::schedule::{Fired, Schedule};
use wakeful_workflow::schedule::written;

/// The longest sleep. A notification may get lost, and somebody may set the database's clock.
const LONGEST: Duration = Duration::from_secs(30);
/// The shortest sleep. Keeps this scheduler from spinning while another one fires a due tick.
const SHORTEST: Duration = Duration::from_millis(100);
/// How long to wait between attempts while the database is down: starts with the first value and doubles up
/// to the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// Fires every due tick, until `ctx.shutdown.draining` is cancelled. A tick in progress then either is
/// committed or has no effect.
pub(super) async fn run(ctx: Arc<Ctx>) {
    let mut news = ctx.bus.news.schedules();
    let agents = agents(&ctx);
    let (mut synced, mut again) = (false, AGAIN.0);
    while !ctx.shutdown.draining.is_cancelled() {
        let wait = match look(&ctx, &agents, &mut synced).await {
            Ok(wait) => {
                again = AGAIN.0;
                wait
            }
            Err(error) => {
                warn!(%error, "The schedules cannot be looked at; looking again");
                let wait = queue::jittered(again);
                again = (again * 2).min(AGAIN.1);
                wait
            }
        };
        tokio::select! {
            () = ctx.shutdown.draining.cancelled() => {}
            () = tokio::time::sleep(wait) => {}
            heard = news.recv() => if let Err(RecvError::Closed) = heard {
                // The listener is gone, so only the timer is left.
                tokio::time::sleep(wait).await;
            }
        }
    }
}

/// Fires everything that is due, and returns how long to sleep.
async fn look(ctx: &Ctx, agents: &[String], synced: &mut bool) -> wakeful_store::Result<Duration> {
    if !*synced {
        sync(ctx).await?;
        *synced = true;
    }
    let compose = |schedule: &Schedule| {
        session_of(&ctx.config, &ctx.plugins.tools, schedule).map_err(|cannot| cannot.to_string())
    };
    let mut put_off = Vec::new();
    while !ctx.shutdown.draining.is_cancelled() {
        let before = put_off.len();
        match ctx.store.fire_due(None, agents, &mut put_off, &compose).await {
            Ok(Some(fired)) => {
                wakeful_store::failpoint!("K62");
                tell(ctx, &fired);
            }
            Ok(None) => break,
            // Only this one cannot be fired now: its conversation's key cannot be had, or its row is locked.
            Err(error) if put_off.len() > before => {
                warn!(%error, schedule = put_off.last(), "A schedule cannot be fired now; trying again");
            }
            Err(error) => return Err(error),
        }
    }
    let next = ctx.store.next_firing(agents).await?;
    let shortest = if put_off.is_empty() { SHORTEST } else { AGAIN.1 };
    Ok(next.map_or(LONGEST, |next| next.clamp(shortest, LONGEST)))
}

/// Updates the database's schedules from this process's configuration.
async fn sync(ctx: &Ctx) -> wakeful_store::Result<()> {
    let (deployment, definitions) = (&ctx.config.server.deployment, of_config(&ctx.config));
    let synced = ctx.store.sync_schedules(deployment, &definitions, None).await?;
    for name in &synced.written {
        info!(schedule = name, "Took up schedule {name} of the configuration");
    }
    for name in &synced.withdrawn {
        warn!(
            schedule = name,
            deployment, "Paused schedule {name}: deployment {deployment} no longer configures it"
        );
    }
    for name in &synced.name_conflicts {
        warn!(
            schedule = name,
            "schedules.{name} of the configuration is not used: a schedule of that name was made through the API (delete it, or rename \
             yours)"
        );
    }
    info!(schedules = ctx.config.schedules.len(), "Scheduling");
    Ok(())
}

fn tell(ctx: &Ctx, fired: &Fired) {
    for (tick, woken) in &fired.woken {
        announce(ctx, woken);
        info!(
            schedule = fired.name,
            session.id = woken.session_id,
            tick = written(*tick),
            "Fired schedule {} for {}",
            fired.name,
            written(*tick)
        );
    }
    for (tick, reason) in &fired.skipped {
        warn!(schedule = fired.name, tick = written(*tick), "Skipped a tick of {}: {reason}", fired.name);
    }
}

/// The agents for which this process can start a session. Ticks of other agents are left to processes that
/// have them.
fn agents(ctx: &Ctx) -> Vec<String> {
    let known = |name: &String| {
        new_session::of_chat(
            &ctx.config,
            &ctx.plugins.tools,
            format!("{}/any", ctx.config.space_of_agent(name)),
            Some(name),
        )
        .is_ok()
    };
    ctx.config.agent_names().into_iter().filter(known).collect()
}
