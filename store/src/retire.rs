//! Archive and terminate: a person takes a session out of use. Its logs stay.

use crate::pool::Transaction;
use crate::run::{self, Wakes, append_events};
use crate::steer::steered;
use crate::wake::conflict;
use crate::{Result, Store};
use wakeful_workflow::event::Event;
use wakeful_workflow::session::SessionStatus;

impl Store {
    /// Archives a session: it takes no messages and never runs again. Its queued deliveries are still sent.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Conflict`] unless the session is at rest (created, completed, failed, cancelled),
    /// [`crate::Error::Database`].
    pub async fn archive(&self, session_id: &str, reason: Option<&str>) -> Result<()> {
        Ok(self.archived(session_id, reason).await?.commit().await?)
    }

    /// An archiving in a transaction that the caller commits.
    pub(crate) async fn archived(&self, session_id: &str, reason: Option<&str>) -> Result<Transaction> {
        self.retire(session_id, SessionStatus::Archived, "archive", reason).await
    }

    /// Ends a session for good, also an archived one.
    ///
    /// # Errors
    /// Those of [`Store::archive`], but an archived session is not a conflict.
    pub async fn terminate(&self, session_id: &str, reason: Option<&str>) -> Result<()> {
        let tx = self.retire(session_id, SessionStatus::Terminated, "terminate", reason).await?;
        Ok(tx.commit().await?)
    }

    async fn retire(
        &self,
        session_id: &str,
        status: SessionStatus,
        verb: &'static str,
        reason: Option<&str>,
    ) -> Result<Transaction> {
        let mut tx = self.pool.in_line(session_id).begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        if !session.status.may_become(status) {
            return Err(conflict(session, verb));
        }
        let reason = reason.map(str::to_owned);
        let mut events = vec![Event::StateTransition {
            from_state: session.status.as_str().to_owned(),
            to_state: status.as_str().to_owned(),
            reason: reason.clone(),
        }];
        if status == SessionStatus::Terminated {
            events.push(Event::SessionTerminated { reason: reason.clone() });
        }
        events.extend(steered(verb, reason.as_deref()));
        append_events(&mut tx, session_id, None, None, Wakes::Planner, &events).await?;
        sqlx::query!(
            "update conversation_sessions
            set status = $2, completed_at = coalesce(completed_at, clock_timestamp())
            where session_id = $1",
            session_id,
            status.as_str()
        )
        .execute(&mut *tx)
        .await?;
        Ok(tx)
    }
}
