//! The healer: repairs a session's rows so that a worker continues with its open work.
//!
//! A commit moves a session, its run and its job together, so Wakeful's own writes never need a heal. Other
//! writes may: an operator's `update`, a row inserted by hand, a restored table. The healer trusts the run's
//! row. It corrects the session's status, the conversation's pointers and the jobs to match.
//!
//! A heal of a correct session writes nothing.
#![doc = include_str!("README.md")]

mod conversation;
mod healed;
mod search;

pub use healed::Healed;
pub use search::{Cursor, Page};

use crate::delivery::deliver_jobs;
use crate::gate;
use crate::pool::Transaction;
use crate::run::{self, Conversation, Locked, Wakes, append_events};
use crate::steer::steered;
use crate::{Result, Store};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::session::SessionStatus;

impl Store {
    /// Makes the session continue with its open work, and returns what was wrong. Writes nothing if nothing
    /// was wrong. A session that waits for its provider looks at the gate again.
    ///
    /// Safe to run at any time, also twice at once: it takes the locks in the common order, makes no second
    /// job, and touches no lease. It does not touch a session that a worker has claimed.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Corrupt`] for an unknown status, [`crate::Error::Database`].
    pub async fn wake_session(&self, session_id: &str) -> Result<Vec<Healed>> {
        let (tx, healed) = self.woken(session_id).await?;
        if healed.is_empty() {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
        }
        Ok(healed)
    }

    /// A heal in a transaction that the caller commits.
    pub(crate) async fn woken(&self, session_id: &str) -> Result<(Transaction, Vec<Healed>)> {
        let mut tx = self.pool.in_line(session_id).begin().await?;
        let mut healed = Vec::new();
        let (found, session) = conversation::lock(&mut tx, session_id, &mut healed).await?;
        let conversation = conversation::correct(&mut tx, found, &mut healed).await?;
        owe(&mut tx, &conversation, session, &mut healed).await?;
        conversation::give(&mut tx, &conversation.conversation_id, &mut healed).await?;
        make_deliver_jobs(&mut tx, &conversation.conversation_id, &mut healed).await?;
        forget_generations(&mut tx, session_id, &mut healed).await?;
        healed
            .extend(gate::look_now(&mut tx, session_id).await?.map(|gate_id| Healed::LooksAgain { gate_id }));
        if !healed.is_empty()
            && let Some(entry) = steered("wake", None)
        {
            append_events(&mut tx, session_id, None, None, Wakes::Nothing, &[entry]).await?;
        }
        Ok((tx, healed))
    }
}

/// The columns of a run that a heal needs.
struct Known {
    run_id: String,
    status: String,
}

/// State of the session as its other rows show it.
struct Found {
    /// The session's running or queued run.
    open: Option<Known>,
    newest: Option<Known>,
    /// Pending messages that no run will read.
    unread: i64,
    /// The run id that the first of these messages carries. `None` if that run exists.
    promised: Option<String>,
    has_job: bool,
}

async fn find(tx: &mut PgConnection, session_id: &str) -> Result<Found> {
    let open = sqlx::query_as!(
        Known,
        "select run_id, status from session_runs
        where session_id = $1 and status in ('running', 'queued')
        order by status desc, created_at
        limit 1",
        session_id
    )
    .fetch_optional(&mut *tx)
    .await?;
    let newest = sqlx::query_as!(
        Known,
        "select run_id, status from session_runs where session_id = $1 order by created_at desc limit 1",
        session_id
    )
    .fetch_optional(&mut *tx)
    .await?;
    // Messages of a run that was cancelled before it began wait for the next message, so they need no heal.
    let row = sqlx::query!(
        r#"
        with unread as (
            select i.inbox_id, i.run_id from session_inbox i
            where i.session_id = $1 and i.status = 'pending'
                and not exists (
                    select from session_runs r
                    where r.run_id = i.run_id and r.status = 'cancelled'
                )
        )
        select
            (select count(*) from unread) as "unread!",
            (
                select run_id from unread
                where not exists (select from session_runs r where r.run_id = unread.run_id)
                order by inbox_id
                limit 1
            ) as promised,
            exists (select from jobs where kind = 'step' and session_id = $1) as "has_job!"
        "#,
        session_id
    )
    .fetch_one(&mut *tx)
    .await?;
    Ok(Found { open, newest, unread: row.unread, promised: row.promised, has_job: row.has_job })
}

