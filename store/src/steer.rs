//! What operators do to a run: retry it, or cancel it.

use crate::audit::act;
use crate::encryption::seal_in;
use crate::gate;
use crate::pool::Transaction;
use crate::queue;
use crate::run::{self, Locked, Wakes};
use crate::wake::{By, conflict};
use crate::{Result, Store};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::session::SessionStatus;

impl Store {
    /// Continues a failed run, or one that needs attention, from its last commit. `reason` goes into the
    /// journal. Returns the run's id.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Conflict`] in any other status, [`crate::Error::Refused`] for a replay's session,
    /// [`crate::Error::Database`].
    pub async fn retry(&self, session_id: &str, reason: Option<&str>) -> Result<String> {
        self.try_retry(session_id, reason, By::Anyone).await
    }

    pub(crate) async fn try_retry(&self, session_id: &str, reason: Option<&str>, by: By) -> Result<String> {
        let (tx, run_id) = self.retried(session_id, reason, by).await?;
        tx.commit().await?;
        Ok(run_id)
    }

    /// A retry in a transaction that the caller commits.
    pub(crate) async fn retried(
        &self,
        session_id: &str,
        reason: Option<&str>,
        by: By,
    ) -> Result<(Transaction, String)> {
        let mut tx = self.pool.in_line(session_id).begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        let run_id = retry_in(&mut tx, session, reason, by).await?;
        Ok((tx, run_id))
    }

    /// Returns those of `sessions` whose open run someone asked to cancel.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn cancelled_among(&self, sessions: &[String]) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select session_id from conversation_sessions where session_id = any($1) and cancel_requested",
            sessions
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Cancels the open run and returns its id. The worker that holds the job closes the run soon. A queued
    /// run that never began is closed at once. The journal gets `reason` with the end of the run.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Conflict`] when no run is open, [`crate::Error::Database`].
    pub async fn cancel(&self, session_id: &str, reason: Option<&str>) -> Result<String> {
        let (tx, run_id) = self.cancelled(session_id, reason).await?;
        tx.commit().await?;
        Ok(run_id)
    }

    /// A cancel in a transaction that the caller commits.
    pub(crate) async fn cancelled(
        &self,
        session_id: &str,
        reason: Option<&str>,
    ) -> Result<(Transaction, String)> {
        let mut tx = self.pool.in_line(session_id).begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        let open = matches!(
            session.status,
            SessionStatus::Queued
                | SessionStatus::Running
                | SessionStatus::WaitingInput
                | SessionStatus::NeedsAttention
        );
        let run_id = match run::newest(&mut tx, session_id).await? {
            Some(run_id) if open => run_id,
            Some(_) | None => return Err(conflict(session, "cancel")),
        };
        let sealed = match reason {
            Some(reason) => Some(seal_in(&mut tx, session_id).await?.text(reason).into_owned()),
            None => None,
        };
        sqlx::query!(
            "update conversation_sessions
            set cancel_requested = true, cancel_reason = coalesce($2, cancel_reason), wake_seq = wake_seq + 1
            where session_id = $1",
            session_id,
            sealed
        )
        .execute(&mut *tx)
        .await?;
        note(&mut tx, session_id, &run_id, "cancel", reason).await?;
        // Sent with the commit. Cancels are rare, so few commits wait for each other because of this.
        sqlx::query!("select pg_notify($1, $2)", queue::SESSIONS, format!("{}{session_id}", queue::CANCEL))
            .fetch_one(&mut *tx)
            .await?;
        match session.status {
            // Resume the run. Its step job gives each open call a result for the model, and closes the run.
            SessionStatus::WaitingInput | SessionStatus::NeedsAttention => {
                let conversation = run::lock_conversation(&mut tx, &session.conversation_id).await?;
                run::open(&mut tx, &conversation, &session, &run_id, None, reason).await?;
            }
            SessionStatus::Queued => {
                // A resumed run that is queued may have open calls. Its step job closes them once the run
                // holds the conversation.
                let unbegun = sqlx::query_scalar!(
                    r#"select status = 'queued' and started_at is null as "unbegun!" from session_runs where run_id = $1"#,
                    run_id
                )
                .fetch_one(&mut *tx)
                .await?;
                if unbegun {
                    close_unbegun(&mut tx, &session, &run_id, reason).await?;
                }
            }
            SessionStatus::Created
            | SessionStatus::Running
            | SessionStatus::Completed
            | SessionStatus::Failed
            | SessionStatus::Cancelled
            | SessionStatus::Archived
            | SessionStatus::Terminated => {}
        }
        gate::wait_no_longer(&mut tx, session_id).await?;
        if !session.runner.is_empty() {
            give_to_deployed_workers(&mut tx, session_id).await?;
        }
        Ok((tx, run_id))
    }
}

