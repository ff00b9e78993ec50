//! The healer's timer: every worker regularly searches for sessions that are stuck because their rows do not
//! fit one another, and wakes them.
//!
//! Nothing else relies on the healer, because Wakeful itself leaves no such rows. They come from edits by
//! hand and from restored backups.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};
use wakeful_store::heal::Cursor;
use wakeful_store::queue;

/// Rows of each kind per search.
const PAGE: i64 = 500;
/// Searches per sweep. The next sweep goes on where this one stopped.
const PAGES: usize = 20;

/// Sweeps at once and then every `[queue] heal_s`, until `ctx.shutdown.draining` fires.
pub(super) async fn run(ctx: Arc<Ctx>) {
    let every = Duration::from_secs(ctx.config.queue.heal_s);
    let mut cursor = Cursor::default();
    let mut sessions_healed = 0;
    loop {
        if let Err(error) = sweep(&ctx, &mut cursor, &mut sessions_healed).await {
            warn!(%error, "The search for sessions to heal failed; trying again later");
        }
        tokio::select! {
            () = tokio::time::sleep(queue::jittered(every)) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}

async fn sweep(ctx: &Ctx, cursor: &mut Cursor, sessions_healed: &mut u64) -> wakeful_store::Result<()> {
    let before = *sessions_healed;
    for _ in 0..PAGES {
        let page = ctx.store.look_for_unattended(cursor, PAGE).await?;
        for session_id in &page.sessions {
            heal(ctx, session_id, sessions_healed).await;
        }
        if page.last || ctx.shutdown.draining.is_cancelled() {
            break;
        }
    }
    if *sessions_healed > before {
        info!(
            healed = *sessions_healed - before,
            healed_since_start = *sessions_healed,
            "Healed sessions that were stuck"
        );
    }
    Ok(())
}

async fn heal(ctx: &Ctx, session_id: &str, sessions_healed: &mut u64) {
    match ctx.store.wake_session(session_id).await {
        // Another worker healed the session first, or the search saw it in the middle of a change.
        Ok(healed) if healed.is_empty() => {}
        Ok(healed) => {
            *sessions_healed += 1;
            let wrong: Vec<String> = healed.iter().map(ToString::to_string).collect();
            warn!(session.id = session_id, healed = wrong.join("; "), "Healed a session");
            ctx.bus.notifier.any_job();
            ctx.bus.notifier.session(session_id);
        }
        // Go on with the other sessions.
        Err(error) => {
            warn!(session.id = session_id, %error, "A session could not be healed; trying again later")
        }
    }
}
