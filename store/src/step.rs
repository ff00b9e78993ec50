//! The step commit: everything that one decision writes, in one fenced statement.
//!
//! The statement writes messages, journal entries, ledger, state, totals, the step's cached result,
//! deliveries, the drained inbox and the job's row: all of them or none. It runs in autocommit, often together with
//! the commits of other sessions (`committer`). A commit that closes the run has more parts (`end`). If it finds
//! that something arrived, or that another run waits for the conversation, it writes nothing. Then a short transaction
//! locks the conversation first, and closes the run or lets it go on.

mod builder;
pub(crate) mod committer;
mod end;
mod rare;
mod rows;
mod statement;
#[cfg(test)]
mod statement_tests;

use crate::encryption::{SEALED, Seal};
use crate::error::missed_fence;
use crate::generation::NewGeneration;
use crate::queue::Lease;
use crate::{Error, Result, Store, failure, run};
use committer::Reported;
use rows::{Rare, Rows};
use statement::{Written, write};
use std::sync::Arc;
use wakeful_workflow::advance::{Next, Transition};
use wakeful_workflow::event::Event;
use wakeful_workflow::failure::{Failure, UNREADABLE};
use wakeful_workflow::session::{Session, SessionStatus};

/// Result of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Commit {
    /// The commit is durable and the run continues. `wake_seq` is the session row's value. If it differs from
    /// the caller's copy, the inbox or the ledger changed. `started_at` is the database's time of the intent,
    /// in the format of [`Store::begin_generation`]. `None`: no intent was written.
    Continued { wake_seq: i64, started_at: Option<String> },
    /// The commit is durable, the run is closed or paused, and the job is gone. `opened`: the close started
    /// the conversation's next run, which has a job of its own.
    Closed { opened: bool },
    /// Nothing was written: the session's row changed since the plan, but the lease is still held. Hydrate
    /// again.
    Moved,
    /// Nothing was written: another worker has the session.
    Stale,
}

/// What became of a run that is given up: see [`Store::give_up`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenUp {
    /// The run has ended, and the session has this status.
    Ended(SessionStatus),
    /// The session had no open run. Its job is gone.
    NoRun,
    /// The lease is lost, and nothing was written.
    Stale,
}

/// How a claim got to a commit, and what it does next.
#[derive(Clone, Copy, Debug)]
pub struct Performance<'a> {
    /// How long this claim has worked on the step, model call included.
    pub elapsed_s: f64,
    pub attempt: i32,
    /// The model call that follows, if the run continues. It is written under the same fence. A transition that
    /// closes the run ignores it, even if the run then continues because a message arrived.
    pub intent: Option<NewGeneration<'a>>,
}

impl From<Written> for Commit {
    fn from(written: Written) -> Commit {
        Commit::Continued { wake_seq: written.wake_seq, started_at: written.started_at }
    }
}

impl Store {
    /// Commits `transition`, which was planned on `session`, under `lease`.
    ///
    /// If a message arrived since, a closing transition keeps its reply but continues the run. Safe to repeat
    /// if the caller does not learn whether the commit succeeded: the second try finds that the session has
    /// moved and writes nothing.
    ///
    /// # Errors
    /// [`Error::Database`]: the caller does not know whether the transition was committed. After the others it was not:
    /// [`Error::Keys`], [`Error::Corrupt`], and [`Error::NotFound`] if a row that the close must lock is gone.
    pub async fn commit(
        &self,
        lease: &Lease,
        session: &Session,
        transition: &Transition,
        performance: Performance<'_>,
    ) -> Result<Commit> {
        let mut aligned = false;
        let seal = &self.seal_of(session.session_id.as_str()).await?;
        loop {
            let done = match &transition.next {
                Next::SameStep | Next::NextStep => {
                    self.continue_run(seal, lease, session, transition, performance).await
                }
                Next::Close(_) => self.close_run(seal, lease, session, transition, performance).await,
            };
            return match self.note_refusal(done) {
                // Find out whether the lease is lost or only the session moved.
                Err(Error::Database(error)) if missed_fence(&error) => {
                    if !self.holds(lease).await? {
                        Ok(Commit::Stale)
                    } else if !aligned && self.align_job(lease).await? {
                        aligned = true;
                        continue;
                    } else {
                        Ok(Commit::Moved)
                    }
                }
                other => other,
            };
        }
    }

