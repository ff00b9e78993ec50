//! The places of connections, and which connection gives way when all are taken.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
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

/// In a flood, each new connection pushes out an old one. So the one to push out is found without looking at all of
/// them.
#[derive(Default)]
struct Taken {
    next: u64,
    by_id: HashMap<u64, Entry>,
    by_address: HashMap<IpAddr, Held>,
    /// What each address would give up, with the one to push out first.
    first_out: BTreeSet<Offer>,
    in_reserve: usize,
}

/// The connections of an address.
#[derive(Default)]
struct Held {
    count: usize,
    /// Those that are not served.
    idle: BTreeSet<Idle>,
}

/// A connection that is not served: what it does, since when, and its id.
type Idle = (Doing, Instant, u64);

/// The address that has the most connections is the first to give one up, and of its connections the one that waits longest.
type Offer = (Reverse<usize>, Idle, IpAddr);

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
            taken.insert(id, Entry { address, doing, since, pushed_out: pushed_out.clone() });
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
    fn insert(&mut self, id: u64, entry: Entry) {
        self.change(entry.address, |held| {
            held.count += 1;
            held.idle.extend(entry.idle(id));
        });
        self.by_id.insert(id, entry);
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.by_id.remove(&id)?;
        self.change(entry.address, |held| {
            held.count -= 1;
            if let Some(idle) = entry.idle(id) {
                held.idle.remove(&idle);
            }
        });
        Some(entry)
    }

    /// Changes what an address holds, and what it would give up.
    fn change(&mut self, address: IpAddr, change: impl FnOnce(&mut Held)) {
        let held = self.by_address.entry(address).or_default();
        if let Some(offer) = held.offer(address) {
            self.first_out.remove(&offer);
        }
        change(held);
        self.first_out.extend(held.offer(address));
        if held.count == 0 {
            self.by_address.remove(&address);
        }
    }

    /// Pushes one connection out of its place. One that is served is never pushed out.
    fn push_out(&mut self) -> bool {
        let first = self.first_out.first().map(|(_, (_, _, id), _)| *id);
        let Some(entry) = first.and_then(|id| self.remove(id)) else { return false };
        entry.pushed_out.cancel();
        true
    }
}

impl Held {
    fn offer(&self, address: IpAddr) -> Option<Offer> {
        self.idle.first().map(|idle| (Reverse(self.count), *idle, address))
    }
}

impl Entry {
    fn idle(&self, id: u64) -> Option<Idle> {
        (self.doing != Doing::Served).then_some((self.doing, self.since, id))
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
        if let Some(id) = self.id
            && let Some(entry) = taken.remove(id)
        {
            taken.insert(id, Entry { doing, since: Instant::now(), ..entry });
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        match self.id {
            Some(id) => drop(taken.remove(id)),
            None => taken.in_reserve -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The one to push out, found by looking at all of them.
    fn looked_up(taken: &Taken) -> Option<u64> {
        let mut held: HashMap<IpAddr, usize> = HashMap::new();
        for entry in taken.by_id.values() {
            *held.entry(entry.address).or_default() += 1;
        }
        let idle =
            taken.by_id.iter().filter_map(|(id, entry)| Some((held[&entry.address], entry.idle(*id)?)));
        idle.min_by_key(|(count, idle)| (Reverse(*count), *idle)).map(|(_, (_, _, id))| id)
    }

    #[test]
    fn the_one_to_push_out_is_the_one_that_a_look_at_all_finds() {
        let places = Arc::new(Places::new(20, 2));
        let mut dice = 7_u64;
        let mut below = |limit: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % limit
        };
        let mut open = Vec::new();
        for _ in 0..5000 {
            match below(4) {
                0 if !open.is_empty() => drop(open.swap_remove(below(open.len() as u64) as usize)),
                1 if !open.is_empty() => {
                    let place: &Place = &open[below(open.len() as u64) as usize];
                    let doing = [Doing::Waiting, Doing::Receiving, Doing::Served];
                    place.now(doing[below(3) as usize]);
                }
                _ => {
                    let address = IpAddr::from([127, 0, 0, below(5) as u8]);
                    if let Given::Place(place) | Given::Reserve(place) = Places::take(&places, address) {
                        open.push(place);
                    }
                }
            }
            let taken = places.lock();
            assert_eq!(taken.first_out.first().map(|(_, (_, _, id), _)| *id), looked_up(&taken));
            assert_eq!(taken.by_address.values().map(|held| held.count).sum::<usize>(), taken.by_id.len());
            assert!(taken.by_id.len() <= 20 && taken.in_reserve <= 2);
        }
        open.clear();
        let taken = places.lock();
        assert!(taken.by_id.is_empty() && taken.by_address.is_empty() && taken.first_out.is_empty());
    }
}
