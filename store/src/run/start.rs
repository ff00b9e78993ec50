//! A run begins: it gets the message numbers of its conversation, the messages that wait for it, and a job.

use super::{Conversation, Locked, Wakes, journal};
use crate::step::to_json;
use crate::{Error, Result, create};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::record::{Block, Details, ToolResult};
use wakeful_workflow::session::CallOutcome;
use wakeful_workflow::trigger::HERALD_CHAT;

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
