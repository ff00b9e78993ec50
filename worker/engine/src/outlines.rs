//! Outlines of the sessions whose contexts were looked at last. An open page asks again at each step, and must not read the whole
//! of a long session each time.

use crate::kept::Kept;
use std::sync::Arc;
use wakeful_store::Store;
use wakeful_store::hydrate::{Hydrated, Warm};

/// The most that the outlines of a process take. That of 20,000 messages takes about 8 MB.
const MOST_BYTES: usize = 24 << 20;

/// The outlines of this process. All who look at one session share its outline.
#[derive(Default)]
pub struct Outlines(Kept<Arc<Warm>>);

impl Outlines {
    /// Reads the outline of the session: what is new of it, if this process has a good copy, and otherwise all of it.
    ///
    /// # Errors
    /// Those of [`Store::hydrate`].
    pub async fn read(&self, store: &Store, session_id: &str) -> wakeful_store::Result<Hydrated> {
        let copy = self.0.young(&session_id.into());
        store.hydrate_outlined(session_id, copy.map(Arc::unwrap_or_clone)).await
    }

    /// Keeps what does not change of a session that was read.
    pub fn keep(&self, read: Hydrated) {
        let Some(outline) = read.keep() else { return };
        let (session_id, bytes) = (outline.session_id().clone(), outline.bytes());
        self.0.put(session_id, bytes, Arc::new(outline), MOST_BYTES);
    }

    pub(crate) fn forget_old(&self) {
        self.0.forget_old();
    }
}
