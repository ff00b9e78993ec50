//! What a process keeps of its sessions in memory: for an hour at most, and within bounds. The session that rests the longest leaves
//! first.
//!
//! | what | for whom |
//! |---|---|
//! | [`WarmSessions`](crate::warm::WarmSessions) | the next turn of a session that this process worked on |
//! | [`Renderings`](crate::model::renderings::Renderings) | the next request of such a session |
//! | [`Outlines`](crate::outlines::Outlines) | the next look at the context of a session |

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use wakeful_workflow::id::SessionId;

/// How long anything is kept: the pauses of a conversation are mostly shorter. What was erased goes with it, so this is a promise of
/// SECURITY.md too.
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// What one process keeps. What leaves is freed after the lock is given back.
pub(crate) struct Kept<T>(Mutex<ByAge<T>>);

/// Values by their session, the one that was put back last at the end. Each act takes about the same time, however many there are.
struct ByAge<T> {
    by_place: BTreeMap<u64, Entry<T>>,
    places: HashMap<SessionId, u64>,
    last_place: u64,
    bytes: usize,
}

pub(crate) struct Entry<T> {
    session_id: SessionId,
    since: Instant,
    bytes: usize,
    pub value: T,
}

impl<T> Default for Kept<T> {
    fn default() -> Kept<T> {
        Kept(Mutex::default())
    }
}

impl<T> Kept<T> {
    /// Keeps this value instead of an older one of the session. If all together take more than `most_bytes`, those whose sessions
    /// rest the longest leave.
    pub fn put(&self, session_id: SessionId, bytes: usize, value: T, most_bytes: usize) {
        let _dropped = self.locked().put(session_id, bytes, value, most_bytes);
    }

    pub fn take(&self, session_id: &SessionId) -> Option<Entry<T>> {
        self.locked().take(session_id)
    }

    /// A copy of a session's value that is young enough to be used. The value stays.
    pub fn young(&self, session_id: &SessionId) -> Option<T>
    where
        T: Clone,
    {
        let kept = self.locked();
        kept.get(session_id).filter(|entry| entry.is_young()).map(|entry| entry.value.clone())
    }

    /// Forgets the values that were put in an hour ago or earlier.
    pub fn forget_old(&self) {
        let _dropped = self.locked().take_old();
    }

    fn locked(&self) -> MutexGuard<'_, ByAge<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Default for ByAge<T> {
    fn default() -> ByAge<T> {
        ByAge { by_place: BTreeMap::new(), places: HashMap::new(), last_place: 0, bytes: 0 }
    }
}

impl<T> ByAge<T> {
    /// Returns what had to leave, so that it can be freed without a lock: an older value of the session, and the values whose
    /// sessions rest the longest, if all together take more than `most_bytes`.
    fn put(&mut self, session_id: SessionId, bytes: usize, value: T, most_bytes: usize) -> Vec<Entry<T>> {
        let mut dropped: Vec<Entry<T>> = self.take(&session_id).into_iter().collect();
        let copy = Entry { session_id, since: Instant::now(), bytes, value };
        if bytes > most_bytes {
            dropped.push(copy);
            return dropped;
        }
        self.last_place += 1;
        self.bytes += bytes;
        self.places.insert(copy.session_id.clone(), self.last_place);
        self.by_place.insert(self.last_place, copy);
        while self.bytes > most_bytes {
            dropped.extend(self.take_first());
        }
        dropped
    }

    /// Takes out the values that were put in an hour ago or earlier.
    fn take_old(&mut self) -> Vec<Entry<T>> {
        let mut dropped = Vec::new();
        while self.by_place.first_key_value().is_some_and(|(_, copy)| !copy.is_young()) {
            dropped.extend(self.take_first());
        }
        dropped
    }

    /// Shows the value of a session, and leaves it.
    fn get(&self, session_id: &SessionId) -> Option<&Entry<T>> {
        self.by_place.get(self.places.get(session_id)?)
    }

    fn take(&mut self, session_id: &SessionId) -> Option<Entry<T>> {
        let place = self.places.remove(session_id)?;
        let copy = self.by_place.remove(&place)?;
        self.bytes -= copy.bytes;
        Some(copy)
    }

    fn take_first(&mut self) -> Option<Entry<T>> {
        let session_id = self.by_place.first_key_value()?.1.session_id.clone();
        self.take(&session_id)
    }
}

impl<T> Entry<T> {
    pub fn is_young(&self) -> bool {
        self.since.elapsed() < HOUR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts a copy of ten bytes, of at most thirty, and says which had to leave.
    fn put(kept: &mut ByAge<()>, session_id: &str) -> Vec<String> {
        names(kept.put(session_id.into(), 10, (), 30))
    }

    fn names(copies: Vec<Entry<()>>) -> Vec<String> {
        copies.into_iter().map(|copy| copy.session_id.to_string()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_copy_of_the_session_that_rests_the_longest_leaves_first() {
        let mut kept = ByAge::default();
        for session_id in ["a", "b", "c"] {
            assert_eq!(put(&mut kept, session_id), Vec::<String>::new());
        }
        assert!(kept.take(&"a".into()).is_some());
        assert!(kept.take(&"a".into()).is_none(), "no two have one copy");
        assert_eq!(put(&mut kept, "a"), Vec::<String>::new());
        assert_eq!(put(&mut kept, "d"), ["b"]);
        assert_eq!(put(&mut kept, "d"), ["d"], "a newer copy of the same session");
        assert_eq!(names(kept.put("e".into(), 21, (), 30)), ["c", "a", "d"]);
        assert_eq!(kept.bytes, 21);
        assert_eq!(names(kept.put("f".into(), 31, (), 30)), ["f"], "one that is too large drives none out");
        assert_eq!(names(kept.put("e".into(), 31, (), 30)), ["e", "e"]);
        assert_eq!((kept.bytes, kept.places.len(), kept.by_place.len()), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_leaves_when_it_is_old() {
        let mut kept = ByAge::default();
        put(&mut kept, "a");
        tokio::time::advance(HOUR - Duration::from_secs(1)).await;
        put(&mut kept, "b");
        assert_eq!(names(kept.take_old()), Vec::<String>::new());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(names(kept.take_old()), ["a"]);
        assert_eq!(names(kept.take_old()), Vec::<String>::new());
        assert!(kept.get(&"b".into()).is_some_and(Entry::is_young));
    }
}
