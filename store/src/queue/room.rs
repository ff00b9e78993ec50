//! How many jobs a queue takes: as many as it has slots, and as the process's connections can commit.

use super::Holdings;
use crate::pool::Pool;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Jobs of a process for each of its connections, while the server gives it fewer connections than it wants.
const JOBS_PER_CONNECTION: usize = 8;

/// The room of one queue.
#[derive(Debug)]
pub(super) struct Room {
    /// A permit for each job that the queue may still take.
    pub slots: Arc<Semaphore>,
    pub pool: Pool,
    /// The jobs of all queues of the process.
    pub held: Arc<Holdings>,
}

impl Room {
    /// How many jobs the queue takes now. A step mostly waits for its model, so only a process with fewer connections
    /// than it wants has a limit beside the slots: what it cannot commit in time is better done by another one.
    pub fn free(&self) -> usize {
        let most = self.pool.limited_to().map_or(usize::MAX, |open| open.max(1) * JOBS_PER_CONNECTION);
        self.slots.available_permits().min(most.saturating_sub(self.held.len()))
    }
}