/// Corrects status, run and job of the session so that they match.
async fn owe(
    tx: &mut PgConnection,
    conversation: &Conversation,
    session: Locked,
    healed: &mut Vec<Healed>,
) -> Result<()> {
    let found = find(tx, &session.session_id).await?;
    let put_away = matches!(session.status, SessionStatus::Archived | SessionStatus::Terminated);
    if let Some(open) = &found.open {
        if put_away {
            // The worker that has the job finds nothing to do and ends the job. The next heal ends the run.
            if !found.has_job {
                conversation::end_runs(tx, &session, healed).await?;
            }
            return Ok(());
        }
        if !session.status.is_open() {
            correct_status(tx, &session, &open.run_id, healed).await?;
        }
        if open.status == "running" && !found.has_job {
            make_job(tx, &session, healed).await?;
        }
        return Ok(());
    }
    // A worker has the session. If it finds nothing to do, it ends the job, and the next heal repairs the
    // rest.
    if found.has_job {
        return Ok(());
    }
    let (run_id, reopened) = match (session.status, found.newest) {
        (SessionStatus::Queued | SessionStatus::Running, Some(newest)) => {
            let over = matches!(newest.status.as_str(), "completed" | "failed" | "cancelled");
            if over && found.unread > 0 {
                (found.promised.unwrap_or_else(run::new_run_id), false)
            } else {
                (newest.run_id, true)
            }
        }
        (SessionStatus::Queued | SessionStatus::Running, None) => {
            (found.promised.unwrap_or_else(run::new_run_id), false)
        }
        (SessionStatus::WaitingInput, Some(newest))
            if found.unread > 0 && newest.status == SessionStatus::WaitingInput.as_str() =>
        {
            (newest.run_id, true)
        }
        (
            SessionStatus::Created
            | SessionStatus::Completed
            | SessionStatus::Failed
            | SessionStatus::Cancelled
            | SessionStatus::WaitingInput,
            _,
        ) if found.unread > 0 => (found.promised.unwrap_or_else(run::new_run_id), false),
        // A person has to decide or has decided, or no message waits.
        (
            SessionStatus::Created
            | SessionStatus::WaitingInput
            | SessionStatus::NeedsAttention
            | SessionStatus::Completed
            | SessionStatus::Failed
            | SessionStatus::Cancelled
            | SessionStatus::Archived
            | SessionStatus::Terminated,
            _,
        ) => return Ok(()),
    };
    if !reopened {
        // The cancel request was for an earlier run.
        run::clear_cancel(tx, &session.session_id).await?;
    }
    let session = if session.status == SessionStatus::Running {
        correct_status(tx, &session, &run_id, healed).await?
    } else {
        session
    };
    run::open(tx, conversation, &session, &run_id, None, Some("healed")).await?;
    healed.push(match reopened {
        true => Healed::RunReopened { run_id },
        false => Healed::RunOpened { run_id },
    });
    Ok(())
}

/// Sets the session's status to `queued`, because its open run may not have begun. The next plan begins the
/// run.
async fn correct_status(
    tx: &mut PgConnection,
    session: &Locked,
    run_id: &str,
    healed: &mut Vec<Healed>,
) -> Result<Locked> {
    let (was, is) = (session.status.as_str().to_owned(), SessionStatus::Queued.as_str().to_owned());
    let event = Event::StateTransition {
        from_state: was.clone(),
        to_state: is.clone(),
        reason: Some("healed".to_owned()),
    };
    append_events(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &[event]).await?;
    sqlx::query!(
        "update conversation_sessions
        set status = 'queued', error = null, completed_at = null
        where session_id = $1",
        session.session_id
    )
    .execute(tx)
    .await?;
    healed.push(Healed::StatusCorrected { was, is });
    Ok(Locked { status: SessionStatus::Queued, ..session.clone() })
}

async fn make_job(tx: &mut PgConnection, session: &Locked, healed: &mut Vec<Healed>) -> Result<()> {
    let step_number = session.last_step_number + 1;
    let made = sqlx::query!(
        "insert into jobs (kind, runner, space_id, conversation_id, session_id, step_number)
        select 'step', case when s.cancel_requested then '' else s.runner end, $1, $2, s.session_id, $4
        from conversation_sessions s
        where s.session_id = $3
        on conflict (session_id) where kind = 'step' do nothing",
        session.space_id,
        session.conversation_id,
        session.session_id,
        step_number
    )
    .execute(tx)
    .await?;
    if made.rows_affected() == 1 {
        healed.push(Healed::JobMade { step_number });
    }
    Ok(())
}

async fn make_deliver_jobs(
    tx: &mut PgConnection,
    conversation_id: &str,
    healed: &mut Vec<Healed>,
) -> Result<()> {
    macro_rules! statement {
        ($deliver_jobs:tt) => {
            sqlx::query_scalar!(
                "with to_deliver as (
                    select d.space_id, d.conversation_id, d.channel, null::text as trace_context
                    from deliveries d
                    where d.conversation_id = $1
                        and d.status in ('queued', 'sending')
                        and not exists (
                            select from jobs
                            where jobs.kind = 'deliver'
                                and jobs.conversation_id = d.conversation_id
                                and jobs.channel = d.channel
                        )
                )"
                    + $deliver_jobs
                    + " returning jobs.channel",
                conversation_id
            )
        };
    }
    let channels = deliver_jobs!(statement).fetch_all(tx).await?;
    healed.extend(channels.into_iter().flatten().map(|channel| Healed::DeliverJobMade { channel }));
    Ok(())
}

/// Deletes rows of model calls in flight that a session at rest still has. They are left over from a dead
/// worker.
async fn forget_generations(tx: &mut PgConnection, session_id: &str, healed: &mut Vec<Healed>) -> Result<()> {
    let forgotten = sqlx::query!(
        r#"
        with rests as (
            select session_id from conversation_sessions s
            where s.session_id = $1
                and s.status not in ('queued', 'running')
                and not exists (select from jobs where jobs.kind = 'step' and jobs.session_id = s.session_id)
        ), over as (
            delete from generations
            using rests
            where generations.session_id = rests.session_id
            returning 1
        ), forgotten as (
            delete from generation_chunks
            using rests
            where generation_chunks.session_id = rests.session_id
            returning 1
        )
        select (select count(*) from over) as "generations!", (select count(*) from forgotten) as "chunks!"
        "#,
        session_id
    )
    .fetch_one(tx)
    .await?;
    if forgotten.generations + forgotten.chunks > 0 {
        healed.push(Healed::GenerationsForgotten {
            generations: forgotten.generations.unsigned_abs(),
            chunks: forgotten.chunks.unsigned_abs(),
        });
    }
    Ok(())
}
