//! Turns what a worker performed into one [`Transition`], which the store commits unchanged.

mod draft;

pub use draft::{INLINE_OUTPUT_BYTES, INLINE_VALUE_BYTES, STEPS_PER_CHECKPOINT};

use crate::agent::AgentPolicy;
use crate::blob::Blob;
use crate::derive::{self, NewDelivery, StateUpdate};
use crate::effect::Effect;
use crate::event::Event;
use crate::failure::Failure;
use crate::fault::Fault;
use crate::id::{CallId, GenerationId, RunId};
use crate::plan::Stop;
use crate::record::{FinishReason, Record, Reply, ToolCall, Usage};
use crate::session::{Call, CallOutcome, CallStatus, CallUpdate, Session, SessionStatus};
use crate::strategy::{Rebase, Strategy};
use crate::told::{self, Reason};
use crate::workspace::Snapshot;
use draft::Draft;
use std::collections::BTreeMap;

/// What came out of an [`Action`](crate::plan::Action).
#[derive(Clone, Debug, PartialEq)]
pub enum Performed {
    Begun,
    Replied(Generated),
    /// The model was asked for a summary of the context.
    Compacted(Compaction),
    /// Every planned call, in order.
    Called(Vec<EndedCall>),
    /// The same, where the calls have changed the workspace.
    CalledAndChanged(Vec<EndedCall>, Snapshot),
    Stopped(Stop),
    /// A cancel cut calls off in this worker. `used` is what a model call has used: it was seen, or is estimated. `cut` are tool
    /// calls.
    Cancelled {
        used: Option<Usage>,
        cut: Vec<CallId>,
    },
    Paused,
}

/// A finished model call.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    pub generation_id: GenerationId,
    pub attempt: i64,
    pub model: String,
    pub request_sha256: String,
    /// When it began, by the database's clock. `None`: a replay took the reply from its source.
    pub started_at: Option<String>,
    /// How many changes the projection made to the request's copy of the transcript.
    pub repairs: i64,
    /// The earlier attempt whose text was sent as the prefill. The reply begins with that text.
    pub resumes: Option<GenerationId>,
    /// The length of that prefill.
    pub prefill_bytes: Option<i64>,
    pub reply: Reply,
    /// How the context of this call was selected. `rebase` is set when this call moved the beginning of the
    /// context.
    pub context_strategy: Strategy,
    pub rebase: Option<Rebase>,
    /// The effect of each tool that the model was offered and has called, at least. A call of any other name is refused and
    /// never runs.
    pub effects: BTreeMap<String, Effect>,
}

/// A model call for a summary of the context.
#[derive(Clone, Debug, PartialEq)]
pub struct Compaction {
    pub generation_id: GenerationId,
    pub attempt: i64,
    pub model: String,
    pub request_sha256: String,
    /// When it began, by the database's clock.
    pub started_at: String,
    pub repairs: i64,
    pub end: CompactionEnd,
}

/// How a summary call ended.
#[derive(Clone, Debug, PartialEq)]
pub enum CompactionEnd {
    /// The text of the summary's record, and the rebase that points at it.
    Written {
        text: String,
        finish_reason: FinishReason,
        usage: Usage,
        rebase: Rebase,
    },
    Failed(Fault),
}

/// One planned call and its end.
#[derive(Clone, Debug, PartialEq)]
pub struct EndedCall {
    pub call: ToolCall,
    pub ending: CallEnd,
}

/// How a tool call ended in this step. [`CallOutcome`] is the content that the ledger keeps of it.
#[derive(Clone, Debug, PartialEq)]
pub enum CallEnd {
    /// `Done`, `Failed`, or `Uncertain` where a person settled it.
    Settled(CallStatus, CallOutcome),
    /// The call may have taken effect. `known`: the journal already has an entry for that.
    /// `why`: what is known of its end, if its worker lives.
    Uncertain { known: bool, why: Option<String> },
    /// The tool asks the user this question.
    Asked(String),
    /// The user answered it.
    Answered { inbox_id: i64, text: String },
    /// It was closed without being run.
    Abandoned,
}

