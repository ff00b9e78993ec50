//! The healer: makes a session go on with what it owes, whatever its rows look like.
//!
//! A commit moves a session, its run and its job together, so nothing here is ever needed by the protocol itself. It is
//! needed when somebody else wrote: an operator's `update`, a row made by hand, a table that was restored. The run's row
//! is the truth; the session's status, the conversation's pointers and the jobs are made to fit it.
//!
//! A session that is in order is left untouched, to the last bit: a heal that has nothing to do writes nothing.

mod search;

pub use search::{Cursor, Page};

use crate::run::{self, Conversation, Locked, Wakes, journal};
use crate::wake::clear_cancel;
use crate::{Error, Result, Store};
use serde::Serialize;
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::session::SessionStatus;

/// One thing that was wrong, and is right now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Healed {
    /// The session's conversation had no row.
    ConversationMade,
    /// The conversation would have given numbers to new messages that old ones have.
    NumbersCaughtUp {
        was: i64,
        is: i64,
    },
    QueuedRunsCounted {
        was: i32,
        is: i64,
    },
    /// The conversation pointed at a run that is not open, or not at the one that is.
    OpenRunCorrected {
        was: Option<String>,
        is: Option<String>,
    },
    /// The session's status said something else than its run.
    StatusCorrected {
        was: String,
        is: String,
    },
    /// The status spoke of a run that was over or paused: it goes on.
    RunReopened {
        run_id: String,
    },
    /// Nobody would have read the messages that wait, or done what the status says.
    RunOpened {
        run_id: String,
    },
    /// A run was open although its session is put away.
    RunEnded {
        run_id: String,
    },
    /// The run's turn had come and nobody had given it the conversation.
    ConversationGiven {
        session_id: String,
        run_id: String,
    },
    /// A run was open and no job would have worked on it.
    JobMade {
        step_number: i64,
    },
    /// Messages waited to be sent and no job would have sent them.
    DeliverJobMade {
        channel: String,
    },
    /// Model calls in flight of a session that is at rest.
    GenerationsForgotten {
        generations: u64,
        chunks: u64,
    },
}

impl std::fmt::Display for Healed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |run: &Option<String>| run.clone().unwrap_or_else(|| "none".to_owned());
        match self {
            Healed::ConversationMade => write!(f, "the conversation had no row"),
            Healed::NumbersCaughtUp { was, is } => {
                write!(f, "the conversation's last message number was {was} and is {is}")
            }
            Healed::QueuedRunsCounted { was, is } => {
                write!(f, "the conversation counted {was} queued runs and there are {is}")
            }
            Healed::OpenRunCorrected { was, is } => {
                write!(f, "the conversation's open run was {} and is {}", name(was), name(is))
            }
            Healed::StatusCorrected { was, is } => {
                write!(f, "the status was {was} and is {is}, as its run is")
            }
            Healed::RunReopened { run_id } => {
                write!(f, "the status spoke of an open run and there was none: {run_id} goes on")
            }
            Healed::RunOpened { run_id } => write!(f, "nobody would have gone on: {run_id} is opened"),
            Healed::RunEnded { run_id } => {
                write!(f, "{run_id} was open in a session that is put away: it is ended")
            }
            Healed::ConversationGiven { session_id, run_id } => {
                write!(f, "the conversation was free: {run_id} of {session_id} has it")
            }
            Healed::JobMade { step_number } => write!(f, "no job would have gone on with step {step_number}"),
            Healed::DeliverJobMade { channel } => {
                write!(f, "no job would have sent what waits for {channel}")
            }
            Healed::GenerationsForgotten { generations, chunks } => {
                write!(f, "{generations} model calls ({chunks} chunks) were left of a session at rest")
            }
        }
    }
}

impl Store {
    /// Makes the session go on with what it owes, and says what was wrong. Nothing wrong: nothing is written.
    ///
    /// Safe beside everything else, itself included: it takes the locks in their order, makes no second job, and
    /// touches no lease. A session that a worker has in hand is left to it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`] for a status that is none, [`Error::Database`].
    pub async fn wake_session(&self, session_id: &str) -> Result<Vec<Healed>> {
        let mut tx = self.pool.begin().await?;
        let mut healed = Vec::new();
        let (conversation, session) = lock(&mut tx, session_id, &mut healed).await?;
        let conversation = correct_conversation(&mut tx, conversation, &mut healed).await?;
        owe(&mut tx, &conversation, session, &mut healed).await?;
        give_conversation(&mut tx, &conversation.conversation_id, &mut healed).await?;
        make_deliver_jobs(&mut tx, &conversation.conversation_id, &mut healed).await?;
        forget_generations(&mut tx, session_id, &mut healed).await?;
        if healed.is_empty() {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
        }
        Ok(healed)
    }
}