    /// Resets the job's step number from the session's row. If someone edited the job's row by hand, its
    /// number never matches and each commit fails. The statement's checks on the session's row still prevent
    /// a double commit.
    async fn align_job(&self, lease: &Lease) -> Result<bool> {
        let aligned = sqlx::query!(
            "update jobs
            set step_number = s.last_step_number + 1
            from conversation_sessions s
            where jobs.job_id = $1
                and jobs.lease = $2
                and s.session_id = jobs.session_id
                and jobs.step_number <> s.last_step_number + 1",
            lease.job_id,
            lease.token
        )
        .execute(&self.pool)
        .await?;
        Ok(aligned.rows_affected() == 1)
    }

    async fn continue_run(
        &self,
        seal: &Seal,
        lease: &Lease,
        session: &Session,
        transition: &Transition,
        performance: Performance<'_>,
    ) -> Result<Commit> {
        let rows = Arc::new(Rows::new(seal, lease, session, transition, &performance)?);
        let rare = Rare::new(seal, transition);
        if rare.is_empty() {
            // The committer calls `write_all`, with this commit alone or with those that wait beside it.
            match self.committer.commit(Arc::clone(&rows)).await {
                Reported::Written(written) => return Ok(written.into()),
                Reported::Missed(error) => return Err(error.into()),
                Reported::Alone => {}
            }
        }
        let mut connection = self.pool.in_line(session.session_id.as_str()).acquire().await?;
        let written = write(connection.sends(), &rows, &rare).await;
        connection.answered(&written);
        self.metrics.alone(written.is_ok());
        Ok(written?.into())
    }

    async fn close_run(
        &self,
        seal: &Seal,
        lease: &Lease,
        session: &Session,
        transition: &Transition,
        performance: Performance<'_>,
    ) -> Result<Commit> {
        // After a cancelled run the session's next one may have to open, for messages that this copy does not show.
        if !session.cancel_requested
            && self.close_at_once(seal, lease, session, transition, &performance).await?
        {
            return Ok(Commit::Closed { opened: false });
        }
        self.close_locked(seal, lease, session, transition.clone(), performance).await
    }

