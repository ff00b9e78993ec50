//! Opens, pauses, resumes and closes runs. The close of a run starts the conversation's next queued run.
//!
//! Every function here runs in its caller's transaction. The caller has locked the conversation's row, then
//! the session's.
//!
//! When a run starts, its session takes over the conversation's counter of message numbers. The close gives it back. Four
//! places open or close runs, and so move the counter:
//!
//! | place | does | how |
//! |---|---|---|
//! | this module, with `run/start.rs` | opens, starts, pauses and closes any run | a transaction with locks |
//! | `wake/at_once/write.rs` | opens and starts the run of a message | the message's one statement |
//! | `step/end.rs` | closes or pauses a run | the step commit's one statement |
//! | `heal/conversation.rs` | ends runs of an archived or terminated session, corrects the counter | a transaction with locks |
//!
//! A run that is still queued has no numbers: `steer.rs` cancels one without moving the counter. Imports write rows of runs that
//! another system or database has opened.

mod start;

pub(crate) use start::start;

use crate::encryption::{Seal, has_words, seal_in};
use crate::{Error, Result, new_id};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::session::SessionStatus;

/// Whether an opened run holds the conversation or waits for it. A conversation has one running run at a
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    Running,
    Queued,
}

/// Whether a journal entry changes what [`plan`](wakeful_workflow::plan) sees. If it does, `wake_seq` is
/// incremented, and a worker that performs a step plans again when it commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wakes {
    Planner,
    Nothing,
}

/// Appends journal entries to a locked session.
pub(crate) async fn append_events(
    tx: &mut PgConnection,
    session_id: &str,
    run_id: Option<&str>,
    dedupe_key: Option<&str>,
    wakes: Wakes,
    events: &[Event],
) -> Result<()> {
    // Entries without words are written although the key cannot be had.
    let words = has_words(events);
    let seal = if words { seal_in(&mut *tx, session_id).await? } else { Seal::default() };
    let (types, payloads): (Vec<String>, Vec<String>) = events.iter().map(|event| seal.entry(event)).unzip();
    // A process without [encryption] writes no words into an encrypted session.
    let in_clear = words && !seal.is_on();
    let written = sqlx::query!(
        "with s as (
            update conversation_sessions
            set last_event_seq = last_event_seq + $4,
                wake_seq = wake_seq + case when $7 then 1 else 0 end
            where session_id = $1 and (data_key is null or not $8)
            returning space_id, session_id, last_event_seq
        )
        insert into session_events (space_id, session_id, seq, type, run_id, dedupe_key, payload)
        select s.space_id, s.session_id, s.last_event_seq - $4 + e.ordinal, e.type, $2,
            case when e.ordinal = 1 then $3::text end, e.payload::jsonb
        from s, unnest($5::text[], $6::text[]) with ordinality as e (type, payload, ordinal)",
        session_id,
        run_id,
        dedupe_key,
        types.len() as i64,
        &types,
        &payloads,
        wakes == Wakes::Planner,
        in_clear
    )
    .execute(tx)
    .await?;
    if in_clear && written.rows_affected() == 0 {
        let reason = "the conversation is encrypted, and this process has no [encryption]".to_owned();
        return Err(Error::Keys { reason });
    }
    Ok(())
}

/// Opens a new run, or resumes a paused or failed one. `reason` goes into the journal. The run starts at once
/// if no other run holds the conversation. Otherwise it is queued, and the close of the other run starts it.
pub(crate) async fn open(
    tx: &mut PgConnection,
    conversation: &Conversation,
    session: &Locked,
    run_id: &str,
    trace_context: Option<&str>,
    reason: Option<&str>,
) -> Result<Opened> {
    if session.status != SessionStatus::Queued && !session.status.may_become(SessionStatus::Queued) {
        return Err(Error::Conflict {
            session_id: session.session_id.clone(),
            status: session.status,
            wanted: "a run",
        });
    }
    let free = conversation.open_run_id.is_none();
    let new = sqlx::query_scalar!(
        r#"insert into session_runs (run_id, session_id, conversation_id, status, trace_context, space_id, created_at)
        -- The newest run is the one with the latest time, also after the clock went back.
        values ($1, $2, $3, 'queued', $4, $5, greatest(
            clock_timestamp(),
            (select max(created_at) + interval '1 microsecond' from session_runs where session_id = $2)))
        on conflict (run_id) do update set status = 'queued', error = null, completed_at = null,
            trace_context = coalesce(excluded.trace_context, session_runs.trace_context)
        returning (xmax = 0) as "inserted!""#,
        run_id,
        session.session_id,
        session.conversation_id,
        trace_context,
        session.space_id
    )
    .fetch_one(&mut *tx)
    .await?;
    let mut events = opening_events(&session.trigger_type, &session.trigger_id, session.status, reason);
    if !new {
        // The run was opened before, and goes on. The search finds only new runs by itself.
        events.remove(0);
        crate::search::enter(tx, &session.session_id, &session.space_id).await?;
    }
    if !events.is_empty() {
        append_events(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &events).await?;
    }
    if session.status != SessionStatus::Queued {
        sqlx::query!(
            "update conversation_sessions
            set status = 'queued', error = null, completed_at = null
            where session_id = $1",
            session.session_id
        )
        .execute(&mut *tx)
        .await?;
    }
    if free {
        start(tx, conversation, session, run_id, trace_context).await?;
        return Ok(Opened::Running);
    }
    sqlx::query!(
        "update conversation_counters set queued_runs = queued_runs + 1 where conversation_id = $1",
        conversation.conversation_id
    )
    .execute(&mut *tx)
    .await?;
    Ok(Opened::Queued)
}

