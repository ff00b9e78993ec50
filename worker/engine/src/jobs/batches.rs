//! The timer of the batches: every worker takes a turn at a batch that is due. The batch's row keeps the rate of all workers
//! together.

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use wakeful_store::queue;

/// The pause after a turn, and while no batch is due.
const BUSY: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(1);

/// Takes turns until `ctx.shutdown.draining` fires.
pub(super) async fn run(ctx: Arc<Ctx>) {
    loop {
        let pause = match ctx.store.work_on_batch().await {
            Ok(turn) => {
                if !turn.sessions.is_empty() {
                    ctx.bus.notifier.any_job();
                }
                for session_id in &turn.sessions {
                    ctx.bus.notifier.session(session_id);
                }
                if turn.batch_id.is_some() { BUSY } else { queue::jittered(IDLE) }
            }
            Err(error) => {
                warn!(%error, "A batch could not go on; trying again");
                queue::jittered(IDLE)
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}
