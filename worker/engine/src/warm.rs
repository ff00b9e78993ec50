//! Copies of the sessions that this process worked on last, so that the next turn of a chat reads only what is new.
//!
//! A claim takes its session's copy out, so no two claims have it, and puts it back when it ends with a commit whose outcome is
//! known. [`wakeful_store::hydrate::Warm`] says what a copy has and when it is good. A copy that is not good is dropped, and the
//! session is hydrated. Only sessions that this process worked on are here, for an hour at most, within `queue.warm_mb`.

use crate::kept::{Entry, Kept};
use tracing::debug;
use wakeful_store::Store;
use wakeful_store::hydrate::{Hydrated, Warm};

/// The copies of this process.
pub struct WarmSessions {
    /// The most bytes of all copies. 0: none is kept.
    most_bytes: usize,
    kept: Kept<Warm>,
}

impl WarmSessions {
    /// Keeps copies of up to `megabytes` in all.
    pub fn new(megabytes: usize) -> WarmSessions {
        WarmSessions { most_bytes: megabytes << 20, kept: Kept::default() }
    }

    /// Reads the session: what is new of it, if this process has a good copy, and otherwise all that its next steps need.
    ///
    /// # Errors
    /// Those of [`Store::hydrate_tail`].
    pub(crate) async fn hydrate(&self, store: &Store, session_id: &str) -> wakeful_store::Result<Hydrated> {
        let copy = self.kept.take(&session_id.into());
        if let Some(copy) = copy.filter(Entry::is_young) {
            if let Some(hydrated) = store.catch_up(copy.value).await? {
                return Ok(hydrated);
            }
            debug!(session.id = session_id, "The copy in memory is outdated; reading the session again");
        }
        store.hydrate_tail(session_id).await
    }

    /// Keeps a copy of a session whose claim has ended: what does not change, as far as its next steps need it. The session's messages
    /// must be those of its last commit.
    pub(crate) fn keep(&self, mut hydrated: Hydrated) {
        if self.most_bytes == 0 {
            return;
        }
        hydrated.leave_out();
        let Some(warm) = hydrated.keep() else { return };
        let (session_id, bytes) = (warm.session_id().clone(), warm.bytes());
        self.kept.put(session_id, bytes, warm, self.most_bytes);
    }

    pub(crate) fn forget_old(&self) {
        self.kept.forget_old();
    }
}