/// The journal's entries of a new run: what triggered it, and that the session is queued unless it was before.
pub(crate) fn opening_events(
    trigger_type: &str,
    trigger_id: &str,
    was: SessionStatus,
    reason: Option<&str>,
) -> Vec<Event> {
    let mut events = vec![Event::TriggerEvent {
        trigger_type: trigger_type.to_owned(),
        trigger_id: Some(trigger_id.to_owned()),
    }];
    if was != SessionStatus::Queued {
        events.push(Event::StateTransition {
            from_state: was.as_str().to_owned(),
            to_state: SessionStatus::Queued.as_str().to_owned(),
            reason: reason.map(str::to_owned),
        });
    }
    events
}

/// How a run ends or pauses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunEnd<'a> {
    pub session_id: &'a str,
    pub run_id: &'a str,
    pub status: SessionStatus,
    pub error: Option<&'a str>,
    /// The session's newest message number. The conversation's next run continues from it.
    pub last_message_number: i64,
}

/// Closes or pauses a run, and starts `next`, the conversation's oldest queued run. The caller has already
/// written the session's row in this transaction. Returns whether another run has started, with a job.
pub(crate) async fn close(
    tx: &mut PgConnection,
    conversation: Conversation,
    ending: RunEnd<'_>,
    next: Option<Queued>,
) -> Result<bool> {
    sqlx::query!(
        "update session_runs as run
        set status = $2,
            error = $3,
            completed_at = case when $4 then null else clock_timestamp() end,
            (steps, input_tokens, output_tokens, tool_calls) =
                (select * from run_totals(run.session_id, run.run_id, run.from_step))
        where run_id = $1",
        ending.run_id,
        ending.status.as_str(),
        ending.error,
        ending.status.is_paused()
    )
    .execute(&mut *tx)
    .await?;
    let last_message_number = ending.last_message_number;
    sqlx::query!(
        "update conversation_counters
        set open_run_id = null, last_message_number = $2
        where conversation_id = $1",
        conversation.conversation_id,
        last_message_number
    )
    .execute(&mut *tx)
    .await?;
    let conversation = Conversation { open_run_id: None, last_message_number, ..conversation };
    let started = next.is_some();
    if let Some(next) = next {
        sqlx::query!(
            "update conversation_counters set queued_runs = queued_runs - 1 where conversation_id = $1",
            conversation.conversation_id
        )
        .execute(&mut *tx)
        .await?;
        start(tx, &conversation, &next.session, &next.run_id, next.trace_context.as_deref()).await?;
    }
    let opened = open_waiting(tx, &conversation.conversation_id, ending.session_id).await?;
    Ok(started || opened == Some(Opened::Running))
}

/// Opens the next run of a session whose cancelled run has just closed, if messages arrived after the cancel
/// request.
async fn open_waiting(
    tx: &mut PgConnection,
    conversation_id: &str,
    session_id: &str,
) -> Result<Option<Opened>> {
    let Some(run_id) = next_run(tx, session_id).await? else {
        return Ok(None);
    };
    let conversation = lock_conversation(tx, conversation_id).await?;
    let session = lock_session(tx, session_id).await?;
    Ok(Some(open(tx, &conversation, &session, &run_id, None, None).await?))
}

/// Returns the id of the session's next run, which waiting messages already carry. The run itself does not
/// exist yet.
pub(crate) async fn next_run(tx: &mut PgConnection, session_id: &str) -> Result<Option<String>> {
    Ok(sqlx::query_scalar!(
        "select run_id from session_inbox
        where session_id = $1 and status = 'pending' and outcome = 'new_run'
        order by inbox_id
        limit 1",
        session_id
    )
    .fetch_optional(tx)
    .await?)
}

/// Returns the id of the session's newest run.
pub(crate) async fn newest(tx: &mut PgConnection, session_id: &str) -> Result<Option<String>> {
    Ok(sqlx::query_scalar!(
        "select run_id from session_runs where session_id = $1 order by created_at desc limit 1",
        session_id
    )
    .fetch_optional(tx)
    .await?)
}

/// Makes a new run id.
pub(crate) fn new_run_id() -> String {
    new_id("run")
}

