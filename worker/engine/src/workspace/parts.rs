//! Reads packs in parts, wherever they are.

use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::Mutex;
use wakeful_store::{Result, Store};

/// How many opened packs are kept, each of [`super::pack::PACK_BYTES`] and a little more.
const OPENED: usize = 3;

/// The packs of one session. A pack of an encrypted session can only be opened as a whole, so the last few of those are kept for
/// the parts to come.
pub(super) struct Parts {
    store: Store,
    session_id: String,
    opened: Mutex<VecDeque<(String, Arc<Vec<u8>>)>>,
}

impl Parts {
    pub fn new(store: &Store, session_id: &str) -> Parts {
        Parts { store: store.clone(), session_id: session_id.to_owned(), opened: Mutex::default() }
    }

    /// Returns up to `bytes` of the pack, from `start` on.
    ///
    /// # Errors
    /// Those of [`Store::pack_part`].
    pub async fn read(&self, sha256: &str, start: u64, bytes: usize) -> Result<Vec<u8>> {
        let Some(whole) = self.opened(sha256).await? else {
            return self.store.pack_part(&self.session_id, sha256, start, bytes).await;
        };
        let start = usize::try_from(start).unwrap_or(usize::MAX).min(whole.len());
        let end = start.saturating_add(bytes).min(whole.len());
        Ok(whole[start..end].to_vec())
    }

    /// A sealed pack. `None`: it is in clear, or not there at all.
    async fn opened(&self, sha256: &str) -> Result<Option<Arc<Vec<u8>>>> {
        // Those who want the same pack wait for it here.
        let mut opened = self.opened.lock().await;
        if let Some((_, whole)) = opened.iter().find(|(name, _)| name == sha256) {
            return Ok(Some(Arc::clone(whole)));
        }
        let Some(whole) = self.store.sealed_pack(&self.session_id, sha256).await? else { return Ok(None) };
        let whole = Arc::new(whole);
        if opened.len() == OPENED {
            opened.pop_front();
        }
        opened.push_back((sha256.to_owned(), Arc::clone(&whole)));
        Ok(Some(whole))
    }
}
