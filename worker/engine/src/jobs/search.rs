//! The timer of the search: every worker tries to fill the tables that a search reads, and one at a time does it. It also counts
//! failures in their groups. No step waits for it.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use wakeful_store::queue;

/// The pause between two looks at a long backlog, in which others get the connection.
const BREATH: Duration = Duration::from_millis(40);

/// Looks at once and then every `[queue] search_s`, until `ctx.shutdown.draining` fires.
pub(super) async fn run(ctx: Arc<Ctx>) {
    let every = Duration::from_secs(ctx.config.queue.search_s);
    loop {
        let more = match ctx.store.index_sessions().await {
            Ok(indexed) => indexed.more,
            Err(error) => {
                warn!(%error, "The search could not be brought up to date; trying again");
                false
            }
        };
        let pause = if more { BREATH } else { queue::jittered(every) };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}
