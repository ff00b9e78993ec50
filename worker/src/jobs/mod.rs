//! The jobs that apalis runs, and the pool that runs them.

pub mod deliver;
pub mod pool;
pub mod step;