impl CallEnd {
    /// Returns whether Wakeful ran the tool (or tried to) for this call.
    fn executed(&self) -> bool {
        match self {
            CallEnd::Settled(..) | CallEnd::Uncertain { .. } | CallEnd::Asked(_) => true,
            CallEnd::Answered { .. } | CallEnd::Abandoned => false,
        }
    }
}

/// Returns the transition for `performed`. Never fails: if it does not fit the session (a defect of the
/// worker), the commit's fence rejects the transition and nothing is lost.
pub fn advance(session: &Session, performed: Performed, policy: AgentPolicy) -> Transition {
    let draft = Draft::new(session, policy);
    match performed {
        Performed::Begun => draft.begin(),
        Performed::Replied(generated) => draft.reply(generated),
        Performed::Compacted(compaction) => draft.compacted(compaction),
        Performed::Called(calls) => draft.results(calls),
        Performed::CalledAndChanged(calls, snapshot) => draft.results(calls).with_snapshot(session, snapshot),
        Performed::Stopped(Stop::Cancelled) => draft.cancel(None, &[]),
        Performed::Cancelled { used, cut } => draft.cancel(used, &cut),
        Performed::Stopped(Stop::Failed(fault)) => draft.fail(&fault),
        Performed::Stopped(Stop::Finished) => draft.close(SessionStatus::Completed, None),
        Performed::Paused => draft.pause(),
    }
}

/// Everything that one commit writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Transition {
    pub run_id: RunId,
    /// The step that this commit belongs to. It is open until a commit completes it.
    pub step_number: i64,
    pub records: Vec<Record>,
    pub events: Vec<Event>,
    /// New ledger rows.
    pub calls_opened: Vec<OpenedCall>,
    /// Ledger rows that change: a row with a `message_number` has its result in the transcript from now on.
    pub call_updates: Vec<CallUpdate>,
    pub state_updates: Vec<StateUpdate>,
    pub deliveries: Vec<NewDelivery>,
    /// Inbox rows that are now in the transcript.
    pub inbox_drained: Vec<i64>,
    /// The model call in flight has ended, so the commit deletes its rows.
    pub generation_over: bool,
    /// The step's cached result, when this commit completes the step.
    pub step: Option<StepResult>,
    /// Where the context begins from now on.
    pub rebase: Option<Rebase>,
    /// The new count of failed summaries, where it changes.
    pub compaction_failures: Option<i64>,
    /// The blobs that `events` and `records` point at.
    pub blobs: Vec<Blob>,
    pub next: Next,
}

/// What happens to the job.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// The same step goes on.
    SameStep,
    NextStep,
    /// The run closes or pauses and the job ends, if nothing arrived meanwhile.
    Close(Closing),
}

/// The end or pause of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Closing {
    pub status: SessionStatus,
    /// Why, on failure: one line with its remedy.
    pub error: Option<String>,
    /// The error for the log, if the error has words of a provider: see [`Fault::in_log`](crate::fault::Fault::in_log).
    pub in_log: Option<String>,
    /// The group of failures that the error belongs to.
    pub failure: Option<Box<Failure>>,
    pub events: Vec<Event>,
    /// The state that the close's checkpoint points at.
    pub snapshot: Blob,
    /// The checkpoint to write instead if the run goes on after all. Set only where the state changed and no
    /// other entry of this commit journals the change. Its blob is `snapshot`.
    pub otherwise: Option<Box<Event>>,
}

/// A call that the model asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenedCall {
    pub call_id: CallId,
    pub name: String,
    pub effect: Effect,
    pub args_sha256: String,
    /// It may not run before a person approves it. A worker sets this with [`Transition::hold_calls`].
    pub unapproved: bool,
    /// The commit that records the call also starts it. A worker sets this with [`Transition::start_calls`].
    pub start: Option<CallStart>,
}

/// The start of a call that runs right after the commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallStart {
    /// Only the call frame that knows it may run the tool.
    pub nonce: String,
    /// How long the tool may run.
    pub timeout_s: u64,
}

/// The cached result of a step: a pointer, never the messages.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// The step's messages begin after this number.
    pub from_message_number: i64,
    /// Number of the step's last message.
    pub to_message_number: i64,
    pub finish_reason: FinishReason,
    pub usage: Usage,
    pub executed_local_tool_count: i64,
}

