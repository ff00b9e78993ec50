//! The jobs that apalis runs, the pool that runs them, and the healer beside it.

pub mod deliver;
pub mod heal;
pub mod pool;
pub mod step;
