//! The timer of the search: every worker tries to fill the tables that a search reads, and one at a time does it. It also counts
//! failures in their groups. No step waits for it.
//!
//! The words of a message cost the database about a tenth of what its step costs. So while a process has much to do, its
//! looks at a backlog take a tenth of the time at most, and the steps get the rest. A backlog that stays for a minute is then read
//! without such pauses.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;
use wakeful_store::queue::{self, Holdings};

/// The pause between two looks at a long backlog, in which others get the connection.
const BREATH: Duration = Duration::from_millis(40);

/// How many times as long as its look a busy process pauses.
const GIVES_WAY: u32 = 9;

/// How long a backlog gives way to steps.
const PATIENCE: Duration = Duration::from_secs(60);

/// Looks at once and then every `[queue] search_s`, until `ctx.shutdown.draining` fires.
pub(super) async fn run(ctx: Arc<Ctx>, holdings: Arc<Holdings>) {
    let every = Duration::from_secs(ctx.config.queue.search_s);
    let mut behind_since = None;
    loop {
        let began = Instant::now();
        let more = match ctx.store.index_sessions().await {
            Ok(indexed) => indexed.more,
            Err(error) => {
                warn!(%error, "The search could not be brought up to date; trying again");
                false
            }
        };
        let pause = if more {
            let behind = behind_since.get_or_insert(began).elapsed();
            // Half of the slots: one step at a time leaves room beside it.
            let busy = holdings.len() * 2 >= ctx.config.queue.concurrency;
            between_looks(began.elapsed(), behind, busy)
        } else {
            behind_since = None;
            queue::jittered(every)
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}

/// The pause between two looks at a backlog that is `behind`, the last of which took `look`.
fn between_looks(look: Duration, behind: Duration, busy: bool) -> Duration {
    if busy && behind < PATIENCE { BREATH.max(look * GIVES_WAY) } else { BREATH }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backlog_gives_way_to_steps_for_a_minute() {
        let [look, second] = [Duration::from_millis(50), Duration::from_secs(1)];
        assert_eq!(between_looks(look, second, false), BREATH);
        assert_eq!(between_looks(look, second, true), look * 9);
        assert_eq!(between_looks(Duration::ZERO, second, true), BREATH);
        assert_eq!(between_looks(look, PATIENCE, true), BREATH);
    }
}
