//! The recordings that this process has read: a source is read once a replay, and not at every step of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use wakeful_store::Store;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::Replay;
use wakeful_workflow::replay::Recording;
use wakeful_workflow::session::Session;

/// So many are kept. A further one is read again when it is asked for.
const KEPT: usize = 16;

/// By the session that replays, the newest last: another replay of the same source may begin further on in it.
#[derive(Default)]
pub struct Recordings(Mutex<VecDeque<(SessionId, Arc<Recording>)>>);

/// What a session replays, and how.
pub struct Source {
    pub rules: Replay,
    pub recording: Arc<Recording>,
}

impl Recordings {
    /// The source of `session`, as it was when this process first asked for it; `None` for a session that replays nothing.
    ///
    /// # Errors
    /// [`wakeful_store::Error`], among them that the source is not there.
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
