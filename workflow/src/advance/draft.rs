//! A draft of a transition: the begin of a run, the model's reply, the results of its tool calls, the close.

mod calls;
mod compaction;
mod journal;
mod offload;
mod stop;

pub use offload::INLINE_OUTPUT_BYTES;

use super::{CallEnd, Closing, EndedCall, Generated, Next, OpenedCall, StepResult, Transition};
use crate::agent::{AgentPolicy, JournalLevel, OnEmptyReply, OnUncertain};
use crate::derive;
use crate::event::Event;
use crate::fault::Fault;
use crate::generation::Purpose;
use crate::id::{CallId, RunId};
use crate::inbox::{self, Position, Question};
use crate::internal::is_remark;
use crate::record::{
    Attachment, Block, Details, FinishReason, Record, Role, ToolCall, ToolResult, Usage, is_too_deep,
    storable, text_of, without_nul,
};
use crate::reply;
use crate::resolve::{AWAITS_APPROVAL, NO_END, outcome_unknown};
use crate::session::{CallOutcome, CallStatus, CallUpdate, InboxMessage, Session, SessionStatus};
use crate::state::State;
use crate::told::person_waits;
use journal::After;
use stop::MALFORMED_TURNS;

/// A checkpoint entry is written at least every 20 steps, so that a fold of the journal stays short.
pub const STEPS_PER_CHECKPOINT: i64 = 20;

/// A value of the state whose JSON is larger than this is stored as a blob. The journal entry points at it.
pub const INLINE_VALUE_BYTES: usize = 2048;

