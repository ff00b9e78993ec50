//! The leases that a process holds.

use super::Hold;
use super::contact::Contact;
use super::suspect::SuspectPlace;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// Every lease that this process holds. The heartbeat renews these.
#[derive(Debug, Default)]
pub struct Holdings {
    leases: Mutex<HashMap<(i64, i64), Arc<Hold>>>,
    pub(super) suspect: SuspectPlace,
    contact: Mutex<Contact>,
    /// Key of the liveness lock that this process holds. 0: it holds none.
    liveness_lock: AtomicI32,
    /// Fires when the jobs of this process do not name its present lock, or name one that it has lost.
    pub(super) beat_now: Notify,
}

impl Holdings {
    pub(super) fn insert(&self, job_id: i64, token: i64, hold: Arc<Hold>) {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).insert((job_id, token), hold);
    }

    pub(super) fn remove(&self, job_id: i64, token: i64) {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).remove(&(job_id, token));
    }

    pub(super) fn all(&self) -> Vec<((i64, i64), Arc<Hold>)> {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.iter().map(|(key, hold)| (*key, Arc::clone(hold))).collect()
    }

    /// A heartbeat that began at `now_ms` has succeeded.
    pub(super) fn beat_came(&self, now_ms: u64, lease: Duration, every: Duration) {
        self.contact.lock().unwrap_or_else(PoisonError::into_inner).beat(now_ms, lease, every);
    }

    /// Returns whether this process may take a lease that has ended for one that nobody keeps: see [`Contact`].
    pub(super) fn may_take_expired(&self, now_ms: u64) -> bool {
        self.contact.lock().unwrap_or_else(PoisonError::into_inner).may_take_expired(now_ms)
    }

    /// Returns the key of the process's liveness lock.
    pub(super) fn lock(&self) -> Option<i32> {
        Some(self.liveness_lock.load(Ordering::Acquire)).filter(|key| *key != 0)
    }

    /// Sets the key of the process's lock (0: it is lost) and returns the former one. The next heartbeat comes at once and writes the
    /// new key: it has a connection of its own, and need not wait for one of the pool.
    pub(super) fn replace_lock(&self, key: i32) -> i32 {
        let former = self.liveness_lock.swap(key, Ordering::AcqRel);
        self.beat_now.notify_one();
        former
    }

    /// Makes the heartbeat beat now. Its answer also says whether an operator has asked this worker to drain.
    pub fn beat(&self) {
        self.beat_now.notify_one();
    }

    /// How many leases are held.
    pub fn len(&self) -> usize {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// How many leases are held by jobs that have not left their slots.
    pub(super) fn in_place(&self) -> usize {
        self.all().iter().filter(|(_, hold)| !hold.has_left()).count()
    }

    /// Returns whether the process holds no lease.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::room::Place;
    use std::sync::atomic::AtomicU64;
    use tokio::sync::watch;
    use tokio_util::sync::CancellationToken;

    #[test]
    fn a_job_that_has_left_its_slot_is_held_and_leaves_room() {
        let holdings = Holdings::default();
        for (job_id, place) in [(1, Place::Slot(None)), (2, Place::Left), (3, Place::Suspect)] {
            let hold = Hold {
                lost: CancellationToken::new(),
                commits: watch::channel(0).0,
                ends_ms: AtomicU64::new(0),
                place: Mutex::new(place),
                freed: Arc::default(),
            };
            holdings.insert(job_id, 7, Arc::new(hold));
        }
        assert_eq!((holdings.len(), holdings.in_place()), (3, 2));
    }
}
