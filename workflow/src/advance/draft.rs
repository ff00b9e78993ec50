//! How a transition comes about: a draft that each kind of outcome adds to.

mod compaction;
mod journal;
mod offload;

pub use offload::INLINE_OUTPUT_BYTES;

use super::transition::{ClosedCall, Closing, Next, OpenedCall, StepResult, Transition};
use super::{Ending, Generated, Performed};
use crate::agent::{JournalLevel, OnUncertain, Policy};
use crate::derive;
use crate::effect::Effect;
use crate::event::Event;
use crate::fault::{Fault, Verdict};
use crate::id::{CallId, RunId};
use crate::internal::is_remark;
use crate::record::{
    Attachment, Block, Details, FinishReason, Record, Role, ToolCall, ToolResult, Usage, text_of,
    value_without_nul, without_nul,
};
use crate::reply;
use crate::resolve::outcome_unknown;
use crate::session::{Call, CallOutcome, CallStatus, Purpose, Session, SessionStatus, State};
use journal::After;
use sha2::Digest;
use std::collections::{BTreeMap, HashSet};

/// A checkpoint entry is written at least every so many steps, so that a fold of the journal stays short.
pub const STEPS_PER_CHECKPOINT: i64 = 20;

/// A larger value of the state, as JSON, is journalled by pointer.
pub const INLINE_VALUE_BYTES: usize = 2048;

/// A longer call id is replaced: it is part of the ledger's key, which has room for 2,704 bytes.
const CALL_ID_BYTES: usize = 256;

pub(super) struct Draft<'a> {
    session: &'a Session,
    policy: Policy,
    state: State,
    transition: Transition,
}

impl<'a> Draft<'a> {
    pub(super) fn new(session: &'a Session, policy: Policy) -> Self {
        let run_id = session.run.as_ref().map_or_else(|| RunId::from(""), |run| run.run_id.clone());
        Draft {
            session,
            policy,
            state: session.state.clone(),
            transition: Transition {
                run_id,
                step_number: session.last_step_number + 1,
                records: Vec::new(),
                events: Vec::new(),
                calls_opened: Vec::new(),
                calls_closed: Vec::new(),
                state_updates: Vec::new(),
                deliveries: Vec::new(),
                inbox_drained: Vec::new(),
                generation_over: false,
                step: None,
                rebase: None,
                compaction_failures: None,
                blobs: Vec::new(),
                next: Next::SameStep,
            },
        }
    }

    pub(super) fn begin(mut self) -> Transition {
        let event = self.moved_to(SessionStatus::Running, None);
        self.transition.events.push(event);
        // What kept the last run from writing summaries may be gone.
        self.transition.compaction_failures = (self.session.compaction_failures > 0).then_some(0);
        self.transition
    }

    pub(super) fn reply(mut self, generated: Generated) -> Transition {
        self.drain_inbox();
        self.journal_interrupted(&After::Answered(&generated.generation_id, generated.resumes.as_ref()));
        let (usage, finish_reason) = (generated.reply.usage, generated.reply.finish_reason);
        let internal = is_remark(self.session, &generated.reply.content);
        let content = self.with_unique_call_ids(generated.reply.content);
        let details =
            Details { usage: Some(usage), finish_reason: Some(finish_reason), ..Details::default() };
        let text = text_of(&content);
        let message_number = self.push(Role::Assistant, content, details);
        self.transition.records.last_mut().expect("the reply was just pushed").internal = internal;
        self.transition.events.extend(generated.rebase.clone().map(Event::ContextRebased));
        self.transition.rebase = generated.rebase;
        self.transition.events.extend([
            Event::LlmCalled {
                generation_id: generated.generation_id.clone(),
                model: generated.model,
                attempt: generated.attempt,
                request_sha256: generated.request_sha256,
                context_strategy: generated.context_strategy.as_str().to_owned(),
                prompt_tokens: Some(usage.input_tokens),
                repairs: generated.repairs,
                prefill_bytes: generated.prefill_bytes,
                started_at: Some(generated.started_at),
                purpose: Purpose::Reply,
            },
            Event::GenStart { generation_id: generated.generation_id.clone(), stream: true },
            Event::GenComplete {
                generation_id: generated.generation_id,
                message_number,
                reason: finish_reason.as_str().to_owned(),
            },
        ]);
        self.transition.generation_over = true;
        let opened: Vec<OpenedCall> =
            self.last_record().tool_calls().map(|call| OpenedCall::new(call, &generated.effects)).collect();
        if opened.is_empty() {
            if !internal {
                self.send(&format!("reply/{message_number}"), &text);
            }
            self.complete_step(usage, finish_reason, 0);
            return self.close(SessionStatus::Completed, None);
        }
        let invoked = opened.iter().map(|call| Event::ToolInvoked {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            message_number,
        });
        self.transition.events.extend(invoked);
        self.transition.calls_opened = opened;
        self.transition
    }