/// Retries a locked session's run. Returns the run's id.
pub(crate) async fn retry_in(
    tx: &mut PgConnection,
    session: Locked,
    reason: Option<&str>,
    by: By,
) -> Result<String> {
    by.may_wake(&session)?;
    let session_id = session.session_id.as_str();
    if !session.status.may_be_retried() {
        return Err(conflict(session, "retry"));
    }
    let Some(run_id) = run::newest(tx, session_id).await? else {
        return Err(conflict(session, "retry"));
    };
    let conversation = run::lock_conversation(tx, &session.conversation_id).await?;
    run::clear_cancel(tx, session_id).await?;
    run::open(tx, &conversation, &session, &run_id, None, reason).await?;
    note(tx, session_id, &run_id, "retry", reason).await?;
    Ok(run_id)
}

/// The journal's entry that names who steers a session. `None` outside of an act of the API or the command line.
pub(crate) fn steered(verb: &str, reason: Option<&str>) -> Option<Event> {
    act::because(reason);
    let by = act::actor()?;
    Some(Event::SessionSteered { verb: verb.to_owned(), by, reason: reason.map(str::to_owned) })
}

async fn note(
    tx: &mut PgConnection,
    session_id: &str,
    run_id: &str,
    verb: &str,
    reason: Option<&str>,
) -> Result<()> {
    match steered(verb, reason) {
        Some(entry) => run::append_events(tx, session_id, Some(run_id), None, Wakes::Nothing, &[entry]).await,
        None => Ok(()),
    }
}

/// Gives a cancelled replay's job to the deployed workers, because the replay's own process may have ended.
/// The workers only close the run, which calls no model and no tool. If someone runs the same replay command
/// later, it begins a new replay.
async fn give_to_deployed_workers(tx: &mut PgConnection, session_id: &str) -> Result<()> {
    sqlx::query!(
        "update conversation_sessions set replayed_at = coalesce(replayed_at, clock_timestamp())
        where session_id = $1",
        session_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!("update jobs set runner = '' where session_id = $1 and kind = 'step'", session_id)
        .execute(tx)
        .await?;
    Ok(())
}

/// Closes a queued run that never began. It waited behind another run of its conversation.
async fn close_unbegun(
    tx: &mut PgConnection,
    session: &Locked,
    run_id: &str,
    reason: Option<&str>,
) -> Result<()> {
    let event = Event::StateTransition {
        from_state: session.status.as_str().to_owned(),
        to_state: SessionStatus::Cancelled.as_str().to_owned(),
        reason: Some(reason.map_or_else(|| "cancelled".to_owned(), |reason| format!("cancelled: {reason}"))),
    };
    let events = [event, Event::invocation_result(SessionStatus::Cancelled, Some("cancelled"))];
    run::append_events(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &events).await?;
    sqlx::query!(
        "update conversation_sessions
        set status = 'cancelled', error = 'cancelled', completed_at = clock_timestamp(), cancel_requested = false,
            cancel_reason = null
        where session_id = $1",
        session.session_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update session_runs
        set status = 'cancelled', error = 'cancelled', completed_at = clock_timestamp()
        where run_id = $1",
        run_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update conversation_counters set queued_runs = queued_runs - 1 where conversation_id = $1",
        session.conversation_id
    )
    .execute(&mut *tx)
    .await?;
    Ok(())
}
