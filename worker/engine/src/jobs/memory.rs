//! Drops what a process has kept in memory of its sessions for too long: see [`kept`](crate::kept).

use crate::ctx::Ctx;
use std::sync::Arc;
use std::time::Duration;

/// How often.
const SWEEP: Duration = Duration::from_secs(60);

/// Drops what is too old, again and again. Every process that serves or works does it.
pub async fn run(ctx: Arc<Ctx>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        ctx.warm.forget_old();
        ctx.renderings.forget_old();
        ctx.outlines.forget_old();
    }
}
