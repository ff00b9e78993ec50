//! Background work of a worker: the two kinds of job (step, deliver), the pool that runs them, and two
//! timers, which heal sessions and close unanswered questions.
#![doc = include_str!("README.md")]

pub mod deliver;
pub mod expire;
pub mod heal;
pub mod pool;
pub mod step;
