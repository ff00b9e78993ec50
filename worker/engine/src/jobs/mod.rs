//! The jobs that apalis runs, the pool that runs them, and beside it the healer and who closes unanswered questions.
#![doc = include_str!("README.md")]

pub mod deliver;
pub mod expire;
pub mod heal;
pub mod pool;
pub mod step;