/// What the model reads after an empty reply.
const ASK_AGAIN: &str = "Your last reply was empty. Give your answer now. If nothing is left to do or to say, say so in one short \
                         sentence.";

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
                call_updates: Vec::new(),
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
        // The cause of earlier failures may be gone, so summaries are tried again, after a pause as in a new run.
        self.transition.compaction_failures = (self.session.compaction_failures > 0).then_some(0);
        self.transition
    }

    pub(super) fn reply(mut self, generated: Generated) -> Transition {
        // The request held the messages of the inbox, so they stand before the reply in the transcript.
        self.drain_inbox();
        self.journal_interrupted(&After::Replied(&generated.generation_id, generated.resumes.as_ref()));
        let (usage, said) = (generated.reply.usage, generated.reply.finish_reason);
        let calls = generated.reply.content.iter().any(|block| matches!(block, Block::ToolCall(_)));
        // Some servers say "stop" beside a call. Such a reply is no answer.
        let finish_reason = if calls && said == FinishReason::Stop { FinishReason::ToolCalls } else { said };
        let internal = is_remark(self.session, &generated.reply.content);
        let content = self.with_unique_call_ids(generated.reply.content);
        let details =
            Details { usage: Some(usage), finish_reason: Some(finish_reason), ..Details::default() };
        let text = text_of(&content);
        let is_empty = text.trim().is_empty();
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
                started_at: generated.started_at,
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
        // A provider that withholds its answer withholds it again, so the model is not asked again at once.
        let withheld = finish_reason == FinishReason::ContentFilter;
        let asks_again = self.policy.on_empty_reply == OnEmptyReply::AskAgain;
        if opened.is_empty() && is_empty && (withheld || asks_again) {
            let since = self.since_the_person();
            let waits = person_waits(&self.session.policy, &self.session.trigger_type) && !since.mailed;
            if withheld || !since.asked_again || waits {
                let content = vec![Block::Text { text: ASK_AGAIN.to_owned() }];
                self.push(Role::User, content, Details { asks_again: true, ..Details::default() });
                self.complete_step(usage, finish_reason, 0);
                return match (withheld, since.asked_again) {
                    (true, _) => self.end_unanswered(&Fault::withheld()),
                    (false, true) => self.end_unanswered(&Fault::EmptyReply),
                    (false, false) => self.go_on(),
                };
            }
        }
        if opened.is_empty() {
            if !internal && !is_empty {
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

    pub(super) fn results(mut self, performed: Vec<EndedCall>) -> Transition {
        let only_answers = performed.iter().all(|one| matches!(one.ending, CallEnd::Answered { .. }));
        let executed = performed.iter().filter(|one| one.ending.executed()).count();
        let needs_person = self.policy.on_uncertain == OnUncertain::NeedsAttention
            && performed.iter().any(|one| matches!(one.ending, CallEnd::Uncertain { known: false, .. }));
        let awaits_approval = self.session.calls.iter().any(|row| {
            row.status == CallStatus::Unapproved
                && performed.iter().all(|one| one.call.call_id != row.call_id)
        });
        let mut asked: Option<(CallId, String)> = None;
        for EndedCall { call, ending } in performed {
            match ending {
                CallEnd::Settled(status, outcome) => self.record_result(&call, status, outcome),
                CallEnd::Uncertain { known, why } => {
                    let told = outcome_unknown(why.as_deref().or(known.then_some(NO_END)));
                    if !known {
                        self.journal_uncertain(&call, why);
                    }
                    if needs_person {
                        // No result yet. An operator's decision becomes the result, or `session retry` tells
                        // the model.
                        self.leave_open(&call, CallStatus::Uncertain);
                    } else {
                        self.record_result(&call, CallStatus::Uncertain, told);
                    }
                }
                CallEnd::Asked(_) if asked.is_some() => {
                    self.record_result(
                        &call,
                        CallStatus::Failed,
                        error("Not asked: one question at a time."),
                    );
                }
                // The run pauses for a person once, and an operator's yes comes first.
                CallEnd::Asked(_) if awaits_approval => {
                    let text = "Not asked: another call of this reply waits for approval. Ask when it has its result.";
                    self.record_result(&call, CallStatus::Failed, error(text));
                }
                CallEnd::Asked(_) if needs_person => {
                    let text = "Not asked: another call of this reply waits for an operator. Ask when it has its result.";
                    self.record_result(&call, CallStatus::Failed, error(text));
                }
                CallEnd::Asked(question) => {
                    asked = Some((call.call_id.clone(), question));
                    self.leave_open(&call, CallStatus::Waiting);
                }
                CallEnd::Answered { inbox_id, text } => {
                    let question = Question { call_id: call.call_id, name: call.name, closed_with: None };
                    let attachments = self.attachments_of(inbox_id);
                    self.take(Some(question), &[InboxMessage { inbox_id, text, attachments }]);
                }
                CallEnd::Abandoned => self.record_result(&call, CallStatus::Abandoned, abandoned()),
            }
        }
        if only_answers {
            // The turn's step was committed when the run paused. The answer belongs to the next step.
            return self.go_on();
        }
        if needs_person {
            let reason = "a call may or may not have taken effect: look, then say what happened with `wakeful \
                          session resolve`";
            return self.close(SessionStatus::NeedsAttention, Some(reason.to_owned()));
        }
        if awaits_approval {
            return self.close(SessionStatus::NeedsAttention, Some(AWAITS_APPROVAL.to_owned()));
        }
        // Calls that settled before the run paused for a person are in the transcript already.
        let earlier = self
            .session
            .open_turn()
            .map_or(0, |turn| turn.record.tool_calls().count() - turn.without_result.len());
        let (usage, finish_reason) = self.turn_cost();
        self.complete_step(usage, finish_reason, (earlier + executed) as i64);
        // A message that is already in the inbox answers the question in the next step, so the run does not pause.
        if let Some((call_id, question)) = asked
            && self.session.inbox.is_empty()
        {
            self.send(&format!("question/{call_id}"), &question);
            // A tool may ask anything, so the call's arguments do not tell what people are to answer. The journal does.
            let moved = self.moved_to(SessionStatus::WaitingInput, Some(question));
            return self.close_with(SessionStatus::WaitingInput, None, moved);
        }
        let turns = self.malformed_turns();
        if turns >= MALFORMED_TURNS && self.session.inbox.is_empty() {
            return self.end_failed(&Fault::MalformedCalls { turns }, None);
        }
        self.go_on()
    }

    /// Pauses a run that has nothing to do before a person acts.
    pub(super) fn pause(self) -> Transition {
        if self.session.awaits_approval() {
            return self.close(SessionStatus::NeedsAttention, Some(AWAITS_APPROVAL.to_owned()));
        }
        self.close(SessionStatus::WaitingInput, None)
    }

    /// What has happened since the newest message of a person. After an empty reply the model is asked again only once for each such
    /// message: a step that asks again sets the counts of the run's limits to zero, so otherwise no limit would stop the run.
    fn since_the_person(&self) -> SinceThePerson {
        let mut since = SinceThePerson { asked_again: false, mailed: false };
        for record in self.transition.records.iter().rev().chain(self.session.records.iter().rev()) {
            if record.role == Role::User && !record.is_summary() {
                if !record.details.asks_again {
                    return since;
                }
                since.asked_again = true;
            }
            since.mailed |= record.tool_results().any(derive::is_sent_mail);
        }
        // A message that is left out may be a mail, or the request to reply again.
        let left_out = self.session.left_out.is_some();
        SinceThePerson { asked_again: since.asked_again || left_out, mailed: since.mailed || left_out }
    }

    /// The files that came with inbox message `inbox_id`.
    fn attachments_of(&self, inbox_id: i64) -> Vec<Attachment> {
        let message = self.session.inbox.iter().find(|message| message.inbox_id == inbox_id);
        message.map(|message| message.attachments.clone()).unwrap_or_default()
    }

    fn last_record(&self) -> &Record {
        self.transition.records.last().expect("the assistant message was just pushed")
    }

    /// Takes the waiting inbox messages into this step, in the order in which they arrived.
    fn drain_inbox(&mut self) {
        let session = self.session;
        self.take(None, &session.inbox);
    }

    /// Takes inbox messages into the transcript; the first one answers `question`.
    fn take(&mut self, question: Option<Question>, messages: &[InboxMessage]) {
        let position = Position {
            run_id: self.transition.run_id.clone(),
            step_number: self.transition.step_number,
            last_message_number: self.last_message_number(),
        };
        let taken = inbox::take(&position, question, messages);
        self.transition.records.extend(taken.records);
        self.transition.events.extend(taken.events);
        self.transition.call_updates.extend(taken.call_updates);
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
            // The user sees neither the agent's summaries nor the request to reply again.
            internal: details.summary || details.asks_again,
            details,
        });
        message_number
    }

    /// Records the result of `call`: the message, its journal entry, the ledger row, the state updates and
    /// the delivery.
    fn record_result(&mut self, call: &ToolCall, status: CallStatus, outcome: CallOutcome) {
        let (bytes, content, output) = self.inline(call, outcome.content);
        let result = ToolResult {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            content,
            is_error: outcome.is_error,
            details: outcome.details.map(storable),
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
        self.transition.call_updates.push(CallUpdate {
            call_id: call.call_id.clone(),
            status,
            message_number: Some(message_number),
        });
    }

    fn leave_open(&mut self, call: &ToolCall, status: CallStatus) {
        let update = CallUpdate { call_id: call.call_id.clone(), status, message_number: None };
        self.transition.call_updates.push(update);
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
        let turn = self.session.open_turn();
        let (usage, finish_reason) = turn
            .map(|turn| (turn.record.details.usage, turn.record.details.finish_reason))
            .unwrap_or_default();
        (usage.unwrap_or_default(), finish_reason.unwrap_or(FinishReason::ToolCalls))
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
        self.transition.next =
            Next::Close(Closing { status, error, in_log: None, failure: None, events, snapshot, otherwise });
        self.transition
    }
}

/// See [`Draft::since_the_person`].
struct SinceThePerson {
    asked_again: bool,
    /// The agent has sent a mail, which may be its reply.
    mailed: bool,
}

fn clean(block: Block) -> Block {
    match block {
        Block::Text { text } => Block::Text { text: without_nul(text) },
        // A call without some of its arguments would be another call.
        Block::ToolCall(call) if is_too_deep(&call.arguments) => Block::ToolCall(ToolCall {
            call_id: call.call_id,
            name: without_nul(call.name),
            malformed: Some(without_nul(call.arguments.to_string())),
            arguments: serde_json::json!({}),
        }),
        Block::ToolCall(call) => Block::ToolCall(ToolCall {
            call_id: call.call_id,
            name: without_nul(call.name),
            arguments: storable(call.arguments),
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
