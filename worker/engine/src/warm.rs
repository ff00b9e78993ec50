//! Copies of the sessions that this process worked on last, so that the next turn of a chat reads only what is new.
//!
//! A claim takes its session's copy out, so no two claims have it, and puts it back when it ends with a commit whose outcome is
//! known. [`wakeful_store::hydrate::Warm`] says what a copy has and when it is good; one that is not is dropped, and the session is
//! hydrated. Only sessions that this process worked on are here, for an hour at most, within `queue.warm_mb`.
//!
//! A process of the API keeps outlines in the same way, of the sessions whose contexts were looked at last: an open page looks again
//! at each step.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tracing::debug;
use wakeful_store::Store;
use wakeful_store::hydrate::{Hydrated, Warm};
use wakeful_workflow::id::SessionId;

/// How long a copy is kept: the pauses of a conversation are mostly shorter.
const KEPT: Duration = Duration::from_secs(3600);

/// How often a worker drops the copies that are older.
const SWEEP: Duration = Duration::from_secs(60);

/// The most that the outlines of a process take, in megabytes. That of 20,000 messages takes about 8.
pub const OUTLINES_MB: usize = 24;

/// The copies of this process.
pub struct WarmSessions {
    /// The most bytes of all copies. 0: none is kept.
    most_bytes: usize,
    kept: Mutex<Kept<Warm>>,
}

/// Values by their session, the one that was put back last at the end.
struct Kept<T> {
    by_place: BTreeMap<u64, Copy<T>>,
    places: HashMap<SessionId, u64>,
    last_place: u64,
    bytes: usize,
}

struct Copy<T> {
    session_id: SessionId,
    since: Instant,
    bytes: usize,
    value: T,
}

impl WarmSessions {
    /// Keeps copies of up to `megabytes` in all.
    pub fn new(megabytes: usize) -> WarmSessions {
        WarmSessions { most_bytes: megabytes << 20, kept: Mutex::default() }
    }

    /// Reads the session: what is new of it, if this process has a good copy, and otherwise all of it.
    ///
    /// # Errors
    /// Those of [`Store::hydrate`].
    pub(crate) async fn hydrate(&self, store: &Store, session_id: &str) -> wakeful_store::Result<Hydrated> {
        let copy = self.kept().take(&session_id.into()).filter(Copy::is_young);
        if let Some(copy) = copy {
            if let Some(hydrated) = store.catch_up(copy.value).await? {
                return Ok(hydrated);
            }
            debug!(session.id = session_id, "The copy in memory is outdated; reading the whole session");
        }
        store.hydrate_to_keep(session_id).await
    }

    /// Reads the outline of the session: what is new of it, if this process has a good copy, and otherwise all of it.
    ///
    /// # Errors
    /// Those of [`Store::hydrate`].
    pub async fn hydrate_outlined(&self, store: &Store, session_id: &str) -> wakeful_store::Result<Hydrated> {
        let copy = self.kept().take(&session_id.into()).filter(Copy::is_young);
        store.hydrate_outlined(session_id, copy.map(|copy| copy.value)).await
    }

    /// Keeps what does not change of a session whose claim has ended. Its messages must be those of its last commit.
    pub fn keep(&self, hydrated: Hydrated) {
        if self.most_bytes == 0 {
            return;
        }
        let Some(warm) = hydrated.keep() else { return };
        let (session_id, bytes) = (warm.session_id().clone(), warm.bytes());
        // Freed after the lock is given back.
        let mut kept = self.kept();
        let _dropped = (kept.too_old(), kept.put(session_id, bytes, warm, self.most_bytes));
        drop(kept);
    }

    /// Drops the copies that are too old, again and again.
    pub(crate) async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let _dropped = self.kept().too_old();
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept<Warm>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Default for Kept<T> {
    fn default() -> Kept<T> {
        Kept { by_place: BTreeMap::new(), places: HashMap::new(), last_place: 0, bytes: 0 }
    }
}

impl<T> Kept<T> {
    /// Returns what had to leave: an older copy of the session, and the copies whose sessions rest the longest.
    fn put(&mut self, session_id: SessionId, bytes: usize, value: T, most_bytes: usize) -> Vec<Copy<T>> {
        let mut dropped: Vec<Copy<T>> = self.take(&session_id).into_iter().collect();
        let copy = Copy { session_id, since: Instant::now(), bytes, value };
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

    fn too_old(&mut self) -> Vec<Copy<T>> {
        let mut dropped = Vec::new();
        while self.by_place.first_key_value().is_some_and(|(_, copy)| !copy.is_young()) {
            dropped.extend(self.take_first());
        }
        dropped
    }

    fn take(&mut self, session_id: &SessionId) -> Option<Copy<T>> {
        let place = self.places.remove(session_id)?;
        let copy = self.by_place.remove(&place)?;
        self.bytes -= copy.bytes;
        Some(copy)
    }

    fn take_first(&mut self) -> Option<Copy<T>> {
        let session_id = self.by_place.first_key_value()?.1.session_id.clone();
        self.take(&session_id)
    }
}

impl<T> Copy<T> {
    fn is_young(&self) -> bool {
        self.since.elapsed() < KEPT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts a copy of ten bytes, of at most thirty, and says which had to leave.
    fn put(kept: &mut Kept<()>, session_id: &str) -> Vec<String> {
        names(kept.put(session_id.into(), 10, (), 30))
    }

    fn names(copies: Vec<Copy<()>>) -> Vec<String> {
        copies.into_iter().map(|copy| copy.session_id.to_string()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_copy_of_the_session_that_rests_the_longest_leaves_first() {
        let mut kept = Kept::default();
        for session_id in ["a", "b", "c"] {
            assert_eq!(put(&mut kept, session_id), Vec::<String>::new());
        }
        assert!(kept.take(&"a".into()).is_some());
        assert!(kept.take(&"a".into()).is_none(), "no two claims have one copy");
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
    async fn a_copy_is_kept_for_an_hour() {
        let mut kept = Kept::default();
        put(&mut kept, "a");
        tokio::time::advance(KEPT - Duration::from_secs(1)).await;
        put(&mut kept, "b");
        assert_eq!(names(kept.too_old()), Vec::<String>::new());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(names(kept.too_old()), ["a"]);
        assert_eq!(names(kept.too_old()), Vec::<String>::new());
        assert!(kept.take(&"b".into()).is_some_and(|copy| copy.is_young()));
    }
}