    pub(super) fn results(mut self, performed: Vec<Performed>) -> Transition {
        let only_answers = performed.iter().all(|one| matches!(one.ending, Ending::Answered { .. }));
        let executed = performed.iter().filter(|one| one.ending.executed()).count();
        let needs_person = self.policy.on_uncertain == OnUncertain::NeedsAttention
            && performed.iter().any(|one| one.ending == Ending::Uncertain { known: false });
        let mut asked: Option<(CallId, String)> = None;
        for Performed { call, ending } in performed {
            match ending {
                Ending::Settled(status, outcome) => self.answer(&call, status, outcome),
                Ending::Uncertain { known } => {
                    if !known {
                        self.journal_uncertain(&call);
                    }
                    if needs_person {
                        // No result yet: the person's decision becomes it, or `session retry` tells the model.
                        self.leave_open(&call, CallStatus::Uncertain);
                    } else {
                        self.answer(&call, CallStatus::Uncertain, outcome_unknown());
                    }
                }
                Ending::Asked(_) if asked.is_some() => {
                    self.answer(&call, CallStatus::Failed, error("Not asked: one question at a time."));
                }
                Ending::Asked(question) => {
                    asked = Some((call.call_id.clone(), question));
                    self.leave_open(&call, CallStatus::Waiting);
                }
                Ending::Answered { inbox_id, text } => {
                    self.transition.inbox_drained.push(inbox_id);
                    // The user's own words, which are never cut.
                    let outcome = CallOutcome { content: text, is_error: false, details: None };
                    self.record_result(&call, CallStatus::Done, outcome, usize::MAX);
                    let attachments = self.attachments_of(inbox_id);
                    let answer = self.transition.records.last_mut().expect("the answer was just pushed");
                    answer.details.inbox_id = Some(inbox_id);
                    answer.details.attachments = attachments;
                }
                Ending::Abandoned => self.answer(&call, CallStatus::Abandoned, abandoned()),
            }
        }
        if only_answers {
            // The step of this turn was committed when it paused: the answer belongs to the next one.
            return self.go_on();
        }
        if needs_person {
            let reason = "a call may or may not have taken effect: look, then say what happened with `wakeful \
                          session resolve`";
            return self.close(SessionStatus::NeedsAttention, Some(reason.to_owned()));
        }
        // Those that settled before the run paused for a person are in the transcript already.
        let earlier = self
            .session
            .open_turn()
            .map_or(0, |turn| turn.record.tool_calls().count() - turn.unanswered.len());
        let (usage, finish_reason) = self.turn_cost();
        self.complete_step(usage, finish_reason, (earlier + executed) as i64);
        // A message that waits already answers the question in the next step: no run waits for what is there.
        if let Some((call_id, question)) = asked
            && self.session.inbox.is_empty()
        {
            self.send(&format!("question/{call_id}"), &question);
            return self.close(SessionStatus::WaitingInput, None);
        }
        self.transition.next = Next::NextStep;
        self.go_on()
    }

