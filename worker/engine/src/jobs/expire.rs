//! Questions that nobody answered in time are closed by whoever works: a worker has to be there for the run to go on.
//!
//! Nothing waits for a question in a process. Its age is in the database, by the database's clock, so it does not matter which
//! worker looks, or whether one that was stopped for days does.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};
use wakeful_store::expire::Patience;
use wakeful_store::queue;
use wakeful_workflow::agent::OnExpired;

/// Questions in one look.
const PAGE: i64 = 200;

/// Looks every `[queue] heal_s`, and more often where an agent has less patience than that, until `ctx.shutdown.draining` fires.
/// Ends at once where no agent's questions expire.
pub(super) async fn run(ctx: Arc<Ctx>) {
    let agents: Vec<(&str, u64, OnExpired)> = ctx
        .config
        .agents
        .iter()
        .filter_map(|(name, agent)| Some((name.as_str(), agent.ask_expires_s?, agent.on_ask_expired)))
        .collect();
    let Some(shortest) = agents.iter().map(|(_, seconds, _)| *seconds).min() else { return };
    let every = Duration::from_secs(ctx.config.queue.heal_s.min(shortest));
    loop {
        for (agent, seconds, then) in &agents {
            let patience = Patience { agent, seconds: *seconds };
            if let Err(error) = look(&ctx, patience, *then).await {
                warn!(%error, "Looking for questions that nobody answered failed; looking again later");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(queue::jittered(every)) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}

async fn look(ctx: &Ctx, patience: Patience<'_>, then: OnExpired) -> wakeful_store::Result<()> {
    let mut after = String::new();
    loop {
        let sessions = ctx.store.unanswered(patience, &after, PAGE).await?;
        for session_id in &sessions {
            match ctx.store.expire_question(session_id, patience, then).await {
                // It was answered in the last moment, or another worker was faster.
                Ok(false) => {}
                Ok(true) => {
                    info!(
                        session.id = session_id,
                        "Closed a question that nobody answered in {} s", patience.seconds
                    );
                    ctx.bus.notifier.job();
                    ctx.bus.notifier.session(session_id);
                }
                // One session that cannot go on keeps no other from it.
                Err(error) => {
                    warn!(session.id = session_id, %error, "A question could not be closed; trying again later");
                }
            }
        }
        match sessions.last() {
            Some(last) if sessions.len() as i64 == PAGE && !ctx.shutdown.draining.is_cancelled() => {
                after.clone_from(last)
            }
            Some(_) | None => return Ok(()),
        }
    }
}
