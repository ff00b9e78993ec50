//! The places of connections, and which connection gives way when all are taken.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// What a connection does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Doing {
    /// It has sent no whole head since the last answer.
    Waiting,
    /// Its request's body is not complete.
    Receiving,
    /// Its request is being handled, or the answer is being sent.
    Served,
}

/// What a new connection gets.
pub(super) enum Given {
    Place(Place),
    /// A place that serves only the health.
    Reserve(Place),
    Nothing,
}

/// All places.
pub(super) struct Places {
    limit: usize,
    reserve: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    next: u64,
    by_id: HashMap<u64, Entry>,
    in_reserve: usize,
}

struct Entry {
    address: IpAddr,
    doing: Doing,
    since: Instant,
    pushed_out: CancellationToken,
}

/// One connection's place. Dropping it frees the place.
pub(super) struct Place {
    places: Arc<Places>,
    /// `None` for a place of the reserve.
    id: Option<u64>,
    pushed_out: CancellationToken,
    address: IpAddr,
}

impl Places {
    pub fn new(limit: usize, reserve: usize) -> Places {
        Places { limit, reserve, taken: Mutex::default() }
    }

    /// Gives a place to a connection from `address`.
    pub fn take(this: &Arc<Places>, address: IpAddr) -> Given {
        let mut taken = this.lock();
        let has_room = taken.by_id.len() < this.limit || taken.push_out();
        let pushed_out = CancellationToken::new();
        if has_room {
            let id = taken.next;
            taken.next += 1;
            let (doing, since) = (Doing::Waiting, Instant::now());
            taken.by_id.insert(id, Entry { address, doing, since, pushed_out: pushed_out.clone() });
            return Given::Place(Place { places: Arc::clone(this), id: Some(id), address, pushed_out });
        }
        if taken.in_reserve >= this.reserve {
            return Given::Nothing;
        }
        taken.in_reserve += 1;
        Given::Reserve(Place { places: Arc::clone(this), id: None, address, pushed_out })
    }

    /// Closes a connection that waits, if there is one.
    pub fn make_room(&self) {
        self.lock().push_out();
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    /// Pushes one connection out of its place. One that is served is never pushed out.
    fn push_out(&mut self) -> bool {
        let mut held: HashMap<IpAddr, usize> = HashMap::new();
        for entry in self.by_id.values() {
            *held.entry(entry.address).or_default() += 1;
        }
        let given_up = self
            .by_id
            .iter()
            .filter(|(_, entry)| entry.doing != Doing::Served)
            .min_by_key(|(_, entry)| (Reverse(held.get(&entry.address)), entry.doing, entry.since))
            .map(|(id, _)| *id);
        let Some(entry) = given_up.and_then(|id| self.by_id.remove(&id)) else { return false };
        entry.pushed_out.cancel();
        true
    }
}

impl Place {
    pub fn is_reserve(&self) -> bool {
        self.id.is_none()
    }

    /// Where the connection comes from.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Ends when another connection took this place.
    pub async fn pushed_out(&self) {
        self.pushed_out.cancelled().await;
    }

    pub fn now(&self, doing: Doing) {
        let mut taken = self.places.lock();
        if let Some(entry) = self.id.and_then(|id| taken.by_id.get_mut(&id)) {
            (entry.doing, entry.since) = (doing, Instant::now());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        match self.id {
            Some(id) => drop(taken.by_id.remove(&id)),
            None => taken.in_reserve -= 1,
        }
    }
}
