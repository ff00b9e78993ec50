//! Runs: opened, paused, resumed, closed, and handed on to the next session of the conversation.
//!
//! Every function here is part of its caller's transaction and wants the conversation's row locked, then the
//! session's. Only here does a session receive the conversation's message numbers or give them back.

use crate::step::to_json;
use crate::{Error, Result, create, new_id};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::record::{Block, Details, ToolResult};
use wakeful_workflow::session::{CallOutcome, SessionStatus};
use wakeful_workflow::trigger::HERALD_CHAT;

/// A locked row of `conversation_counters`.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    pub conversation_id: String,
    pub last_message_number: i64,
    pub open_run_id: Option<String>,
    pub queued_runs: i32,
}

/// A locked row of `conversation_sessions`: what waking it needs.
#[derive(Clone, Debug)]
pub(crate) struct Locked {
    pub session_id: String,
    pub conversation_id: String,
    pub space_id: String,
    pub trigger_type: String,
    pub trigger_id: String,
    pub status: SessionStatus,
    pub last_step_number: i64,
    /// Its open run was asked to end.
    pub cancel_requested: bool,
    /// It has had a run, or is a fork, so that its base is set.
    pub started: bool,
    /// The replay's process that alone runs it. Empty: the deployed workers do.
    pub runner: String,
}

/// Whether a woken run has the conversation, or waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    Running,
    Queued,
}

/// Locks a session that is known by its id alone, after its conversation.
pub(crate) async fn lock(tx: &mut PgConnection, session_id: &str) -> Result<Locked> {
    let conversation_id = sqlx::query_scalar!(
        "select conversation_id from conversation_sessions where session_id = $1",
        session_id
    )
    .fetch_optional(&mut *tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
    lock_conversation(tx, &conversation_id).await?;
    lock_session(tx, session_id).await
}

/// Locks the conversation: the first lock of every transaction that opens or closes a run.
pub(crate) async fn lock_conversation(tx: &mut PgConnection, conversation_id: &str) -> Result<Conversation> {
    sqlx::query_as!(
        Conversation,
        "select conversation_id, last_message_number, open_run_id, queued_runs
        from conversation_counters
        where conversation_id = $1
        for update",
        conversation_id
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "conversation", id: conversation_id.to_owned() })
}

/// Locks the session, after its conversation.
pub(crate) async fn lock_session(tx: &mut PgConnection, session_id: &str) -> Result<Locked> {
    let row = sqlx::query!(
        "select session_id, conversation_id, space_id, trigger_type, trigger_id, status, last_step_number,
            cancel_requested, runner,
            forked_at_message_number is not null
                or exists (select from session_runs where session_runs.session_id = conversation_sessions.session_id
                    and session_runs.started_at is not null) as started
        from conversation_sessions
        where session_id = $1
        for update",
        session_id
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
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
        started: row.started.unwrap_or(false),
        runner: row.runner,
    })
}

/// Whether an entry changes what a plan sees, so that the plan a step is working on no longer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wakes {
    Planner,
    Nobody,
}

