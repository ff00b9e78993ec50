//! A person's decision about a tool call.

use super::{Decision, Resolved, answer, event, first_answer, may_live, refused, to_store};
use crate::encryption::{Seal, Vault};
use crate::json::to_json;
use crate::run::{self, Locked, Wakes, append_events};
use crate::wake::{By, NewMessage, put_in_inbox};
use crate::{Error, Result};
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::PgConnection;
use wakeful_workflow::resolve::Resolution;
use wakeful_workflow::session::{CallStatus, SessionStatus};

/// Settles an uncertain call of a locked session, or says whether an unapproved one may run.
pub(super) async fn resolve(
    tx: &mut PgConnection,
    vault: &Vault,
    session: &Locked,
    call_id: &str,
    decision: &Decision,
) -> Result<Resolved> {
    let mut call = read_call(tx, session, call_id).await?;
    let resolution = &decision.resolution;
    let seal = vault.seal(session.data_key.as_deref()).await?;
    let taken = call.resolution.take().map(|taken| seal.open_value(taken)).transpose()?;
    let approves = resolution.decides() == CallStatus::Unapproved;
    // An approved call may become uncertain. That is another question.
    let taken = taken.filter(|taken| approves || taken["outcome"] != Resolution::Approved.as_str());
    if let Some(read) = &decision.args_sha256
        && *read != call.args_sha256
    {
        return Err(refused(
            session,
            format!("call {call_id} has other arguments than those that were read"),
        ));
    }
    if let Some(first) = first_answer(session, call_id, taken.as_ref(), resolution, &call.status)? {
        // What the model had been told when the effect was decided. Since then it may have got the outcome as the call's result.
        let was_told = taken.as_ref().and_then(|stored| stored["told"].as_bool());
        let was_told = was_told.unwrap_or(call.told);
        let told_run_id = if was_told && decision.tell {
            Some(tell(tx, vault, session, call_id, &call.name, decision).await?)
        } else {
            None
        };
        return Ok(first.told(was_told && call.status != "uncertain", told_run_id));
    }
    may_decide(session, call_id, &call, resolution)?;
    let answer = settle_call(tx, &seal, session, call_id, &call, decision).await?;
    let told_run_id = if call.told && decision.tell {
        Some(tell(tx, vault, session, call_id, &call.name, decision).await?)
    } else {
        None
    };
    let outdated = call.told && answer.status != CallStatus::Uncertain.as_str();
    Ok(answer.told(outdated, told_run_id))
}

/// The call of a decision, as its ledger row was.
struct CallRow {
    name: String,
    status: String,
    args_sha256: String,
    /// The model has a result of it.
    told: bool,
    /// The decision that was taken before.
    resolution: Option<Value>,
    /// Until then the process that began it may still carry it out.
    settled_by: Option<DateTime<Utc>>,
    /// That time is not over.
    alive: bool,
}

async fn read_call(tx: &mut PgConnection, session: &Locked, call_id: &str) -> Result<CallRow> {
    sqlx::query_as!(
        CallRow,
        r#"select name, status, args_sha256, result_message_number is not null as "told!", resolution, settled_by,
            coalesce(settled_by > clock_timestamp(), false) as "alive!"
        from tool_calls
        where session_id = $1 and call_id = $2"#,
        session.session_id,
        call_id
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "call", id: call_id.to_owned() })
}

/// Checks that the call waits for such a decision, and that it can be taken now.
///
/// # Errors
/// [`Error::Refused`].
fn may_decide(session: &Locked, call_id: &str, call: &CallRow, resolution: &Resolution) -> Result<()> {
    let wanted = resolution.decides();
    let approves = wanted == CallStatus::Unapproved;
    if call.status != wanted.as_str() {
        let wanted = wanted.as_str();
        return Err(refused(session, format!("call {call_id} is {}, not {wanted}", call.status)));
    }
    if approves {
        if session.cancel_requested {
            return Err(refused(session, format!("the run of call {call_id} is asked to end")));
        }
        if !(session.status.is_open() || session.status.is_paused()) {
            return Err(refused(session, format!("the run of call {call_id} is over")));
        }
        By::Anyone.may_wake(session)?;
        // The call has not begun, and the worker that has the run looks again before it pauses.
        return Ok(());
    }
    // A worker may be telling the model about the call at this moment.
    if !call.told && session.status.is_open() {
        let reason =
            format!("the run of call {call_id} goes on: resolve it when the run has paused or ended");
        return Err(refused(session, reason));
    }
    if call.alive && *resolution == Resolution::DidNotHappen {
        return Err(may_live(session, call_id, call.settled_by));
    }
    Ok(())
}

