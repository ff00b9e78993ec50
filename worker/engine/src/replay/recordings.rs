//! A cache of source recordings, so that a replay reads its source once and not at every step.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use wakeful_store::Store;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::Replay;
use wakeful_workflow::replay::Recording;
use wakeful_workflow::session::Session;

/// How many recordings are kept. When one more is read, the oldest is dropped.
const KEPT: usize = 16;

/// Recordings by the session that replays, the newest last. The key is not the source, because the source may
/// have grown before another replay of it begins.
#[derive(Default)]
pub struct Recordings(Mutex<VecDeque<(SessionId, Arc<Recording>)>>);

/// The recording that a session replays, and the rules of the replay.
pub struct Source {
    pub rules: Replay,
    pub recording: Arc<Recording>,
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
        let kept =
            self.kept().iter().find(|(id, _)| *id == session.session_id).map(|(_, one)| Arc::clone(one));
        if let Some(recording) = kept {
            return Ok(Some(Source { rules, recording }));
        }
        let recording = Arc::new(store.recording(rules.source_session_id.as_str()).await?);
        let mut kept = self.kept();
        kept.push_back((session.session_id.clone(), Arc::clone(&recording)));
        if kept.len() > KEPT {
            kept.pop_front();
        }
        Ok(Some(Source { rules, recording }))
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, VecDeque<(SessionId, Arc<Recording>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
