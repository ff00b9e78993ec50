//! A draft of a transition. Each kind of outcome adds its part.

mod compaction;
mod journal;
mod offload;
mod stop;
mod turn;

pub use offload::INLINE_OUTPUT_BYTES;

use super::transition::{Closing, Next, StepResult, Transition};
use crate::agent::{AgentPolicy, JournalLevel};
use crate::derive;
use crate::event::Event;
use crate::id::RunId;
use crate::inbox::{self, Place, Question};
use crate::record::{
    Block, Details, FinishReason, Record, Role, ToolCall, ToolResult, Usage, value_without_nul, without_nul,
};
use crate::reply;
use crate::session::{CallOutcome, CallStatus, ClosedCall, InboxMessage, Session, SessionStatus};
use crate::state::State;

/// A checkpoint entry is written at least every 20 steps, so that a fold of the journal stays short.
pub const STEPS_PER_CHECKPOINT: i64 = 20;

/// A value of the state whose JSON is larger than this is stored as a blob. The journal entry points at it.
pub const INLINE_VALUE_BYTES: usize = 2048;

pub(super) struct Draft<'a> {
    session: &'a Session,
    policy: AgentPolicy,
    state: State,
    transition: Transition,
}

impl<'a> Draft<'a> {
    pub(super) fn new(session: &'a Session, policy: AgentPolicy) -> Self {
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
        // The cause of earlier failures may be gone, so a new run tries summaries again.
        self.transition.compaction_failures = (self.session.compaction_failures > 0).then_some(0);
        self.transition
    }

    /// Takes the waiting inbox messages into this step, in the order in which they arrived.
    fn drain_inbox(&mut self) {
        let session = self.session;
        self.take(None, &session.inbox);
    }

    /// Takes inbox messages into the transcript; the first one answers `question`.
    fn take(&mut self, question: Option<Question>, messages: &[InboxMessage]) {
        let place = Place {
            run_id: self.transition.run_id.clone(),
            step_number: self.transition.step_number,
            last_message_number: self.last_message_number(),
        };
        let taken = inbox::take(&place, question, messages);
        self.transition.records.extend(taken.records);
        self.transition.events.extend(taken.events);
        self.transition.calls_closed.extend(taken.calls_closed);
        self.transition.inbox_drained.extend(taken.drained);
    }

    /// Number of the newest record, counting the records of this transition.
    fn last_message_number(&self) -> i64 {
        self.session.last_message_number + self.transition.records.len() as i64
    }

    /// Enqueues `text` as deliveries on the session's reply route, if the session has one and its tool mode
    /// is live.
    fn send(&mut self, source: &str, text: &str) {
        let policy = &self.session.policy;
        if let Some(route) = policy.reply.as_ref().filter(|_| policy.tool_mode.is_live()) {
            self.transition.deliveries.extend(reply::outgoing(route, source, &without_nul(text.to_owned())));
        }
    }

    /// Returns the message that a tool result sends. If the session replies by the same channel, the message
    /// also gets the thread of the reply route: a composed mail may be the answer to the mail that began the
    /// session.
    fn outgoing(&self, result: &ToolResult) -> Option<derive::NewDelivery> {
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
        let message_number = self.last_message_number() + 1;
        self.transition.records.push(Record {
            message_number,
            run_id: self.transition.run_id.clone(),
            step_number: self.transition.step_number,
            role,
            content: content.into_iter().map(clean).collect(),
            // The user does not see the agent's summaries.
            internal: details.summary,
            details,
        });
        message_number
    }

    /// Records the result of `call`: the message, its journal entry, the ledger row, the state updates and
    /// the delivery.
    fn answer(&mut self, call: &ToolCall, status: CallStatus, outcome: CallOutcome) {
        let (bytes, content, output) = self.inline(call, outcome.content);
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
        // In a dry run nothing is sent. The result says what would have been sent.
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

    /// Sets the step's cached result. The step's messages begin where the last committed step ended. The
    /// usage includes the summaries among those messages.
    fn complete_step(&mut self, usage: Usage, finish_reason: FinishReason, executed: i64) {
        let usage = self.with_summaries(usage);
        self.transition.step = Some(StepResult {
            from_message_number: self.session.to_message_number,
            to_message_number: self.last_message_number(),
            finish_reason,
            usage,
            executed_local_tool_count: executed,
        });
        self.transition.next = Next::NextStep;
    }

    /// Usage and finish reason of the open turn's model call. An earlier commit stored them with the message,
    /// before the tools ran.
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
        // Change nothing: the block may be signed, and the provider refuses changed bytes.
        Block::Provider { .. } => block,
    }
}

fn error(text: &str) -> CallOutcome {
    CallOutcome { content: text.to_owned(), is_error: true, details: None }
}

fn abandoned() -> CallOutcome {
    error("This call was not carried out: its run was stopped before the call was started.")
}
