//! Background work of a worker: the two kinds of job (step, deliver), the pool that runs them, and the
//! timers of a worker, which heal sessions, close unanswered questions, tend the gates of the providers, fill the search, carry out batches, and
//! drop what was kept of sessions that rest for long.
//! Notifications have tasks of their own, which a process without a worker has too.
#![doc = include_str!("README.md")]

pub mod batches;
pub mod delayed;
pub mod deliver;
pub mod expire;
pub mod gates;
pub mod heal;
pub mod memory;
pub mod notify;
pub mod pool;
pub mod search;
pub mod step;
mod timer;

use crate::ctx::Ctx;
use std::time::Duration;
use tracing::{info, warn};
use wakeful_store::queue::Job;
use wakeful_workflow::pause::Subject;

/// A waiting job looks by itself after this time, in case that nothing lets it go.
const LOOK: Duration = Duration::from_secs(300);

/// Gives a job back that a pause holds up.
async fn hold(ctx: &Ctx, job: &Job, subject: &Subject, why: &str) {
    match ctx.store.hold(&job.lease, subject, LOOK).await {
        Ok(goes_on) => {
            info!(session.id = job.session_id, conversation.id = %job.conversation_id, why, "A job waits");
            if goes_on {
                ctx.bus.notifier.job_of(job.kind, &job.runner);
            }
        }
        Err(error) => not_given_back(&error),
    }
}

/// Says that a job keeps its lease, so that it waits for the lease's end.
fn not_given_back(error: &wakeful_store::Error) {
    warn!(%error, "The job could not be given back; workers can claim it when its lease ends");
}