    /// Closes the run with one statement. `false`: a condition missed and nothing was written.
    async fn close_at_once(
        &self,
        seal: &Seal,
        lease: &Lease,
        session: &Session,
        transition: &Transition,
        performance: &Performance<'_>,
    ) -> Result<bool> {
        let rows = Rows::new(seal, lease, session, transition, performance)?.unlocked(session.wake_seq);
        let rows = Arc::new(rows);
        let rare = Rare::new(seal, transition);
        if rare.is_empty() {
            match self.committer.commit(Arc::clone(&rows)).await {
                Reported::Written(_) => return Ok(true),
                Reported::Missed(_) => return Ok(false),
                Reported::Alone => {}
            }
        }
        let mut connection = self.pool.in_line(session.session_id.as_str()).acquire().await?;
        let written = write(connection.sends(), &rows, &rare).await;
        connection.answered(&written);
        self.metrics.alone(written.is_ok());
        match written {
            Ok(_) => Ok(true),
            Err(error) if missed_fence(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Closes the run in a transaction that locks the conversation and the session first. If the session was woken since
    /// the plan, the run goes on.
    async fn close_locked(
        &self,
        seal: &Seal,
        lease: &Lease,
        session: &Session,
        transition: Transition,
        performance: Performance<'_>,
    ) -> Result<Commit> {
        let mut tx = self.pool.in_line(session.session_id.as_str()).begin().await?;
        let conversation = run::lock_conversation(&mut tx, session.conversation_id.as_str()).await?;
        // Lock sessions before jobs: the statement below locks jobs, and the close starts the next session's run.
        let next = run::lock_next(&mut tx, &conversation).await?;
        // This locks the row, so no message can arrive between this read and the commit.
        let wake_seq = sqlx::query_scalar!(
            "select wake_seq from conversation_sessions where session_id = $1 for update",
            session.session_id.as_str()
        )
        .fetch_one(&mut *tx)
        .await?;
        crate::failpoint!("K46");
        let unseen = wake_seq != session.wake_seq;
        let transition = if unseen { transition.continuing() } else { transition };
        let performance = Performance { intent: None, ..performance };
        let rows = Rows::new(seal, lease, session, &transition, &performance)?;
        let written = write(&mut tx, &rows, &Rare::new(seal, &transition)).await?;
        let Next::Close(closing) = &transition.next else {
            tx.commit().await?;
            return Ok(written.into());
        };
        // Delete the job before the close, which may open the session's next run with a new job.
        sqlx::query!("delete from jobs where job_id = $1 and lease = $2", lease.job_id, lease.token)
            .execute(&mut *tx)
            .await?;
        let error = closing.error.as_deref().map(|error| seal.error(error));
        let ending = run::RunEnd {
            session_id: session.session_id.as_str(),
            run_id: transition.run_id.as_str(),
            status: closing.status,
            error: error.as_deref(),
            last_message_number: session.last_message_number + transition.records.len() as i64,
        };
        let opened = run::close(&mut tx, conversation, ending, next).await?;
        tx.commit().await?;
        Ok(Commit::Closed { opened })
    }

    /// Ends the open run of a session that cannot be hydrated or written, without hydrating it: its status becomes `status`
    /// (`failed` or `needs_attention`), or `cancelled` if somebody has asked for that. Otherwise its job would fail again and
    /// again and keep the conversation busy.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn give_up(
        &self,
        lease: &Lease,
        session_id: &str,
        status: SessionStatus,
        error: &str,
    ) -> Result<GivenUp> {
        // A session whose key cannot be had ends all the same. Its rows then have a fixed word in place of the error.
        let seal = self.seal_of_row(session_id).await?;
        let written = match &seal {
            Some(seal) => seal.error(error).into_owned(),
            None => SEALED.to_owned(),
        };
        let mut tx = self.pool.in_line(session_id).begin().await?;
        let conversation_id = run::conversation_of(&mut tx, session_id).await?;
        let conversation = run::lock_conversation(&mut tx, &conversation_id).await?;
        let next = run::lock_next(&mut tx, &conversation).await?;
        let failed = sqlx::query!(
            "update conversation_sessions
            set status = case when cancel_requested then $5 else $3 end,
                error = $2,
                completed_at = case when cancel_requested or not $4::boolean then clock_timestamp() end,
                cancel_requested = false, cancel_reason = null
            where session_id = $1 and status in ('queued', 'running')
            returning last_message_number, status = $5 as \"cancelled!\"",
            session_id,
            written,
            status.as_str(),
            status.is_paused(),
            SessionStatus::Cancelled.as_str()
        )
        .fetch_optional(&mut *tx)
        .await?;
        let ended =
            sqlx::query!("delete from jobs where job_id = $1 and lease = $2", lease.job_id, lease.token)
                .execute(&mut *tx)
                .await?;
        if ended.rows_affected() == 0 {
            // Dropping the transaction undoes the update.
            return Ok(GivenUp::Stale);
        }
        let Some(failed) = failed else {
            // The session has no open run: someone made the job by hand. Write no status.
            tx.commit().await?;
            return Ok(GivenUp::NoRun);
        };
        let status = if failed.cancelled { SessionStatus::Cancelled } else { status };
        // If someone edited the rows, the conversation's open run may belong to another session, or may be
        // missing.
        let run_id = sqlx::query_scalar!(
            "select run_id from session_runs where session_id = $1 and status = 'running'",
            session_id
        )
        .fetch_optional(&mut *tx)
        .await?
        .filter(|run_id| conversation.open_run_id.as_ref() == Some(run_id));
        let event = Event::StateTransition {
            from_state: SessionStatus::Running.as_str().to_owned(),
            to_state: status.as_str().to_owned(),
            reason: Some(if seal.is_some() { error.to_owned() } else { SEALED.to_owned() }),
        };
        let said = if seal.is_some() { error } else { SEALED };
        let events = [event, Event::invocation_result(status, Some(said))];
        run::append_events(&mut tx, session_id, run_id.as_deref(), None, run::Wakes::Planner, &events)
            .await?;
        if let Some(run_id) = &run_id {
            if !failed.cancelled {
                let failure = Failure::new(UNREADABLE, "", error);
                let seal = seal.as_ref();
                failure::add(&mut tx, session_id, run_id, &failure, error, seal.is_none_or(Seal::is_on))
                    .await?;
            }
            let ending = run::RunEnd {
                session_id,
                run_id,
                status,
                error: Some(&written),
                last_message_number: failed.last_message_number,
            };
            run::close(&mut tx, conversation, ending, next).await?;
        }
        tx.commit().await?;
        Ok(GivenUp::Ended(status))
    }

    /// Returns whether this worker still holds the lease.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn holds(&self, lease: &Lease) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (select from jobs where job_id = $1 and lease = $2) as "held!""#,
            lease.job_id,
            lease.token
        )
        .fetch_one(&self.pool)
        .await?)
    }
}
