//! Drafts of a turn: the model's answer, then the results of its tool calls.

use super::journal::After;
use super::{Draft, abandoned, error};
use crate::advance::transition::{Next, OpenedCall, Transition};
use crate::advance::{CallEnd, Generated, Performed};
use crate::agent::OnUncertain;
use crate::effect::Effect;
use crate::event::Event;
use crate::generation::Purpose;
use crate::id::CallId;
use crate::inbox::Question;
use crate::internal::is_remark;
use crate::record::{Attachment, Block, Details, Record, Role, ToolCall, text_of, without_nul};
use crate::resolve::outcome_unknown;
use crate::session::{CallStatus, InboxMessage, SessionStatus};
use sha2::Digest;
use std::collections::{BTreeMap, HashSet};

/// A longer call id is replaced. It is part of the ledger's primary key, and an index entry holds at most
/// 2,704 bytes.
const CALL_ID_BYTES: usize = 256;

impl Draft<'_> {
    pub(in crate::advance) fn reply(mut self, generated: Generated) -> Transition {
        self.drain_inbox();
        self.journal_cut_off(&After::Answered(&generated.generation_id, generated.resumes.as_ref()));
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

    pub(in crate::advance) fn results(mut self, performed: Vec<Performed>) -> Transition {
        let only_answers = performed.iter().all(|one| matches!(one.ending, CallEnd::Answered { .. }));
        let executed = performed.iter().filter(|one| one.ending.executed()).count();
        let needs_person = self.policy.on_uncertain == OnUncertain::NeedsAttention
            && performed.iter().any(|one| one.ending == CallEnd::Uncertain { known: false });
        let mut asked: Option<(CallId, String)> = None;
        for Performed { call, ending } in performed {
            match ending {
                CallEnd::Settled(status, outcome) => self.answer(&call, status, outcome),
                CallEnd::Uncertain { known } => {
                    if !known {
                        self.journal_uncertain(&call);
                    }
                    if needs_person {
                        // No result yet. An operator's decision becomes the result, or `session retry` tells
                        // the model.
                        self.leave_open(&call, CallStatus::Uncertain);
                    } else {
                        self.answer(&call, CallStatus::Uncertain, outcome_unknown());
                    }
                }
                CallEnd::Asked(_) if asked.is_some() => {
                    self.answer(&call, CallStatus::Failed, error("Not asked: one question at a time."));
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
                CallEnd::Abandoned => self.answer(&call, CallStatus::Abandoned, abandoned()),
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
        // Calls that settled before the run paused for a person are in the transcript already.
        let earlier = self
            .session
            .open_turn()
            .map_or(0, |turn| turn.record.tool_calls().count() - turn.unanswered.len());
        let (usage, finish_reason) = self.turn_cost();
        self.complete_step(usage, finish_reason, (earlier + executed) as i64);
        // A message that is already in the inbox answers the question in the next step, so the run does not pause.
        if let Some((call_id, question)) = asked
            && self.session.inbox.is_empty()
        {
            self.send(&format!("question/{call_id}"), &question);
            return self.close(SessionStatus::WaitingInput, None);
        }
        self.transition.next = Next::NextStep;
        self.go_on()
    }

    /// The files that came with inbox message `inbox_id`.
    fn attachments_of(&self, inbox_id: i64) -> Vec<Attachment> {
        let message = self.session.inbox.iter().find(|message| message.inbox_id == inbox_id);
        message.map(|message| message.attachments.clone()).unwrap_or_default()
    }

    fn last_record(&self) -> &Record {
        self.transition.records.last().expect("the assistant message was just pushed")
    }

    /// Makes each call id unique within the session, as the ledger requires. Providers promise ids that are
    /// unique in one answer only, and some servers count from zero each time. A repeated id gets the message
    /// number and the call's index as a suffix, which are the same in every attempt.
    fn with_unique_call_ids(&self, content: Vec<Block>) -> Vec<Block> {
        let mut taken: HashSet<CallId> = self
            .session
            .records
            .iter()
            .flat_map(Record::tool_calls)
            .map(|call| call.call_id.clone())
            .collect();
        let message_number = self.last_message_number() + 1;
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

impl CallEnd {
    /// Returns whether Wakeful ran the tool (or tried to) for this call.
    fn executed(&self) -> bool {
        match self {
            CallEnd::Settled(..) | CallEnd::Uncertain { .. } | CallEnd::Asked(_) => true,
            CallEnd::Answered { .. } | CallEnd::Abandoned => false,
        }
    }
}

impl OpenedCall {
    fn new(call: &ToolCall, effects: &BTreeMap<String, Effect>) -> Self {
        let arguments = call.malformed.clone().unwrap_or_else(|| call.arguments.to_string());
        OpenedCall {
            call_id: call.call_id.clone(),
            name: call.name.clone(),
            // This worker refuses a call of an unknown tool. A worker of a newer deployment may know the
            // tool, and must not run it twice.
            effect: effects.get(&call.name).copied().unwrap_or(Effect::Guarded),
            args_sha256: hex::encode(sha2::Sha256::digest(arguments.as_bytes())),
        }
    }
}