    pub(super) fn cancel(mut self) -> Transition {
        let turn = self.session.open_turn();
        // A turn that pauses for an answer has been counted; any other one would never be.
        let uncounted =
            turn.as_ref().is_some_and(|turn| turn.record.step_number == self.transition.step_number);
        let mut executed =
            turn.as_ref().map_or(0, |turn| turn.record.tool_calls().count() - turn.unanswered.len());
        let open: Vec<ToolCall> =
            turn.map(|turn| turn.unanswered.into_iter().cloned().collect()).unwrap_or_default();
        for call in open {
            let row = self.session.call(&call.call_id).cloned();
            match row {
                Some(Call { status, outcome: None, .. }) if status.may_have_run() => {
                    if status != CallStatus::Uncertain {
                        self.journal_uncertain(&call);
                    }
                    executed += 1;
                    self.answer(&call, CallStatus::Uncertain, outcome_unknown());
                }
                Some(Call { status, outcome: Some(outcome), .. }) => {
                    executed += 1;
                    self.answer(&call, status, outcome);
                }
                Some(_) | None => self.answer(&call, CallStatus::Abandoned, abandoned()),
            }
        }
        self.journal_interrupted(&After::Nothing("cancelled"));
        self.drain_inbox();
        self.transition.generation_over = true;
        if uncounted {
            let (usage, finish_reason) = self.turn_cost();
            self.complete_step(usage, finish_reason, executed as i64);
        }
        let reason = match &self.session.cancel_reason {
            Some(reason) => format!("cancelled: {reason}"),
            None => "cancelled".to_owned(),
        };
        let moved = self.moved_to(SessionStatus::Failed, Some(without_nul(reason)));
        self.close_with(SessionStatus::Failed, Some("cancelled".to_owned()), moved)
    }

    pub(super) fn fail(mut self, fault: &Fault) -> Transition {
        // Nobody goes on with the calls that were cut off: readers are shown none that is not in flight.
        self.journal_interrupted(&After::Nothing(&without_nul(fault.to_string())));
        self.transition.generation_over = true;
        self.drain_inbox();
        self.surface_half_done();
        let error = match fault.verdict() {
            Verdict::Fail { remedy } => format!("{fault}. Remedy: {remedy}"),
            Verdict::Retry { .. } => fault.to_string(),
        };
        self.close(SessionStatus::Failed, Some(without_nul(error)))
    }

    /// A guarded call that was found half-way has no worker left to settle it: it is uncertain from here on, listed and
    /// resolvable, and a retry tells the model.
    fn surface_half_done(&mut self) {
        let open: Vec<ToolCall> = self
            .session
            .open_turn()
            .map(|turn| turn.unanswered.into_iter().cloned().collect())
            .unwrap_or_default();
        for call in open {
            let half_done = self.session.call(&call.call_id).is_some_and(|row| {
                row.effect == Effect::Guarded
                    && row.outcome.is_none()
                    && row.status.may_have_run()
                    && row.status != CallStatus::Uncertain
            });
            if half_done {
                self.journal_uncertain(&call);
                self.leave_open(&call, CallStatus::Uncertain);
            }
        }
    }

    /// Follow-ups become messages of this step, in the order in which they came.
    fn drain_inbox(&mut self) {
        for message in &self.session.inbox {
            let details = Details {
                inbox_id: Some(message.inbox_id),
                attachments: message.attachments.clone(),
                ..Details::default()
            };
            self.push(Role::User, vec![Block::Text { text: message.text.clone() }], details);
            self.transition.inbox_drained.push(message.inbox_id);
        }
    }

    /// The files that came with a message of the inbox.
    fn attachments_of(&self, inbox_id: i64) -> Vec<Attachment> {
        let message = self.session.inbox.iter().find(|message| message.inbox_id == inbox_id);
        message.map(|message| message.attachments.clone()).unwrap_or_default()
    }

    /// What the session says goes out by its route, if it has one and is live.
    fn send(&mut self, source: &str, text: &str) {
        let policy = &self.session.policy;
        if let Some(route) = policy.reply.as_ref().filter(|_| policy.tool_mode.is_live()) {
            self.transition.deliveries.extend(reply::outgoing(route, source, &without_nul(text.to_owned())));
        }
    }