async fn lock(
    tx: &mut PgConnection,
    session_id: &str,
    healed: &mut Vec<Healed>,
) -> Result<(Conversation, Locked)> {
    let row = sqlx::query!(
        "select conversation_id, space_id, mailbox_id, seed_message_count from conversation_sessions
        where session_id = $1",
        session_id
    )
    .fetch_optional(&mut *tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
    let conversation = match run::lock_conversation(tx, &row.conversation_id).await {
        Err(Error::NotFound { .. }) => {
            sqlx::query!(
                "insert into conversation_counters (conversation_id, space_id, mailbox_id, last_message_number)
                values ($1, $2, $3, $4)
                on conflict (conversation_id) do nothing",
                row.conversation_id,
                row.space_id,
                row.mailbox_id,
                i64::from(row.seed_message_count)
            )
            .execute(&mut *tx)
            .await?;
            healed.push(Healed::ConversationMade);
            run::lock_conversation(tx, &row.conversation_id).await?
        }
        locked => locked?,
    };
    Ok((conversation, run::lock_session(tx, session_id).await?))
}

/// Makes the conversation's row fit its runs and its messages.
async fn correct_conversation(
    tx: &mut PgConnection,
    conversation: Conversation,
    healed: &mut Vec<Healed>,
) -> Result<Conversation> {
    let found = sqlx::query!(
        r#"select
            (select count(*) from session_runs where conversation_id = $1 and status = 'queued') as "queued!",
            (select run_id from session_runs where conversation_id = $1 and status = 'running') as running,
            (select coalesce(max(message_number), 0) from conversation_records where conversation_id = $1) as "last!""#,
        conversation.conversation_id
    )
    .fetch_one(&mut *tx)
    .await?;
    let mut corrected = conversation.clone();
    if i64::from(conversation.queued_runs) != found.queued {
        healed.push(Healed::QueuedRunsCounted { was: conversation.queued_runs, is: found.queued });
        corrected.queued_runs = i32::try_from(found.queued).unwrap_or(i32::MAX);
    }
    if conversation.open_run_id != found.running {
        healed.push(Healed::OpenRunCorrected {
            was: conversation.open_run_id.clone(),
            is: found.running.clone(),
        });
        corrected.open_run_id = found.running;
    }
    // While a run is open its session counts, and gives the number back at the end.
    if corrected.open_run_id.is_none() && conversation.last_message_number < found.last {
        healed.push(Healed::NumbersCaughtUp { was: conversation.last_message_number, is: found.last });
        corrected.last_message_number = found.last;
    }
    if !healed.is_empty() {
        sqlx::query!(
            "update conversation_counters
            set queued_runs = $2, open_run_id = $3, last_message_number = $4
            where conversation_id = $1",
            corrected.conversation_id,
            corrected.queued_runs,
            corrected.open_run_id,
            corrected.last_message_number
        )
        .execute(&mut *tx)
        .await?;
    }
    Ok(corrected)
}

/// A run's row, as far as a heal looks.
struct Known {
    run_id: String,
    status: String,
}

/// What the session is found to be in the middle of.
struct Found {
    /// Its run that is running or queued.
    open: Option<Known>,
    newest: Option<Known>,
    /// Messages that nobody is going to read.
    unread: i64,
    /// The run that the first of them was promised and that does not exist.
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
    // What a run was cancelled with before it began waits for the next message: it is nobody's debt.
    let row = sqlx::query!(
        r#"
        with unread as (
            select i.inbox_id, i.run_id from session_inbox i
            where i.session_id = $1 and i.status = 'pending'
                and not exists (
                    select from session_runs r
                    where r.run_id = i.run_id and r.status = 'failed' and r.error = 'cancelled'
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

/// Makes status, run and job of the session fit one another.
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
            // Whoever has the job finds that nothing is owed and ends it; the run is ended after that.
            if !found.has_job {
                end_runs(tx, &session, healed).await?;
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
    // What a worker has in hand is not ours: when it finds nothing to do, the job ends, and the next heal goes on.
    if found.has_job {
        return Ok(());
    }
    let (run_id, reopened) = match (session.status, found.newest) {
        (SessionStatus::Queued | SessionStatus::Running, Some(newest)) => {
            let over = matches!(newest.status.as_str(), "completed" | "failed");
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
            | SessionStatus::WaitingInput,
            _,
        ) if found.unread > 0 => (found.promised.unwrap_or_else(run::new_run_id), false),
        // A person decides, or has decided; or nothing waits.
        (
            SessionStatus::Created
            | SessionStatus::WaitingInput
            | SessionStatus::NeedsAttention
            | SessionStatus::Completed
            | SessionStatus::Failed
            | SessionStatus::Archived
            | SessionStatus::Terminated,
            _,
        ) => return Ok(()),
    };
    if !reopened {
        // It was asked for of an earlier run.
        clear_cancel(tx, &session.session_id).await?;
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

/// The status of a session whose run is open and may not have begun: the plan begins it.
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
    journal(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &[event]).await?;
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
        "insert into jobs (kind, space_id, conversation_id, session_id, step_number)
        values ('step', $1, $2, $3, $4)
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

/// Ends the open and the queued runs of a session that is put away, and gives the conversation back.
async fn end_runs(tx: &mut PgConnection, session: &Locked, healed: &mut Vec<Healed>) -> Result<()> {
    let ended = sqlx::query_scalar!(
        "update session_runs
        set status = 'failed', error = $2, completed_at = clock_timestamp()
        where session_id = $1 and status in ('running', 'queued')
        returning run_id",
        session.session_id,
        session.status.as_str()
    )
    .fetch_all(&mut *tx)
    .await?;
    sqlx::query!(
        "update conversation_counters c
        set open_run_id = case when open_run_id = any ($2) then null else open_run_id end,
            queued_runs = (
                select count(*) from session_runs r
                where r.conversation_id = c.conversation_id and r.status = 'queued'
            ),
            last_message_number = greatest(last_message_number, (
                select max(message_number) from conversation_records r
                where r.conversation_id = c.conversation_id
            ))
        where conversation_id = $1",
        session.conversation_id,
        &ended
    )
    .execute(tx)
    .await?;
    healed.extend(ended.into_iter().map(|run_id| Healed::RunEnded { run_id }));
    Ok(())
}

/// Starts the oldest queued run of a conversation that nobody has.
async fn give_conversation(
    tx: &mut PgConnection,
    conversation_id: &str,
    healed: &mut Vec<Healed>,
) -> Result<()> {
    let conversation = run::lock_conversation(tx, conversation_id).await?;
    if conversation.open_run_id.is_some() {
        return Ok(());
    }
    let Some(next) = run::lock_next(tx, &conversation).await? else {
        return Ok(());
    };
    sqlx::query!(
        "update conversation_counters set queued_runs = queued_runs - 1 where conversation_id = $1",
        conversation_id
    )
    .execute(&mut *tx)
    .await?;
    run::start(tx, &conversation, &next.session, &next.run_id, next.trace_context.as_deref()).await?;
    healed.push(Healed::ConversationGiven { session_id: next.session.session_id, run_id: next.run_id });
    Ok(())
}

async fn make_deliver_jobs(
    tx: &mut PgConnection,
    conversation_id: &str,
    healed: &mut Vec<Healed>,
) -> Result<()> {
    let channels = sqlx::query_scalar!(
        "insert into jobs (kind, space_id, conversation_id, channel)
        select distinct 'deliver', d.space_id, d.conversation_id, d.channel
        from deliveries d
        where d.conversation_id = $1
            and d.status in ('queued', 'sending')
            and not exists (
                select from jobs
                where jobs.kind = 'deliver'
                    and jobs.conversation_id = d.conversation_id
                    and jobs.channel = d.channel
            )
        on conflict (conversation_id, channel) where kind = 'deliver' do nothing
        returning channel",
        conversation_id
    )
    .fetch_all(tx)
    .await?;
    healed.extend(channels.into_iter().flatten().map(|channel| Healed::DeliverJobMade { channel }));
    Ok(())
}

/// A session at rest has no model call in flight: what is left of one is nobody's.
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
