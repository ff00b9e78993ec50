//! The plan: checks everything that a session still owes, in a fixed order, and returns the first as the next
//! action.
//!
//! The newest journal entry alone is not enough, because two things can be open at once. Suppose the model
//! asked for the calls A and B, and A has its result. The newest entry says that A is done, but B must still
//! run.

use crate::agent::{Agent, Limits, ToolDefinition};
use crate::context::compaction;
use crate::effect::Effect;
use crate::fault::Fault;
use crate::record::ToolCall;
use crate::session::{CallOutcome, CallStatus, OpenTurn, Session, SessionStatus};

/// What the worker must perform next.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Set the session from `queued` to `running`, in a commit of its own. It completes no step. A run also
    /// passes through it after a pause.
    Begin,
    /// Ask the model for its next reply.
    CallModel,
    /// Ask the model for a summary first, because its context is nearly full.
    Compact,
    /// Get the results of the tool calls that the open turn still lacks.
    CallTools { calls: Vec<PlannedCall> },
    /// Close the run.
    Stop(Stop),
    /// Pause the run until the user answers, or an operator approves. Meanwhile other runs may use the conversation.
    Pause,
    /// Do nothing. The session needs no job.
    Rest,
}

/// One tool call of the open turn.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedCall {
    pub call: ToolCall,
    pub how: How,
}

/// What the worker may do about a call, given what the ledger proves.
#[derive(Clone, Debug, PartialEq)]
pub enum How {
    /// Run it: it never ran, or running it again has no further effect.
    Run,
    /// Reuse the outcome that the ledger has.
    Reuse(CallStatus, CallOutcome),
    /// Record the call as uncertain: a worker stopped after it started the call, so the call may have taken
    /// effect. `known`: the journal already has an entry for that.
    Uncertain { known: bool },
    /// The user answered the question that this call asks.
    Answer { inbox_id: i64, text: String },
    /// Close it without running it, because its run is over or the call was never recorded.
    Abandon,
}

/// Why a run is closed without a last reply of the model.
#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    Cancelled,
    Failed(Fault),
    /// The session had a job but nothing to do. This happens after a heal, or after someone edited the rows.
    Finished,
}

/// Returns the next action: the first thing that `session` still owes.
pub fn plan(session: &Session, limits: &Limits) -> Action {
    let Some(run) = session.run.as_ref().filter(|_| session.status.is_open()) else {
        return Action::Rest;
    };
    if session.cancel_requested {
        return Action::Stop(Stop::Cancelled);
    }
    if session.status == SessionStatus::Queued {
        return Action::Begin;
    }
    if let Some(turn) = session.open_turn() {
        let calls: Vec<PlannedCall> = turn
            .without_result
            .iter()
            .filter_map(|call| Some(PlannedCall { call: (*call).clone(), how: how(session, &turn, call)? }))
            .collect();
        return if calls.is_empty() { Action::Pause } else { Action::CallTools { calls } };
    }
    if !session.awaits_model() && session.inbox.is_empty() {
        return Action::Stop(Stop::Finished);
    }
    if run.steps >= limits.steps {
        return Action::Stop(Stop::Failed(Fault::StepLimit { limit: limits.steps }));
    }
    if run.tokens >= limits.tokens {
        return Action::Stop(Stop::Failed(Fault::TokenLimit { limit: limits.tokens }));
    }
    Action::CallModel
}

/// Adjusts `action` to the agent's context strategy: replaces a model call by a summary call if a summary is
/// due. `tools` are those of the agent's configuration, and `window_tokens` is the model's window.
pub fn in_context(
    action: Action,
    session: &Session,
    agent: &Agent,
    tools: &[ToolDefinition],
    window_tokens: i64,
) -> Action {
    match action {
        Action::CallModel if compaction::is_due(session, tools, &agent.context, window_tokens) => {
            Action::Compact
        }
        Action::Begin
        | Action::CallModel
        | Action::Compact
        | Action::CallTools { .. }
        | Action::Stop(_)
        | Action::Pause
        | Action::Rest => action,
    }
}

/// Returns what the worker may do about `call`, or `None` while it waits for the user's answer or a person's approval.
fn how(session: &Session, turn: &OpenTurn<'_>, call: &ToolCall) -> Option<How> {
    // One commit writes the message that asks for a call and the call's ledger row. So without a row the call
    // never ran.
    let Some(row) = session.call(&call.call_id) else {
        return Some(How::Abandon);
    };
    let of_this_run = session.run.as_ref().is_some_and(|run| run.run_id == turn.record.run_id);
    Some(match (row.status, &row.outcome) {
        (CallStatus::Done | CallStatus::Failed | CallStatus::Uncertain, Some(outcome)) => {
            How::Reuse(row.status, outcome.clone())
        }
        (CallStatus::Uncertain, None) => How::Uncertain { known: true },
        (CallStatus::Waiting, _) => match session.inbox.first() {
            Some(answer) => How::Answer { inbox_id: answer.inbox_id, text: answer.text.clone() },
            None => return None,
        },
        (CallStatus::Unapproved, _) if of_this_run => return None,
        (CallStatus::Abandoned | CallStatus::Unapproved, _) => How::Abandon,
        (CallStatus::Invoked, _) if of_this_run => How::Run,
        (CallStatus::Invoked, _) => How::Abandon,
        // Wakeful never settles a call without an outcome. Someone edited the row, so do not run the call.
        (CallStatus::Done | CallStatus::Failed, None) => How::Uncertain { known: false },
        (CallStatus::Started, _) => {
            // A call of an earlier run is not run again, but it may have taken effect.
            if row.effect == Effect::Guarded || !of_this_run {
                How::Uncertain { known: false }
            } else {
                How::Run
            }
        }
    })
}

#[cfg(test)]
mod tests;