    /// What one tool result sends. Mail that a session writes which was begun by one is told which: it may be an answer to
    /// it.
    fn outgoing(&self, result: &ToolResult) -> Option<derive::Outgoing> {
        let mut outgoing = derive::outgoing(result)?;
        if let Some(route) =
            self.session.policy.reply.as_ref().filter(|route| route.channel == outgoing.channel)
            && let Some(content) = outgoing.content.as_object_mut()
        {
            content.insert("thread".to_owned(), route.to.clone());
        }
        Some(outgoing)
    }

    /// Appends a message and returns its number.
    fn push(&mut self, role: Role, content: Vec<Block>, details: Details) -> i64 {
        let message_number = self.session.last_message_number + self.transition.records.len() as i64 + 1;
        self.transition.records.push(Record {
            message_number,
            run_id: self.transition.run_id.clone(),
            step_number: self.transition.step_number,
            role,
            content: content.into_iter().map(clean).collect(),
            // Its user is not shown what the agent keeps for itself.
            internal: details.summary,
            details,
        });
        message_number
    }

    fn answer(&mut self, call: &ToolCall, status: CallStatus, outcome: CallOutcome) {
        self.record_result(call, status, outcome, INLINE_OUTPUT_BYTES);
    }

    fn record_result(
        &mut self,
        call: &ToolCall,
        status: CallStatus,
        outcome: CallOutcome,
        inline_bytes: usize,
    ) {
        let (bytes, content, output) = self.inline(call, outcome.content, inline_bytes);
        let result = ToolResult {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            content,
            is_error: outcome.is_error,
            details: outcome.details.map(value_without_nul),
            output,
        };
        for update in derive::updates(&result) {
            derive::apply(&mut self.state, &update);
            match self.policy.journal {
                JournalLevel::Full => self.journal_update(&update),
                // The commit's checkpoint holds it.
                JournalLevel::Checkpoint => {}
            }
            self.transition.state_updates.push(update);
        }
        // What a dry run would have sent is in the result, and goes nowhere.
        if self.session.policy.tool_mode.is_live() {
            let outgoing = self.outgoing(&result);
            self.transition.deliveries.extend(outgoing);
        }
        let ok = !result.is_error;
        let output_sha256 = result.output.as_ref().map(|output| output.sha256.clone());
        let message_number = self.push(Role::Tool, vec![Block::ToolResult(result)], Details::default());
        self.transition.events.push(Event::ToolResult {
            call_id: call.call_id.clone(),
            ok,
            message_number,
            bytes,
            output_sha256,
        });
        self.transition.calls_closed.push(ClosedCall {
            call_id: call.call_id.clone(),
            status,
            message_number: Some(message_number),
        });
    }

    fn leave_open(&mut self, call: &ToolCall, status: CallStatus) {
        let closed = ClosedCall { call_id: call.call_id.clone(), status, message_number: None };
        self.transition.calls_closed.push(closed);
    }

    /// The step's cached result. Its messages begin where the last committed step ended, and what a summary among them
    /// cost is counted with it.
    fn complete_step(&mut self, usage: Usage, finish_reason: FinishReason, executed: i64) {
        let usage = self.with_summaries(usage);
        self.transition.step = Some(StepResult {
            from_message_number: self.session.to_message_number,
            to_message_number: self.session.last_message_number + self.transition.records.len() as i64,
            finish_reason,
            usage,
            executed_local_tool_count: executed,
        });
        self.transition.next = Next::NextStep;
    }

    /// What the open turn's model call cost: it was committed with the message, before its tools ran.
    fn turn_cost(&self) -> (Usage, FinishReason) {
        let details = self.session.open_turn().map(|turn| turn.record.details.clone()).unwrap_or_default();
        (details.usage.unwrap_or_default(), details.finish_reason.unwrap_or(FinishReason::ToolCalls))
    }