/// Removes a request to cancel, if there is one.
pub(crate) async fn clear_cancel(tx: &mut PgConnection, session_id: &str) -> Result<()> {
    sqlx::query!(
        "update conversation_sessions
        set cancel_requested = false, cancel_reason = null
        where session_id = $1 and (cancel_requested or cancel_reason is not null)",
        session_id
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// A locked row of `conversation_counters`.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    pub conversation_id: String,
    pub last_message_number: i64,
    pub open_run_id: Option<String>,
    pub queued_runs: i32,
    /// The user that it belongs to.
    pub user_id: Option<String>,
}

/// A locked row of `conversation_sessions`, with the columns that a wake needs.
#[derive(Clone, Debug)]
pub(crate) struct Locked {
    pub session_id: String,
    pub conversation_id: String,
    pub space_id: String,
    pub trigger_type: String,
    pub trigger_id: String,
    pub status: SessionStatus,
    pub last_step_number: i64,
    /// Someone asked to cancel the open run.
    pub cancel_requested: bool,
    /// A run of the session has started before, or the session is a fork. Then `base_message_number` is set.
    pub had_run: bool,
    /// The replay process that runs this session. Empty: the deployed workers run it.
    pub runner: String,
    /// It was imported from a bundle without texts.
    pub redacted: bool,
    /// The key that seals its texts.
    pub data_key: Option<String>,
}

/// Locks a session's conversation, then the session.
pub(crate) async fn lock(tx: &mut PgConnection, session_id: &str) -> Result<Locked> {
    let conversation_id = conversation_of(tx, session_id).await?;
    lock_conversation(tx, &conversation_id).await?;
    lock_session(tx, session_id).await
}

/// Returns the conversation of a session, which must be locked before the session. It never changes, so
/// reading it needs no lock.
pub(crate) async fn conversation_of(tx: &mut PgConnection, session_id: &str) -> Result<String> {
    sqlx::query_scalar!("select conversation_id from conversation_sessions where session_id = $1", session_id)
        .fetch_optional(tx)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })
}

/// Locks the conversation. Every transaction that opens or closes a run takes this lock first.
pub(crate) async fn lock_conversation(tx: &mut PgConnection, conversation_id: &str) -> Result<Conversation> {
    sqlx::query_as!(
        Conversation,
        "select conversation_id, last_message_number, open_run_id, queued_runs, user_id
        from conversation_counters
        where conversation_id = $1
        for update",
        conversation_id
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "conversation", id: conversation_id.to_owned() })
}

/// Locks the session. The caller has locked its conversation.
pub(crate) async fn lock_session(tx: &mut PgConnection, session_id: &str) -> Result<Locked> {
    let row = sqlx::query!(
        r#"select session_id, conversation_id, space_id, trigger_type, trigger_id, status, last_step_number,
            cancel_requested, runner, data_key, coalesce(imported_from ->> 'redacted' = 'true', false) as "redacted!",
            forked_at_message_number is not null
                or exists (select from session_runs where session_runs.session_id = conversation_sessions.session_id
                    and session_runs.started_at is not null) as had_run
        from conversation_sessions
        where session_id = $1
        for update"#,
        session_id
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
    crate::failpoint!("K46");
    Ok(Locked {
        session_id: row.session_id,
        conversation_id: row.conversation_id,
        space_id: row.space_id,
        trigger_type: row.trigger_type,
        trigger_id: row.trigger_id,
        status: SessionStatus::parse(&row.status)
            .ok_or_else(|| Error::corrupt("session status", &row.status))?,
        last_step_number: row.last_step_number,
        cancel_requested: row.cancel_requested,
        had_run: row.had_run.unwrap_or(false),
        runner: row.runner,
        redacted: row.redacted,
        data_key: row.data_key,
    })
}

/// The conversation's oldest queued run, with its session locked.
#[derive(Debug)]
pub(crate) struct Queued {
    pub run_id: String,
    pub trace_context: Option<String>,
    pub session: Locked,
}

/// Returns the conversation's oldest queued run, if any, and locks its session. The caller holds the
/// conversation's lock. A transaction that locks two sessions of a conversation always holds that lock, so
/// the order of the two does not matter.
pub(crate) async fn lock_next(tx: &mut PgConnection, conversation: &Conversation) -> Result<Option<Queued>> {
    if conversation.queued_runs == 0 {
        return Ok(None);
    }
    let Some(next) = sqlx::query!(
        "select run_id, session_id, trace_context from session_runs
        where conversation_id = $1 and status = 'queued'
        order by created_at
        limit 1",
        conversation.conversation_id
    )
    .fetch_optional(&mut *tx)
    .await?
    else {
        return Ok(None);
    };
    let session = lock_session(tx, &next.session_id).await?;
    Ok(Some(Queued { run_id: next.run_id, trace_context: next.trace_context, session }))
}
