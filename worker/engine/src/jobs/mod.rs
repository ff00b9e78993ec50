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

use tracing::warn;

/// Says that a job keeps its lease, so that it waits for the lease's end.
fn not_given_back(error: &wakeful_store::Error) {
    warn!(%error, "The job could not be given back; workers can claim it when its lease ends");
}