/// Writes the decision into the ledger and the journal. Opens the paused run if nothing else of its turn waits for a person.
async fn settle_call(
    tx: &mut PgConnection,
    seal: &Seal,
    session: &Locked,
    call_id: &str,
    call: &CallRow,
    decision: &Decision,
) -> Result<Resolved> {
    let resolution = &decision.resolution;
    let (status, outcome) = resolution.of_call(decision.by.as_deref(), decision.reason.as_deref());
    let outcome = outcome.map(|outcome| seal.json(to_json(&outcome)?)).transpose()?;
    sqlx::query!(
        "update tool_calls
        set status = $3,
            outcome = $4::text::json,
            settled_at = case when $4::text is not null then coalesce(settled_at, clock_timestamp()) end
        where session_id = $1 and call_id = $2",
        session.session_id,
        call_id,
        status.as_str(),
        outcome
    )
    .execute(&mut *tx)
    .await?;
    let run_id = match call.told || session.status != SessionStatus::NeedsAttention {
        true => None,
        false => resumed(tx, session).await?,
    };
    let wakes = if call.told { Wakes::Nothing } else { Wakes::Planner };
    let dedupe = format!("resolved/{call_id}/{}", resolution.as_str());
    append_events(
        tx,
        &session.session_id,
        run_id.as_deref(),
        Some(&dedupe),
        wakes,
        &[event(call_id, decision)],
    )
    .await?;
    let stored = seal.with_reasons(to_store(decision, run_id.as_deref(), call.told));
    sqlx::query!(
        "update tool_calls set resolution = $3 where session_id = $1 and call_id = $2",
        session.session_id,
        call_id,
        stored
    )
    .execute(&mut *tx)
    .await?;
    if let Some(run_id) = &run_id {
        go_on(tx, session, run_id, decision).await?;
    }
    Ok(answer(session, call_id, resolution, status.as_str(), run_id, false))
}

/// Opens the paused run again, for the reason of the decision.
async fn go_on(tx: &mut PgConnection, session: &Locked, run_id: &str, decision: &Decision) -> Result<()> {
    let conversation = run::lock_conversation(tx, &session.conversation_id).await?;
    let reason = decision.reason.as_deref().unwrap_or(match &decision.resolution {
        resolution @ (Resolution::Approved | Resolution::Declined) => resolution.as_str(),
        Resolution::Happened { .. } | Resolution::DidNotHappen | Resolution::LetModelDecide => "resolved",
    });
    let trace_context = decision.trace_context.as_deref();
    run::open(tx, &conversation, session, run_id, trace_context, Some(reason)).await?;
    Ok(())
}

/// Returns the paused run that may go on. `None`: another call of its turn is undecided.
async fn resumed(tx: &mut PgConnection, session: &Locked) -> Result<Option<String>> {
    let undecided = sqlx::query_scalar!(
        r#"select exists (
            select from tool_calls
            where session_id = $1
                and status in ('uncertain', 'unapproved')
                and result_message_number is null
                and outcome is null
        ) as "undecided!""#,
        session.session_id
    )
    .fetch_one(&mut *tx)
    .await?;
    if undecided { Ok(None) } else { run::newest(tx, &session.session_id).await }
}

/// Sends a new message, because the transcript keeps what the model was told at the time. Returns the run that reads it.
async fn tell(
    tx: &mut PgConnection,
    vault: &Vault,
    session: &Locked,
    call_id: &str,
    name: &str,
    decision: &Decision,
) -> Result<String> {
    let message = NewMessage {
        client_key: Some(format!("resolved/{call_id}/{}", decision.resolution.as_str())),
        text: decision.resolution.news_of_call(name, call_id),
        sender: None,
        trace_context: decision.trace_context.clone(),
        attachments: Vec::new(),
    };
    Ok(put_in_inbox(tx, vault, session.clone(), &message).await?.run_id)
}
