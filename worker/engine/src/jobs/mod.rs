//! Background work of a worker: the two kinds of job (step, deliver), the pool that runs them, and five
//! timers, which heal sessions, close unanswered questions, tend the gates of the providers, fill the search, and carry out batches.
#![doc = include_str!("README.md")]

pub mod batches;
pub mod delayed;
pub mod deliver;
pub mod expire;
pub mod gates;
pub mod heal;
pub mod pool;
pub mod search;
pub mod step;
