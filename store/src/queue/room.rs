//! How many jobs a queue may take: no more than it has slots, and no more than the process's connections can commit. Each job
//! takes a slot.

use super::{Hold, Holdings, horizon};
use crate::pool::Pool;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Jobs of a process for each of its connections, while the server gives it fewer connections than it wants.
const JOBS_PER_CONNECTION: usize = 8;

/// How many jobs the connections of `pool` can commit in time, if the server gives it fewer than it wants.
pub(super) fn most_jobs(pool: &Pool) -> Option<usize> {
    pool.limited_to().map(|open| open.max(1) * JOBS_PER_CONNECTION)
}

/// The room of one queue.
#[derive(Debug)]
pub(super) struct Room {
    /// A permit for each job that the queue may still take.
    pub slots: Arc<Semaphore>,
    pub pool: Pool,
    /// The jobs of all queues of the process.
    pub held: Arc<Holdings>,
    /// No job of the queue that was ready before this moment is left, as its last claim says: milliseconds of `CLOCK_BOOTTIME`.
    pub clear_before: AtomicI64,
}

impl Room {
    /// How many jobs the queue takes now. A step mostly waits for its model, so only a process with fewer connections
    /// than it wants has a limit beside the slots: it leaves to others what it could not commit in time.
    pub fn free(&self) -> usize {
        let free = self.slots.available_permits();
        match most_jobs(&self.pool) {
            // A job that has left its slot commits nothing until its model answers.
            Some(most) => free.min(most.saturating_sub(self.held.in_place())),
            None => free,
        }
    }

    /// How long before `now` a waiting job may have become ready.
    pub fn reach(&self, now: u64) -> Duration {
        horizon::back_to(self.clear_before.load(Ordering::Relaxed), now)
    }
}

/// What a claimed job takes of its process and of its queue, and gives back.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) job_id: i64,
    pub(super) token: i64,
    pub(super) held: Arc<Holdings>,
    /// The room of the queue that claimed the job.
    pub(super) room: Arc<Room>,
    pub(super) hold: Arc<Hold>,
}

/// Where a job has its place.
#[derive(Debug)]
pub(super) enum Place {
    /// In a slot of its queue. `None`: an offer, or a suspect that made progress, took the slot during the claim.
    Slot(Option<OwnedSemaphorePermit>),
    /// In the process's place for a suspect.
    Suspect,
    /// It has left its slot to another job.
    Left,
}

impl Slot {
    /// The job made progress, so it is no suspect: it takes a slot and leaves the place, if a slot is free. One that has left its
    /// slot takes one again.
    pub fn clear(&self) {
        let mut place = self.hold.place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Place::Suspect | Place::Left = *place
            && let Ok(permit) = Arc::clone(&self.room.slots).try_acquire_owned()
            && let Place::Suspect = std::mem::replace(&mut *place, Place::Slot(Some(permit)))
        {
            self.held.suspect.leave();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.held.remove(self.job_id, self.token);
        // Free the slot before the claimer is notified. Otherwise it finds no free slot and waits for its
        // next poll.
        let mut place = self.hold.place.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *place, Place::Slot(None)) {
            Place::Suspect => self.held.suspect.leave(),
            Place::Slot(permit) => drop(permit),
            Place::Left => {}
        }
        self.hold.freed.notify_one();
    }
}
