//! The recordings that this process has read: a source is read once, and not at every step of its replay.

use crate::Ctx;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::Replay;
use wakeful_workflow::replay::Recording;
use wakeful_workflow::session::Session;

/// So many are kept. A further one is read again when it is asked for.
const KEPT: usize = 16;

/// Those that were read, the newest last.
#[derive(Default)]
pub struct Recordings(Mutex<VecDeque<(SessionId, Arc<Recording>)>>);

/// What a session replays, and how.
pub struct Source {
    pub rules: Replay,
    pub recording: Arc<Recording>,
}

impl Recordings {
    /// The source of `session`; `None` for a session that replays nothing.
    ///
    /// # Errors
    /// [`wakeful_store::Error`], among them that the source is not there.
    pub async fn of(&self, ctx: &Ctx, session: &Session) -> wakeful_store::Result<Option<Source>> {
        let Some(rules) = session.policy.replay.clone() else {
            return Ok(None);
        };
        let recording = self.read(ctx, &rules.source_session_id).await?;
        Ok(Some(Source { rules, recording }))
    }

    /// The recording of a session, as it was when this process first asked for it.
    ///
    /// # Errors
    /// Those of [`wakeful_store::Store::recording`].
    pub async fn read(&self, ctx: &Ctx, source: &SessionId) -> wakeful_store::Result<Arc<Recording>> {
        let kept = self.kept().iter().find(|(id, _)| id == source).map(|(_, one)| Arc::clone(one));
        if let Some(recording) = kept {
            return Ok(recording);
        }
        let read = Arc::new(ctx.store.recording(source.as_str()).await?);
        let mut kept = self.kept();
        kept.push_back((source.clone(), Arc::clone(&read)));
        if kept.len() > KEPT {
            kept.pop_front();
        }
        Ok(read)
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, VecDeque<(SessionId, Arc<Recording>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
