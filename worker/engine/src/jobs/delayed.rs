//! The timer that tells people that their run takes long (`[agents.NAME] on_delayed`). It runs in every worker, like that of
//! unanswered questions, and by the database's clock.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};
use wakeful_store::queue::{self, Kind};
use wakeful_store::told::Delay;

/// Sessions per query.
const PAGE: i64 = 200;

/// Searches every `[queue] heal_s` seconds, or every `after_s` of an agent if that is shorter, until
/// `ctx.shutdown.draining` fires. Returns at once if no agent sets `on_delayed`.
pub(super) async fn run(ctx: Arc<Ctx>) {
    let agents: Vec<Delay<'_>> = ctx
        .config
        .agents
        .iter()
        .filter_map(|(agent, settings)| {
            let delayed = settings.on_delayed.as_ref()?;
            Some(Delay { agent, after_s: delayed.after.as_secs_f64(), text: &delayed.text })
        })
        .collect();
    let Some(shortest) = agents.iter().map(|delay| delay.after_s).reduce(f64::min) else { return };
    let every = Duration::from_secs_f64(shortest.min(ctx.config.queue.heal_s as f64));
    loop {
        if let Err(error) = look(&ctx, &agents).await {
            warn!(%error, "The search for runs that take long failed; trying again later");
        }
        tokio::select! {
            () = tokio::time::sleep(queue::jittered(every)) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}

async fn look(ctx: &Ctx, agents: &[Delay<'_>]) -> wakeful_store::Result<()> {
    let mut after = String::new();
    loop {
        let sessions = ctx.store.untold(agents, &after, PAGE).await?;
        for (session_id, place) in &sessions {
            match ctx.store.tell_of_delay(session_id, agents[*place]).await {
                Ok(false) => {}
                Ok(true) => {
                    info!(session.id = session_id, "Told the person that the run takes long");
                    ctx.bus.notifier.job(Kind::Deliver);
                    ctx.bus.notifier.session(session_id);
                }
                // Go on with the other sessions.
                Err(error) => {
                    warn!(session.id = session_id, %error, "A person could not be told; trying again later");
                }
            }
        }
        match sessions.last() {
            Some((last, _)) if sessions.len() as i64 == PAGE && !ctx.shutdown.draining.is_cancelled() => {
                after.clone_from(last);
            }
            Some(_) | None => return Ok(()),
        }
    }
}
