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
