//! The timer of the gates and of the pauses. Every worker looks at them and tends those that are not open. The row of the gate
//! or of the pause decides which worker wakes the next jobs. The timer also looks for models that answer no call.

use crate::ctx::Ctx;
use crate::pauses;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Looks and tends until `stop` fires: after a notification, and at intervals that depend on the gates.
pub(super) async fn run(ctx: Arc<Ctx>, stop: CancellationToken) {
    let mut news = ctx.bus.news.gates();
    loop {
        if let Err(error) = look(&ctx).await {
            warn!(%error, "The providers' gates could not be read; trying again");
        }
        let pause = if ctx.pauses.none() { ctx.gates.pause() } else { ctx.gates.pause().min(pauses::EVERY) };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = news.recv() => {}
            () = stop.cancelled() => return,
        }
    }
}

async fn look(ctx: &Ctx) -> wakeful_store::Result<()> {
    if ctx.pauses.look(&ctx.store).await? {
        ctx.bus.notifier.any_job();
    }
    ctx.gates.look(&ctx.store).await?;
    if ctx.gates.tend(&ctx.store).await? {
        ctx.bus.notifier.any_job();
    }
    // A gate may have opened just now.
    if ctx.gates.all_open() { Ok(()) } else { ctx.gates.look(&ctx.store).await }
}
