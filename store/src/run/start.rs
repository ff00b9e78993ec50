//! Starts a run: gives it the conversation's message numbers, takes its waiting messages, and makes its job.

use super::{Conversation, Locked, Wakes, append_events};
use crate::encryption::seal_in;
use crate::json::to_json;
use crate::{Error, Result, create};
use sqlx::PgConnection;
use wakeful_workflow::inbox::{self, Position, Question};
use wakeful_workflow::session::{CallUpdate, InboxMessage};
use wakeful_workflow::trigger;

/// Starts a queued run: the run becomes `running`. Its session stays `queued` until a worker's first commit
/// (`Action::Begin`). The run holds the conversation from now on and continues its message numbers. Waiting
/// messages become records, an answered or expired question gets its result, and the session gets a step job.
pub(crate) async fn start(
    tx: &mut PgConnection,
    conversation: &Conversation,
    session: &Locked,
    run_id: &str,
    trace_context: Option<&str>,
) -> Result<()> {
    if trigger::copies_notice_texts(&session.trigger_type, session.had_run) {
        create::notice::copy_notice_texts(&mut *tx, session).await?;
    }
    let question = sqlx::query!(
        "select call_id, name, outcome from tool_calls
        where session_id = $1 and status = 'waiting' and result_message_number is null
        order by message_number
        limit 1",
        session.session_id
    )
    .fetch_optional(&mut *tx)
    .await?;
    let inbox = sqlx::query!(
        // A message that arrived after a cancel request belongs to the next run.
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

    let seal = seal_in(&mut *tx, &session.session_id).await?;
    let question = match question {
        Some(call) => {
            let outcome = call.outcome.map(|outcome| seal.open_value(outcome)).transpose()?;
            let closed_with = outcome.map(serde_json::from_value).transpose();
            Some(Question {
                call_id: call.call_id.into(),
                name: call.name,
                closed_with: closed_with.map_err(|error| Error::corrupt("outcome", error))?,
            })
        }
        None => None,
    };
    let mut messages = Vec::new();
    for message in inbox {
        let attachments = match message.attachments {
            Some(attachments) => serde_json::from_value(seal.open_value(attachments)?)
                .map_err(|error| Error::corrupt("attachments", error))?,
            None => Vec::new(),
        };
        let text = seal.open(message.content)?;
        messages.push(InboxMessage { inbox_id: message.inbox_id, text, attachments });
    }
    let position = Position {
        run_id: run_id.into(),
        step_number: session.last_step_number + 1,
        last_message_number: conversation.last_message_number,
    };
    let taken = inbox::take(&position, question, &messages);

    for call in &taken.call_updates {
        close_call(tx, session, call).await?;
    }
    let (mut numbers, mut roles, mut contents, mut details) = (vec![], vec![], vec![], vec![]);
    for record in &taken.records {
        numbers.push(record.message_number);
        roles.push(record.role.as_str());
        contents.push(seal.json(to_json(&record.content)?)?);
        details.push(seal.json(to_json(&record.details)?)?);
    }
    sqlx::query!(
        "insert into conversation_records
            (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content, details)
        select $9, $1, r.message_number, $2, $3, $4, r.role, r.content::json, r.details::json
        from unnest($5::bigint[], $6::text[], $7::text[], $8::text[]) as r (message_number, role, content, details)",
        session.conversation_id,
        session.session_id,
        run_id,
        session.last_step_number + 1,
        &numbers,
        &roles as &[&str],
        &contents,
        &details,
        session.space_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update session_inbox set status = 'drained' where session_id = $1 and inbox_id = any ($2)",
        session.session_id,
        &taken.drained
    )
    .execute(&mut *tx)
    .await?;
    // Without an entry this still increments `wake_seq`: a run that starts is news to a worker that holds the session.
    append_events(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &taken.events).await?;
    // Only the session's first run sets where its numbers begin. `to_message_number` is the end of the last committed
    // step, so the first step begins after the conversation's newest message.
    sqlx::query!(
        "update conversation_sessions
        set base_message_number = case when $2 then base_message_number else $3 end,
            to_message_number = case when $2 then to_message_number else $3 end,
            last_message_number = $4
        where session_id = $1",
        session.session_id,
        session.had_run,
        conversation.last_message_number,
        numbers.last().copied().unwrap_or(conversation.last_message_number)
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update session_runs
        set status = 'running',
            from_step = case when started_at is null then $3 else from_step end,
            started_at = coalesce(started_at, clock_timestamp()),
            prompt_message_number = coalesce(prompt_message_number, $2)
        where run_id = $1",
        run_id,
        numbers.first().copied(),
        session.last_step_number + 1
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
    // A worker may still hold the job of the previous run: it found nothing to do and is about to delete the
    // job. Clear its lease. Otherwise it deletes this run's job.
    sqlx::query!(
        "insert into jobs (kind, runner, space_id, conversation_id, session_id, step_number, trace_context)
        select 'step', s.runner, $1, $2, s.session_id, $4, $5
        from conversation_sessions s
        where s.session_id = $3
        on conflict (session_id) where kind = 'step'
            do update set runner = excluded.runner, step_number = excluded.step_number, trace_context = excluded.trace_context,
                run_at = clock_timestamp(), lease = null, worker_id = null, stuck = 0, died = 0, attempt = 0,
                last_error = null, outage_since = null, outage_faults = 0, waits_for = null, waits_since = null,
                gate_pass = null, fault_since = null, faults = 0, held_by = null, held_since = null,
                pause_passes = null",
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

/// Closes the ledger row of the question, whose result is now in the transcript.
async fn close_call(tx: &mut PgConnection, session: &Locked, call: &CallUpdate) -> Result<()> {
    sqlx::query!(
        "update tool_calls
        set status = $4, result_message_number = $3, settled_at = clock_timestamp()
        where session_id = $1 and call_id = $2",
        session.session_id,
        call.call_id.as_str(),
        call.message_number,
        call.status.as_str()
    )
    .execute(tx)
    .await?;
    Ok(())
}
