//! The locks of a run, in their order: the conversation, then its sessions.

use crate::{Error, Result};
use sqlx::PgConnection;
use wakeful_workflow::session::SessionStatus;

/// A locked row of `conversation_counters`.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    pub conversation_id: String,
    pub last_message_number: i64,
    pub open_run_id: Option<String>,
    pub queued_runs: i32,
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
    /// The session has had a run or is a fork, so its `base_message_number` is set.
    pub started: bool,
    /// The replay process that runs this session. Empty: the deployed workers run it.
    pub runner: String,
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

/// Locks the session. The caller has locked its conversation.
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
