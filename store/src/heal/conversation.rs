//! Heals the conversation's row: its open run, its count of queued runs, and the next message number.

use super::Healed;
use crate::run::{self, Conversation, Locked};
use crate::{Error, Result};
use sqlx::PgConnection;

/// Locks conversation and session, and inserts the conversation's row if it is missing.
pub(super) async fn lock(
    tx: &mut PgConnection,
    session_id: &str,
    healed: &mut Vec<Healed>,
) -> Result<(Conversation, Locked)> {
    let row = sqlx::query!(
        "select conversation_id, space_id, mailbox_id, seed_message_count, data_key from conversation_sessions
        where session_id = $1",
        session_id
    )
    .fetch_optional(&mut *tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
    let conversation = match run::lock_conversation(tx, &row.conversation_id).await {
        Err(Error::NotFound { .. }) => {
            sqlx::query!(
                "insert into conversation_counters
                    (conversation_id, space_id, mailbox_id, last_message_number, data_key)
                values ($1, $2, $3, $4, $5)
                on conflict (conversation_id) do nothing",
                row.conversation_id,
                row.space_id,
                row.mailbox_id,
                i64::from(row.seed_message_count),
                row.data_key
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

/// Corrects the conversation's row to match its runs and its messages.
pub(super) async fn correct(
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
    // While a run is open, its session allocates message numbers. The close writes the counter back.
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

/// Starts the oldest queued run of a conversation that has no open run.
pub(super) async fn give(
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

/// Ends the open and the queued runs of an archived or terminated session, and frees the conversation.
pub(super) async fn end_runs(
    tx: &mut PgConnection,
    session: &Locked,
    healed: &mut Vec<Healed>,
) -> Result<()> {
    let ended = sqlx::query_scalar!(
        "update session_runs as run
        set status = 'failed', error = $2, completed_at = clock_timestamp(),
            (steps, input_tokens, output_tokens, tool_calls) =
                (select * from run_totals(run.session_id, run.run_id, run.from_step))
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
