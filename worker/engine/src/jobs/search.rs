//! The timer of the search: every worker tries to fill the tables that a search reads, and one at a time does it. It also counts
//! failures in their groups. No step waits for it.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use wakeful_store::queue;

/// How often a worker looks for what is new.
const EVERY: Duration = Duration::from_secs(2);

/// Looks until `ctx.shutdown.draining` fires.
pub(super) async fn run(ctx: Arc<Ctx>) {
    loop {
        let more = match ctx.store.index_sessions().await {
            Ok(indexed) => indexed.more,
            Err(error) => {
                warn!(%error, "The search could not be brought up to date; trying again");
                false
            }
        };
        // Between two looks at a long backlog, others get the connection.
        let pause = if more { EVERY / 50 } else { queue::jittered(EVERY) };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}
