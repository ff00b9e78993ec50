//! Drafts the end of a run that was cancelled or that failed.

use super::journal::After;
use super::{Draft, abandoned, error};
use crate::advance::{Next, Transition};
use crate::effect::Effect;
use crate::event::Event;
use crate::failure::Failure;
use crate::fault::{Fault, Verdict};
use crate::id::CallId;
use crate::record::{FinishReason, Record, Role, ToolCall, Usage, without_nul};
use crate::resolve::{CANCELLED, NO_END, outcome_unknown};
use crate::session::{Call, CallStatus, SessionStatus};

/// The error of a run whose model did not reply, not even when it was asked again.
const UNANSWERED: &str = "the model's answer was empty, also when it was asked again. Remedy: retry the session, and the model is asked \
                          once more; if the agent may end without a word, set its `on_empty_reply = \"accept\"`";

/// A run fails when the model has made only malformed calls in so many turns in a row. Such a model goes on so, until `limits.steps`.
pub(super) const MALFORMED_TURNS: usize = 5;

impl Draft<'_> {
    /// `cut_off`: what the model call has used that the cancel cut off. `cut`: the tool calls that it cut off.
    pub(in crate::advance) fn cancel(mut self, cut_off: Option<Usage>, cut: &[CallId]) -> Transition {
        let turn = self.session.open_turn();
        // A turn that waits for an answer was already counted as a step. Any other open turn must be counted
        // here.
        let uncounted =
            turn.as_ref().is_some_and(|turn| turn.record.step_number == self.transition.step_number);
        let mut executed =
            turn.as_ref().map_or(0, |turn| turn.record.tool_calls().count() - turn.without_result.len());
        let open: Vec<ToolCall> =
            turn.map(|turn| turn.without_result.into_iter().cloned().collect()).unwrap_or_default();
        for call in open {
            let row = self.session.call(&call.call_id).cloned();
            match row {
                Some(Call { status, outcome: None, .. }) if status.may_have_run() => {
                    let why = if status == CallStatus::Uncertain {
                        Some(NO_END)
                    } else {
                        // Only a living worker knows that the cancel ended the call.
                        let why = cut.contains(&call.call_id).then_some(CANCELLED);
                        self.journal_uncertain(&call, why.map(str::to_owned));
                        why
                    };
                    executed += 1;
                    self.record_result(&call, CallStatus::Uncertain, outcome_unknown(why));
                }
                Some(Call { status, outcome: Some(outcome), .. }) => {
                    executed += 1;
                    self.record_result(&call, status, outcome);
                }
                Some(Call { status: CallStatus::Waiting, .. }) => {
                    let text = "The question was asked; the run was stopped before an answer came.";
                    self.record_result(&call, CallStatus::Abandoned, error(text));
                }
                Some(_) | None => self.record_result(&call, CallStatus::Abandoned, abandoned()),
            }
        }
        self.journal_interrupted(&After::Nothing("cancelled"));
        self.journal_cut_off(cut_off);
        self.drain_inbox();
        self.transition.generation_over = true;
        let cut_off = cut_off.unwrap_or_default();
        if uncounted {
            let (usage, finish_reason) = self.turn_cost();
            self.complete_step(usage.plus(&cut_off), finish_reason, executed as i64);
        } else if cut_off != Usage::default() {
            // The provider bills it, so it is a step of its own, without a reply.
            self.complete_step(cut_off, FinishReason::Cancelled, 0);
        }
        let reason = match &self.session.cancel_reason {
            Some(reason) => format!("cancelled: {reason}"),
            None => "cancelled".to_owned(),
        };
        let moved = self.moved_to(SessionStatus::Cancelled, Some(without_nul(reason)));
        self.close_with(SessionStatus::Cancelled, Some("cancelled".to_owned()), moved)
    }

    pub(in crate::advance) fn fail(mut self, fault: &Fault) -> Transition {
        // No worker will repeat the calls that were interrupted. The journal ends them, so readers stop waiting.
        self.journal_interrupted(&After::Nothing(&without_nul(fault.to_string())));
        self.transition.generation_over = true;
        self.drain_inbox();
        self.surface_half_done();
        let model = self.session.interrupted.last().map(|call| call.model.as_str());
        self.end_failed(fault, model)
    }

    /// How many turns in a row, up to now, had calls that were all malformed. Turns before a summary may not be in memory; the limit of
    /// steps counts those.
    pub(super) fn malformed_turns(&self) -> usize {
        let is_malformed = |record: &&Record| {
            let mut calls = record.tool_calls().peekable();
            calls.peek().is_some() && calls.all(|call| call.malformed.is_some())
        };
        let said = self.session.records.iter().rev().filter(|record| record.role != Role::Tool);
        said.take_while(is_malformed).count()
    }

    /// Closes the run as failed. `model` is that of the call that failed.
    pub(super) fn end_failed(self, fault: &Fault, model: Option<&str>) -> Transition {
        let error = remedied(fault, fault.to_string());
        let mut failure = Failure::of(fault, model);
        failure.text = without_nul(failure.text);
        let mut transition = self.close(SessionStatus::Failed, Some(without_nul(error)));
        if let Next::Close(closing) = &mut transition.next {
            closing.failure = Some(Box::new(failure));
            closing.in_log = Some(without_nul(remedied(fault, fault.in_log())));
        }
        transition
    }

    /// Ends the run as failed after a reply without a word, which was this fault. The request to reply again stands last, so a
    /// retry asks the model once more.
    pub(super) fn end_unanswered(self, fault: &Fault) -> Transition {
        let model = self.transition.events.iter().find_map(|event| match event {
            Event::LlmCalled { model, .. } => Some(model.as_str()),
            _ => None,
        });
        let failure = Failure::of(fault, model);
        let error = match fault {
            Fault::EmptyReply => UNANSWERED.to_owned(),
            fault => remedied(fault, fault.to_string()),
        };
        let mut transition = self.close(SessionStatus::Failed, Some(error));
        if let Next::Close(closing) = &mut transition.next {
            closing.failure = Some(Box::new(failure));
        }
        transition
    }

    /// Marks guarded calls that were started and not finished as uncertain, because the failed run has no
    /// worker to settle them. An operator can list and resolve them. A retry tells the model about them.
    fn surface_half_done(&mut self) {
        let open: Vec<ToolCall> = self
            .session
            .open_turn()
            .map(|turn| turn.without_result.into_iter().cloned().collect())
            .unwrap_or_default();
        for call in open {
            let half_done = self.session.call(&call.call_id).is_some_and(|row| {
                row.effect == Effect::Guarded
                    && row.outcome.is_none()
                    && row.status.may_have_run()
                    && row.status != CallStatus::Uncertain
            });
            if half_done {
                self.journal_uncertain(&call, None);
                self.leave_open(&call, CallStatus::Uncertain);
            }
        }
    }
}

/// A fault's text, and what helps.
fn remedied(fault: &Fault, text: String) -> String {
    match fault.verdict() {
        Verdict::Fail { remedy } => format!("{text}. Remedy: {remedy}"),
        Verdict::Retry { .. } => text,
    }
}
