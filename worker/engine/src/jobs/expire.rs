//! The timer that closes questions that were not answered in time. It runs in every worker, because the run
//! needs a worker to go on.
//!
//! No process waits for an answer. The database knows the age of each question by its own clock, so any
//! worker can close it, even after all workers were stopped for days.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};
use wakeful_store::question::Patience;
use wakeful_store::queue;
use wakeful_workflow::agent::OnExpired;

/// Questions per query.
const PAGE: i64 = 200;

/// Searches every `[queue] heal_s` seconds, or every `ask_expires_s` of an agent if that is shorter, until
/// `ctx.shutdown.draining` fires. Returns at once if no agent sets `ask_expires_s`.
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
                warn!(%error, "The search for unanswered questions failed; trying again later");
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
                // The answer came first, or another worker closed the question.
                Ok(false) => {}
                Ok(true) => {
                    info!(
                        session.id = session_id,
                        "Closed a question that was not answered within {} s", patience.seconds
                    );
                    ctx.bus.notifier.any_job();
                    ctx.bus.notifier.session(session_id);
                }
                // Go on with the other sessions.
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
