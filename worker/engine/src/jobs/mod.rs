//! Background work of a worker: the two kinds of job (step, deliver), the pool that runs them, and three
//! timers, which heal sessions, close unanswered questions, and tend the gates of the providers.
#![doc = include_str!("README.md")]

pub mod delayed;
pub mod deliver;
pub mod expire;
pub mod gates;
pub mod heal;
pub mod pool;
pub mod step;