    /// The transition of a run that goes on, with a checkpoint where one is due.
    fn go_on(mut self) -> Transition {
        let due = self.transition.step.is_some() && self.transition.step_number % STEPS_PER_CHECKPOINT == 0;
        if due || self.only_a_checkpoint_tells() {
            let (event, snapshot) = self.checkpoint(self.session.status);
            self.transition.events.push(event);
            self.transition.blobs.push(snapshot);
        }
        self.transition
    }

    pub(super) fn close(self, status: SessionStatus, error: Option<String>) -> Transition {
        let moved = self.moved_to(status, error.clone());
        self.close_with(status, error, moved)
    }

    fn close_with(mut self, status: SessionStatus, error: Option<String>, moved: Event) -> Transition {
        let result = Event::invocation_result(status, error.as_deref());
        let (checkpoint, snapshot) = self.checkpoint(status);
        let otherwise =
            self.only_a_checkpoint_tells().then(|| Box::new(self.checkpoint(self.session.status).0));
        let events = vec![moved, result, checkpoint];
        self.transition.next = Next::Close(Closing { status, error, events, snapshot, otherwise });
        self.transition
    }

    fn last_record(&self) -> &Record {
        self.transition.records.last().expect("the assistant message was just pushed")
    }

    /// Providers promise ids that are unique in one answer, not in a session; some servers count from zero each
    /// time. The ledger needs more, so a repeated id is extended by its place, which is the same in every attempt.
    fn with_unique_call_ids(&self, content: Vec<Block>) -> Vec<Block> {
        let mut taken: HashSet<CallId> = self
            .session
            .records
            .iter()
            .flat_map(Record::tool_calls)
            .map(|call| call.call_id.clone())
            .collect();
        let message_number = self.session.last_message_number + self.transition.records.len() as i64 + 1;
        let mut index = 0;
        content
            .into_iter()
            .map(|block| match block {
                Block::ToolCall(mut call) => {
                    let given = without_nul(call.call_id.into_string());
                    let usable = !given.is_empty() && given.len() <= CALL_ID_BYTES;
                    let mut id = if usable { given } else { format!("call_{message_number}_{index}") };
                    while taken.contains(&CallId::from(id.as_str())) {
                        id = format!("{id}_{message_number}_{index}");
                    }
                    call.call_id = CallId::from(id);
                    taken.insert(call.call_id.clone());
                    index += 1;
                    Block::ToolCall(call)
                }
                other @ (Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. }) => other,
            })
            .collect()
    }
}

impl Ending {
    /// Whether a tool of ours ran for it.
    fn executed(&self) -> bool {
        match self {
            Ending::Settled(..) | Ending::Uncertain { .. } | Ending::Asked(_) => true,
            Ending::Answered { .. } | Ending::Abandoned => false,
        }
    }
}

impl OpenedCall {
    fn new(call: &ToolCall, effects: &BTreeMap<String, Effect>) -> Self {
        let arguments = call.malformed.clone().unwrap_or_else(|| call.arguments.to_string());
        OpenedCall {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            // Refused where it is unknown; a worker that was deployed meanwhile may know it, and must not run it twice.
            effect: effects.get(&call.name).copied().unwrap_or(Effect::Guarded),
            args_sha256: hex::encode(sha2::Sha256::digest(arguments.as_bytes())),
        }
    }
}

fn clean(block: Block) -> Block {
    match block {
        Block::Text { text } => Block::Text { text: without_nul(text) },
        Block::ToolCall(call) => Block::ToolCall(ToolCall {
            call_id: call.call_id,
            name: without_nul(call.name),
            arguments: value_without_nul(call.arguments),
            malformed: call.malformed.map(without_nul),
        }),
        Block::ToolResult(result) => {
            Block::ToolResult(ToolResult { content: without_nul(result.content), ..result })
        }
        // Signed bytes: any change makes the provider refuse them.
        Block::Provider { .. } => block,
    }
}

fn error(text: &str) -> CallOutcome {
    CallOutcome { content: text.to_owned(), is_error: true, details: None }
}

fn abandoned() -> CallOutcome {
    error("This call was not carried out: its run was stopped before the call was started.")
}