/// Appends journal entries to a locked session.
pub(crate) async fn journal(
    tx: &mut PgConnection,
    session_id: &str,
    run_id: Option<&str>,
    dedupe_key: Option<&str>,
    wakes: Wakes,
    events: &[Event],
) -> Result<()> {
    let (types, payloads): (Vec<String>, Vec<String>) = events
        .iter()
        .map(|event| {
            let (kind, payload) = event.to_row();
            (kind, payload.to_string())
        })
        .unzip();
    sqlx::query!(
        "with s as (
            update conversation_sessions
            set last_event_seq = last_event_seq + $4,
                wake_seq = wake_seq + case when $7 then 1 else 0 end
            where session_id = $1
            returning session_id, last_event_seq
        )
        insert into session_events (session_id, seq, type, run_id, dedupe_key, payload)
        select s.session_id, s.last_event_seq - $4 + e.ordinal, e.type, $2,
            case when e.ordinal = 1 then $3::text end, e.payload::jsonb
        from s, unnest($5::text[], $6::text[]) with ordinality as e (type, payload, ordinal)",
        session_id,
        run_id,
        dedupe_key,
        types.len() as i64,
        &types,
        &payloads,
        wakes == Wakes::Planner
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Opens a run that is new, or that a person or an answer resumes; `reason` is why, for the journal. It starts at once
/// when no other run has the conversation; else it is queued and the run that closes starts it.
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
        r#"insert into session_runs (run_id, session_id, conversation_id, status, trace_context)
        values ($1, $2, $3, 'queued', $4)
        on conflict (run_id) do update set status = 'queued', error = null, completed_at = null,
            trace_context = coalesce(excluded.trace_context, session_runs.trace_context)
        returning (xmax = 0) as "inserted!""#,
        run_id,
        session.session_id,
        session.conversation_id,
        trace_context
    )
    .fetch_one(&mut *tx)
    .await?;
    let mut events = Vec::new();
    if new {
        events.push(Event::TriggerEvent {
            trigger_type: session.trigger_type.clone(),
            trigger_id: Some(session.trigger_id.clone()),
        });
    }
    if session.status != SessionStatus::Queued {
        events.push(Event::StateTransition {
            from_state: session.status.as_str().to_owned(),
            to_state: SessionStatus::Queued.as_str().to_owned(),
            reason: reason.map(str::to_owned),
        });
    }
    if !events.is_empty() {
        journal(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &events).await?;
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

/// Gives the conversation to a queued run: its message numbers, the messages that wait for it, and a job.
pub(crate) async fn start(
    tx: &mut PgConnection,
    conversation: &Conversation,
    session: &Locked,
    run_id: &str,
    trace_context: Option<&str>,
) -> Result<()> {
    if !session.started && session.trigger_type == HERALD_CHAT {
        create::take_over(&mut *tx, session).await?;
    }
    let waiting = sqlx::query!(
        "select call_id, name, outcome from tool_calls
        where session_id = $1 and status = 'waiting' and result_message_number is null
        order by message_number
        limit 1",
        session.session_id
    )
    .fetch_optional(&mut *tx)
    .await?;
    let inbox = sqlx::query!(
        // What came after this run was asked to end was promised another one.
        "select inbox_id, content, attachments from session_inbox
        where session_id = $1
            and status = 'pending'
            and (
                outcome <> 'new_run'
                or not (select cancel_requested from conversation_sessions where session_id = $1)
            )
        order by inbox_id",
        session.session_id
    )
    .fetch_all(&mut *tx)
    .await?;

    let mut waiting = waiting;
    let (mut numbers, mut roles, mut contents, mut details, mut events) =
        (vec![], vec![], vec![], vec![], vec![]);
    let mut number = conversation.last_message_number;
    if let Some(expired) = waiting.take_if(|call| call.outcome.is_some()) {
        // What came after the question was closed is no answer to it.
        let outcome = expired.outcome.unwrap_or_default();
        let outcome: CallOutcome =
            serde_json::from_value(outcome).map_err(|error| Error::corrupt("outcome", error))?;
        number += 1;
        close_call(tx, session, &expired.call_id, "failed", number).await?;
        events.push(Event::ToolResult {
            call_id: expired.call_id.as_str().into(),
            ok: !outcome.is_error,
            message_number: number,
            bytes: outcome.content.len(),
            output_sha256: None,
        });
        roles.push("tool");
        numbers.push(number);
        contents.push(to_json(&[Block::ToolResult(ToolResult {
            call_id: expired.call_id.into(),
            name: expired.name,
            content: outcome.content,
            is_error: outcome.is_error,
            details: outcome.details,
            output: None,
        })])?);
        details.push(to_json(&Details::default())?);
    }
    for message in &inbox {
        number += 1;
        let block = match waiting.take() {
            Some(call) => {
                close_call(tx, session, &call.call_id, "done", number).await?;
                events.push(Event::ToolResult {
                    call_id: call.call_id.as_str().into(),
                    ok: true,
                    message_number: number,
                    bytes: message.content.len(),
                    output_sha256: None,
                });
                roles.push("tool");
                Block::ToolResult(ToolResult {
                    call_id: call.call_id.into(),
                    name: call.name,
                    content: message.content.clone(),
                    is_error: false,
                    details: None,
                    output: None,
                })
            }
            None => {
                roles.push("user");
                Block::Text { text: message.content.clone() }
            }
        };
        numbers.push(number);
        contents.push(to_json(&[block])?);
        let attachments = match &message.attachments {
            Some(attachments) => serde_json::from_value(attachments.clone())
                .map_err(|error| Error::corrupt("attachments", error))?,
            None => Vec::new(),
        };
        let known = Details { inbox_id: Some(message.inbox_id), attachments, ..Details::default() };
        details.push(to_json(&known)?);
    }
    sqlx::query!(
        "insert into conversation_records
            (conversation_id, message_number, session_id, run_id, step_number, role, content, details)
        select $1, r.message_number, $2, $3, $4, r.role, r.content::json, r.details::json
        from unnest($5::bigint[], $6::text[], $7::text[], $8::text[]) as r (message_number, role, content, details)",
        session.conversation_id,
        session.session_id,
        run_id,
        session.last_step_number + 1,
        &numbers,
        &roles as &[&str],
        &contents,
        &details
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update session_inbox set status = 'drained' where session_id = $1 and inbox_id = any ($2)",
        session.session_id,
        &inbox.iter().map(|message| message.inbox_id).collect::<Vec<_>>()
    )
    .execute(&mut *tx)
    .await?;
    journal(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &events).await?;
    sqlx::query!(
        "update conversation_sessions
        set base_message_number = case when $2 then base_message_number else $3 end,
            to_message_number = case when $2 then to_message_number else $3 end,
            last_message_number = $4
        where session_id = $1",
        session.session_id,
        session.started,
        conversation.last_message_number,
        number
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update session_runs
        set status = 'running',
            started_at = coalesce(started_at, clock_timestamp()),
            prompt_message_number = coalesce(prompt_message_number, $2)
        where run_id = $1",
        run_id,
        numbers.first().copied()
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update conversation_counters set open_run_id = $2 where conversation_id = $1",
        conversation.conversation_id,
        run_id
    )
    .execute(&mut *tx)
    .await?;
    // A job that is there already belongs to a holder who found that nothing was owed and is about to end it. Its lease
    // goes, or it would end this run's job.
    sqlx::query!(
        "insert into jobs (kind, runner, space_id, conversation_id, session_id, step_number, trace_context)
        select 'step', s.runner, $1, $2, s.session_id, $4, $5
        from conversation_sessions s
        where s.session_id = $3
        on conflict (session_id) where kind = 'step'
            do update set runner = excluded.runner, step_number = excluded.step_number, trace_context = excluded.trace_context,
                run_at = clock_timestamp(), lease = null, worker_id = null, stuck = 0, died = 0, attempt = 0,
                last_error = null",
        session.space_id,
        session.conversation_id,
        session.session_id,
        session.last_step_number + 1,
        trace_context
    )
    .execute(&mut *tx)
    .await?;
    Ok(())
}

/// The question has its result in the transcript.
async fn close_call(
    tx: &mut PgConnection,
    session: &Locked,
    call_id: &str,
    status: &str,
    message_number: i64,
) -> Result<()> {
    sqlx::query!(
        "update tool_calls
        set status = $4, result_message_number = $3, settled_at = clock_timestamp()
        where session_id = $1 and call_id = $2",
        session.session_id,
        call_id,
        message_number,
        status
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// How a run ends or pauses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending<'a> {
    pub session_id: &'a str,
    pub run_id: &'a str,
    pub status: SessionStatus,
    pub error: Option<&'a str>,
    /// What the conversation gets back.
    pub last_message_number: i64,
}

/// Closes or pauses a run whose session's row has just been written in this transaction, and opens the conversation's
/// next queued one.
pub(crate) async fn close(
    tx: &mut PgConnection,
    conversation: Conversation,
    ending: Ending<'_>,
    next: Option<Queued>,
) -> Result<()> {
    let pauses = matches!(ending.status, SessionStatus::WaitingInput | SessionStatus::NeedsAttention);
    sqlx::query!(
        "update session_runs
        set status = $2,
            error = $3,
            completed_at = case when $4 then null else clock_timestamp() end
        where run_id = $1",
        ending.run_id,
        ending.status.as_str(),
        ending.error,
        pauses
    )
    .execute(&mut *tx)
    .await?;
    if pauses {
        sqlx::query!(
            "update conversation_sessions set completed_at = null where session_id = $1",
            ending.session_id
        )
        .execute(&mut *tx)
        .await?;
    }
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
    if let Some(next) = next {
        sqlx::query!(
            "update conversation_counters set queued_runs = queued_runs - 1 where conversation_id = $1",
            conversation.conversation_id
        )
        .execute(&mut *tx)
        .await?;
        start(tx, &conversation, &next.session, &next.run_id, next.trace_context.as_deref()).await?;
    }
    open_waiting(tx, &conversation.conversation_id, ending.session_id).await
}

/// Opens the run of the messages that came after their session's run was asked to end.
async fn open_waiting(tx: &mut PgConnection, conversation_id: &str, session_id: &str) -> Result<()> {
    let Some(run_id) = next_run(tx, session_id).await? else {
        return Ok(());
    };
    let conversation = lock_conversation(tx, conversation_id).await?;
    let session = lock_session(tx, session_id).await?;
    let _: Opened = open(tx, &conversation, &session, &run_id, None, None).await?;
    Ok(())
}

/// The run that waiting messages were promised, which does not exist yet.
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

/// A queued run whose turn it is, with its session locked.
#[derive(Debug)]
pub(crate) struct Queued {
    pub run_id: String,
    pub trace_context: Option<String>,
    pub session: Locked,
}

/// Locks the session of the conversation's oldest queued run, if there is one. Other sessions are locked under the
/// conversation's lock only, so the order among them does not matter.
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

/// The session's newest run.
pub(crate) async fn newest(tx: &mut PgConnection, session_id: &str) -> Result<Option<String>> {
    Ok(sqlx::query_scalar!(
        "select run_id from session_runs where session_id = $1 order by created_at desc limit 1",
        session_id
    )
    .fetch_optional(tx)
    .await?)
}

/// A fresh run id.
pub(crate) fn new_run_id() -> String {
    new_id("run")
}
