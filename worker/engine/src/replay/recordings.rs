//! A cache of source recordings, so that a replay reads its source once and not at every step.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use wakeful_store::Store;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::Replay;
use wakeful_workflow::replay::{Follower, Recording};
use wakeful_workflow::session::Session;

/// How many recordings are kept. When one more is read, the oldest is dropped.
const KEPT: usize = 16;

/// Recordings by the session that replays, the newest last. The key is not the source, because the source may
/// have grown before another replay of it begins.
#[derive(Default)]
pub struct Recordings(Mutex<VecDeque<Kept>>);

struct Kept {
    session_id: SessionId,
    recording: Arc<Recording>,
    follower: Arc<Mutex<Follower>>,
}

/// The recording that a session replays, and the rules of the replay.
pub struct Source {
    pub rules: Replay,
    pub recording: Arc<Recording>,
    follower: Arc<Mutex<Follower>>,
}

impl Source {
    /// What the steps of this process have read of the replay so far. Give it no copy of the session that is older than one
    /// that it has read.
    pub(crate) fn follower(&self) -> MutexGuard<'_, Follower> {
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recordings {
    /// Returns the source of `session`, as it was when this process first read it. `None` if `session` is not
    /// a replay.
    ///
    /// # Errors
    /// [`wakeful_store::Error`], also when the source does not exist.
    pub async fn of(&self, store: &Store, session: &Session) -> wakeful_store::Result<Option<Source>> {
        let Some(rules) = session.policy.replay.clone() else {
            return Ok(None);
        };
        if let Some(known) = self.known(session) {
            return Ok(Some(known));
        }
        let recording = Arc::new(store.recording(rules.source_session_id.as_str()).await?);
        let follower = Arc::<Mutex<Follower>>::default();
        let source = Source { rules, recording: Arc::clone(&recording), follower: Arc::clone(&follower) };
        let mut kept = self.kept();
        kept.push_back(Kept { session_id: session.session_id.clone(), recording, follower });
        if kept.len() > KEPT {
            kept.pop_front();
        }
        Ok(Some(source))
    }

    /// The source of `session`, if this process has read it and still keeps it.
    pub(crate) fn known(&self, session: &Session) -> Option<Source> {
        let rules = session.policy.replay.clone()?;
        let kept = self.kept();
        let known = kept.iter().find(|one| one.session_id == session.session_id)?;
        let (recording, follower) = (Arc::clone(&known.recording), Arc::clone(&known.follower));
        Some(Source { rules, recording, follower })
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
