//! Background work of a worker: the two kinds of job (step, deliver), the pool that runs them, and the
//! timers of a worker. The timers heal sessions, close unanswered questions, tell people of delays, tend the gates and the
//! pauses, fill the search, carry out batches, and drop what was kept of sessions that rest for long. Notifications have tasks
//! of their own, which a process without a worker has too.
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
use crate::outcome;
use std::time::Duration;
use tracing::{info, warn};
use wakeful_store::queue::{self, Job};
use wakeful_workflow::pause::Subject;

/// A job that waits for a pause, an agent or a gate looks by itself after this time, in case nothing lets it go.
const LOOK: Duration = Duration::from_secs(300);

/// Gives back a job that a pause holds up.
async fn hold(ctx: &Ctx, job: &Job, subject: &Subject, why: &str) {
    if let Some(goes_on) = give_back(ctx, job, || ctx.store.hold(&job.lease, subject, LOOK)).await {
        info!(session.id = job.session_id, conversation.id = %job.conversation_id, why, "A job waits");
        if goes_on {
            ctx.bus.notifier.job_of(job.kind, &job.runner);
        }
    }
}

/// Gives a job back by `give`, which the lease fences. Tries again while the database is away, until the drain ends: a job whose lease
/// ends by itself counts as one whose worker died, and what its row should say of the wait is lost. `None`: it was not given back.
async fn give_back<T, F>(ctx: &Ctx, job: &Job, mut give: impl FnMut() -> F) -> Option<T>
where
    F: Future<Output = wakeful_store::Result<T>>,
{
    let mut faults = 0;
    loop {
        match give().await {
            Ok(given) => return Some(given),
            Err(error)
                if error.is_transient()
                    && !job.lease.lost().is_cancelled()
                    && !ctx.shutdown.abort.is_cancelled() =>
            {
                faults += 1;
                if faults == 1 {
                    warn!(%error, job.id = job.lease.job_id, "The job could not be given back; trying again");
                }
                tokio::time::sleep(queue::delay(faults, None).min(outcome::LONGEST)).await;
            }
            Err(error) => {
                not_given_back(&error);
                return None;
            }
        }
    }
}

/// Logs that a job could not be given back, so it waits for the end of its lease.
fn not_given_back(error: &wakeful_store::Error) {
    warn!(%error, "The job could not be given back; workers can claim it when its lease ends");
}