impl StepResult {
    /// Returns whether the step's reply is the answer to what people wrote: it is complete and asks for no call. The function
    /// `run_since_answer` in the database finds the same steps.
    pub fn is_answer(&self) -> bool {
        self.finish_reason == FinishReason::Stop && self.executed_local_tool_count == 0
    }
}

impl OpenedCall {
    /// The status of its new ledger row.
    pub fn status(&self) -> CallStatus {
        match &self.start {
            _ if self.unapproved => CallStatus::Unapproved,
            Some(_) => CallStatus::Started,
            None => CallStatus::Invoked,
        }
    }
}

impl Transition {
    /// Returns whether the commit is progress: it writes a message or completes a step. The beginning of a run is not progress.
    pub fn is_progress(&self) -> bool {
        self.step.is_some() || !self.records.is_empty()
    }

    /// Marks the calls of the reply for which `needs_approval` returns true: they wait for a person.
    pub fn hold_calls(&mut self, mut needs_approval: impl FnMut(&ToolCall) -> bool) {
        let Some(reply) = self.records.last() else { return };
        for (call, opened) in reply.tool_calls().zip(&mut self.calls_opened) {
            opened.unapproved = needs_approval(call);
        }
    }

    /// Lets the commit start those calls of the reply for which `start` returns a start. They must be idempotent: after
    /// a crash the next worker cannot tell whether they ran.
    pub fn start_calls(&mut self, mut start: impl FnMut(&ToolCall) -> Option<CallStart>) {
        let Some(reply) = self.records.last() else { return };
        for (call, opened) in reply.tool_calls().zip(&mut self.calls_opened) {
            if opened.effect == Effect::Idempotent && !opened.unapproved {
                opened.start = start(call);
            }
        }
    }

    /// Joins `results` to this reply, so that one commit writes both. `results` was planned on the session after this
    /// reply. Returns `false` and changes nothing if the results end or pause the run, or belong to another step: each of
    /// the two then needs a commit of its own.
    pub fn join(&mut self, results: Transition) -> bool {
        let fits = self.next == Next::SameStep
            && results.next == Next::NextStep
            && self.run_id == results.run_id
            && self.step_number == results.step_number
            && self.call_updates.is_empty()
            && results.calls_opened.is_empty()
            && !results.generation_over;
        if fits {
            self.records.extend(results.records);
            self.events.extend(results.events);
            self.call_updates = results.call_updates;
            self.state_updates.extend(results.state_updates);
            self.deliveries.extend(results.deliveries);
            self.inbox_drained.extend(results.inbox_drained);
            self.blobs.extend(results.blobs);
            self.step = results.step;
            self.rebase = results.rebase.or(self.rebase.take());
            self.compaction_failures = results.compaction_failures.or(self.compaction_failures);
            self.next = Next::NextStep;
        }
        fits
    }

    /// If this commit ends the run as failed, adds a notice with this text for the person.
    pub fn telling(mut self, session: &Session, text: Option<&str>) -> Transition {
        if let (Next::Close(closing), Some(text)) = (&mut self.next, text)
            && closing.status == SessionStatus::Failed
            && let Some(notice) = told::notice(
                &session.policy,
                &session.trigger_type,
                self.run_id.as_str(),
                Reason::Failed,
                text,
            )
        {
            closing.events.insert(0, notice.event);
            self.deliveries.extend(notice.deliveries);
        }
        self
    }

