//! What to do next: the first of a session's open obligations, in a fixed order.
//!
//! Looking at the newest journal entry alone would be wrong as soon as two things are open at once: with the calls
//! A and B asked for and A answered, the newest entry says "go on" while B is still owed. So every obligation is
//! looked at, in one order.

use crate::agent::{Agent, Limits, ToolDefinition};
use crate::context::compaction;
use crate::effect::Effect;
use crate::fault::Fault;
use crate::record::ToolCall;
use crate::session::{CallOutcome, CallStatus, OpenTurn, Session, SessionStatus};

/// What the worker is to perform.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// The run's first step is about to begin.
    Begin,
    /// Ask the model for its next answer.
    CallModel,
    /// Ask the model for a summary first: its context is nearly full.
    Compact,
    /// Get the results that the open turn still lacks.
    CallTools { calls: Vec<PlannedCall> },
    /// Close the run.
    Stop(Stop),
    /// Pause the run: it waits for the user's answer. The conversation is free for other runs meanwhile.
    Pause,
    /// Do nothing. The session needs no job.
    Rest,
}

/// One call of the open turn.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedCall {
    pub call: ToolCall,
    pub how: How,
}

/// What may be done about a call, given what the ledger proves.
#[derive(Clone, Debug, PartialEq)]
pub enum How {
    /// Run it: it never ran, or running it again has no further effect.
    Run,
    /// Reuse the outcome that the ledger has.
    Reuse(CallStatus, CallOutcome),
    /// Record a guarded call as uncertain: a worker stopped half-way, and the call may have taken effect. `known`: the
    /// journal says so already.
    Uncertain { known: bool },
    /// The user answered the question that this call asks.
    Answer { inbox_id: i64, text: String },
    /// Close it without running it: its run is over.
    Abandon,
}

/// Why a run is closed before its model was done.
#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    Cancelled,
    Failed(Fault),
    /// The session had a job and nothing to do: after a heal, or after somebody edited the rows.
    Finished,
}

/// Folds `session`'s obligations into the next action.
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
            .unanswered
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

/// The same with the agent's context strategy: a model call comes after the summary that is due before it. `tools` are
/// those of the agent's configuration, and its model sees `window_tokens`.
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

/// What may be done about `call`; `None` while it waits for its answer.
fn how(session: &Session, turn: &OpenTurn<'_>, call: &ToolCall) -> Option<How> {
    // The message that asks for a call and the call's ledger row are one commit. So without a row the call never ran.
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
        (CallStatus::Abandoned, _) => How::Abandon,
        (CallStatus::Invoked, _) if of_this_run => How::Run,
        (CallStatus::Invoked, _) => How::Abandon,
        // No code of ours settles a call without an outcome. Somebody edited the row, so do not run the call.
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