    /// Turns a closing transition into one that continues the run, because something arrived while the run
    /// was closing. Keeps the model's reply, which is already paid for. The next step handles what arrived.
    pub fn continuing(mut self) -> Transition {
        if let Next::Close(closing) = self.next {
            // The run goes on, so it has not failed.
            let failed = Reason::Failed.key(self.run_id.as_str());
            self.deliveries.retain(|one| !one.source_key.starts_with(&failed));
            // Uncertain calls that neither the model nor an operator has been told about keep status `started`; the next
            // plan handles them.
            let (left, kept): (Vec<CallUpdate>, Vec<CallUpdate>) = self
                .call_updates
                .into_iter()
                .partition(|call| call.status == CallStatus::Uncertain && call.message_number.is_none());
            self.call_updates = kept;
            let is_left = |id: &CallId| left.iter().any(|call| &call.call_id == id);
            self.events.retain(
                |event| !matches!(event, Event::ToolFailedUncertain { call_id, .. } if is_left(call_id)),
            );
            if let Some(checkpoint) = closing.otherwise {
                self.events.push(*checkpoint);
                self.blobs.push(closing.snapshot);
            }
            if self.step.is_none() && self.records.is_empty() {
                // This commit would only have ended the run, and the run continues. If the worker does not
                // learn that the commit succeeded, it repeats the commit and would journal these events
                // twice. So drop them. The next plan finds the calls that were interrupted.
                self.events.clear();
                self.blobs.clear();
                self.generation_over = false;
            }
            self.next = if self.step.is_some() { Next::NextStep } else { Next::SameStep };
        }
        self
    }

    /// Journals a snapshot of the workspace, which holds what the transition's messages say of it.
    fn with_snapshot(mut self, session: &Session, snapshot: Snapshot) -> Transition {
        let message_number = session.last_message_number + self.records.len() as i64;
        self.events.push(Event::WorkspaceSnapshot(Snapshot { message_number, ..snapshot }));
        self
    }

    /// Returns the snapshot that this commit journals.
    pub fn workspace(&self) -> Option<&Snapshot> {
        self.events.iter().rev().find_map(|event| match event {
            Event::WorkspaceSnapshot(snapshot) => Some(snapshot),
            _ => None,
        })
    }

    /// Returns the session's new status, or `None` if this commit does not change it.
    pub fn status(&self) -> Option<SessionStatus> {
        match &self.next {
            Next::Close(closing) => Some(closing.status),
            Next::SameStep | Next::NextStep => self.events.iter().rev().find_map(|event| match event {
                Event::StateTransition { to_state, .. } => SessionStatus::parse(to_state),
                _ => None,
            }),
        }
    }
}

impl Session {
    /// Updates this copy after `transition` was committed and the run continues. The result equals what
    /// `hydrate` would read.
    pub fn apply(&mut self, transition: &Transition) {
        self.last_message_number += transition.records.len() as i64;
        self.last_event_seq += transition.events.len() as i64;
        self.records.extend(transition.records.iter().cloned());
        for update in &transition.state_updates {
            derive::apply(&mut self.state, update);
        }
        let mut opened: Vec<Call> = transition
            .calls_opened
            .iter()
            .map(|opened| Call {
                call_id: opened.call_id.clone(),
                effect: opened.effect,
                status: opened.status(),
                outcome: None,
            })
            .collect();
        // Hydrate reads ledger rows in the order of their key.
        opened.sort_by(|a, b| a.call_id.cmp(&b.call_id));
        self.calls.extend(opened);
        for update in &transition.call_updates {
            match update.message_number {
                Some(_) => self.calls.retain(|call| call.call_id != update.call_id),
                None => {
                    if let Some(call) = self.calls.iter_mut().find(|call| call.call_id == update.call_id) {
                        call.status = update.status;
                    }
                }
            }
        }
        self.inbox.retain(|message| !transition.inbox_drained.contains(&message.inbox_id));
        if transition.generation_over {
            self.interrupted.clear();
        }
        if let Some(status) = transition.status() {
            self.status = status;
        }
        if let Some(rebase) = &transition.rebase {
            self.rebase = Some(rebase.clone());
        }
        if let Some(snapshot) = transition.workspace() {
            self.workspace = Some(snapshot.clone());
        }
        if let Some(failures) = transition.compaction_failures {
            self.compaction_failures = failures;
        }
        if let Some(step) = &transition.step {
            self.last_step_number = transition.step_number;
            self.to_message_number = step.to_message_number;
            self.totals.add(&step.usage);
            if let Some(run) = &mut self.run {
                run.steps += 1;
                run.tokens += step.usage.input_tokens + step.usage.output_tokens;
                if step.is_answer() {
                    (run.steps, run.tokens) = (0, 0);
                }
            }
        }
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod routes;
#[cfg(test)]
mod tests;
