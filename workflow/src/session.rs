//! A session as the step job sees it: its row, its transcript, its open tool calls and its waiting messages.

mod left_out;
mod status;
mod tentative;

pub use left_out::LeftOut;
pub use status::SessionStatus;

use crate::effect::Effect;
use crate::generation::InterruptedCall;
use crate::id::{CallId, ConversationId, RunId, SessionId};
use crate::policy::SessionPolicy;
use crate::prefix::Prefix;
use crate::record::{Attachment, Record, Role, ToolCall, Usage};
use crate::seed::Seed;
use crate::state::State;
use crate::strategy::Rebase;
use crate::workspace::Snapshot;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

/// The open run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub run_id: RunId,
    /// How many steps the run has committed since its last complete reply without a call. (The run goes on after such a reply if
    /// people wrote meanwhile: see [`StepResult::is_answer`](crate::advance::StepResult::is_answer).)
    pub steps: i64,
    /// Input and output tokens of those steps.
    pub tokens: i64,
}

/// A message in the inbox. The run's next request for a reply shows it, and the commit of that reply makes it a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboxMessage {
    pub inbox_id: i64,
    pub text: String,
    pub attachments: Vec<Attachment>,
}

/// Sums over the committed steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Number of steps.
    pub turns: i64,
    pub usage: Usage,
}

impl Totals {
    /// Adds one step.
    pub fn add(&mut self, usage: &Usage) {
        self.turns += 1;
        self.usage.input_tokens = self.usage.input_tokens.saturating_add(usage.input_tokens);
        self.usage.output_tokens = self.usage.output_tokens.saturating_add(usage.output_tokens);
        self.usage.cached_tokens = self.usage.cached_tokens.saturating_add(usage.cached_tokens);
        self.usage.cache_write_tokens =
            self.usage.cache_write_tokens.saturating_add(usage.cache_write_tokens);
        self.usage.cost_micros = self.usage.cost_micros.saturating_add(usage.cost_micros);
    }
}

/// Totals of a session and figures derived from them, for people.
///
/// Derived, never stored. The totals come from the session's row, which the commit of each step updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DebugMeta {
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub cached_tokens: i64,
    pub cache_write_tokens: i64,
    /// Input and output.
    pub total_tokens: i64,
    pub cost_micros: i64,
    /// Rounded as the database rounds: half a cent counts as one.
    pub cost_cents: i64,
}

impl DebugMeta {
    /// Derives the figures from `totals`.
    pub fn of(totals: &Totals) -> DebugMeta {
        let usage = totals.usage;
        DebugMeta {
            turns: totals.turns,
            input_tokens: usage.input_tokens,
            output_tokens: usage.output_tokens,
            cached_tokens: usage.cached_tokens,
            cache_write_tokens: usage.cache_write_tokens,
            total_tokens: usage.input_tokens + usage.output_tokens,
            cost_micros: usage.cost_micros,
            cost_cents: (usage.cost_micros + 5_000) / 10_000,
        }
    }
}

/// A hydrated session.
///
/// Equal to the copy in memory of the worker that committed its last step, except for messages that one of the two has left out
/// ([`LeftOut`]). Tests compare [`Session::apply`] with the store's `hydrate`.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    pub session_id: SessionId,
    pub conversation_id: ConversationId,
    /// The session that this one was forked from.
    pub parent_session_id: Option<SessionId>,
    pub space_id: String,
    pub mailbox_id: String,
    pub trigger_type: String,
    /// Name of the agent in the configuration.
    pub agent: String,
    /// The session's own rules, which override the configuration.
    pub policy: SessionPolicy,
    /// The system prompt and tools of every request. `None` in sessions from before prefixes were pinned.
    pub prefix: Option<Prefix>,
    pub status: SessionStatus,
    pub cancel_requested: bool,
    /// The reason for the cancel request, if the requester gave one.
    pub cancel_reason: Option<String>,
    /// Every writer other than the lease holder increments it when its write changes what [`crate::plan`] sees.
    pub wake_seq: i64,
    /// The conversation's newest message number before this session's first record.
    pub base_message_number: i64,
    /// The newest message number that this session has used. While it rests, other sessions may have used later numbers.
    pub last_message_number: i64,
    /// The newest message number of a committed step.
    pub to_message_number: i64,
    pub last_event_seq: i64,
    /// Number of the newest committed step. The next step has the number after it.
    pub last_step_number: i64,
    pub totals: Totals,
    pub state: State,
    /// The newest rebase, which says where the context begins. The journal has all of them.
    pub rebase: Option<Rebase>,
    /// Number of summaries that failed since the last success, or since the run last began: a run also begins after
    /// each pause.
    pub compaction_failures: i64,
    /// The newest snapshot of its files. `None`: no step has changed them.
    pub workspace: Option<Snapshot>,
    pub run: Option<Run>,
    pub seeds: Vec<Seed>,
    /// In order. Without those of `left_out`.
    pub records: Vec<Record>,
    /// `None`: all messages are here.
    pub left_out: Option<Arc<LeftOut>>,
    /// Ledger rows whose results are not in `records` yet, in the order of the asking message, then of the
    /// call id.
    pub calls: Vec<Call>,
    pub inbox: Vec<InboxMessage>,
    /// Model calls of the open step that a worker began and did not finish, in order.
    pub interrupted: Vec<InterruptedCall>,
}

/// An open turn: an assistant message with tool calls that have no result in the transcript yet.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenTurn<'a> {
    pub record: &'a Record,
    /// The calls without a result, in the order in which they were asked for.
    pub without_result: Vec<&'a ToolCall>,
}

impl Session {
    /// Returns the turn whose tool calls still lack results.
    pub fn open_turn(&self) -> Option<OpenTurn<'_>> {
        let at = self.records.iter().rposition(|record| record.tool_calls().next().is_some())?;
        let record = &self.records[at];
        let with_result: Vec<&CallId> = self.records[at + 1..]
            .iter()
            .flat_map(Record::tool_results)
            .map(|result| &result.call_id)
            .collect();
        let without_result: Vec<&ToolCall> =
            record.tool_calls().filter(|call| !with_result.contains(&&call.call_id)).collect();
        (!without_result.is_empty()).then_some(OpenTurn { record, without_result })
    }

    /// Returns the ledger row of `call_id`, or `None` if its result is in the transcript or the call is
    /// unknown.
    pub fn call(&self, call_id: &CallId) -> Option<&Call> {
        self.calls.iter().find(|call| &call.call_id == call_id)
    }

    /// Returns whether a call waits until a person approves it.
    pub fn awaits_approval(&self) -> bool {
        self.calls.iter().any(|call| call.status == CallStatus::Unapproved)
    }

    /// Returns whether the newest message of the transcript still needs a reply of the model.
    pub fn awaits_model(&self) -> bool {
        let said = self.records.iter().rev().find(|record| !record.is_summary());
        said.is_some_and(|record| matches!(record.role, Role::User | Role::Tool))
    }

    /// Returns whether this session has written files. Then its workspace must exist.
    pub fn has_files(&self) -> bool {
        self.state.keys().any(|key| key.starts_with(crate::derive::FILE_PREFIX))
    }

    /// Returns the trigger type whose reply rules apply: the session's own, or its source's if it was made
    /// from another one.
    pub fn replies_as(&self) -> &str {
        self.policy.replies_as.as_deref().unwrap_or(&self.trigger_type)
    }

    /// Returns whether the session replies by mail. Otherwise people read its replies in a chat.
    pub fn replies_by_mail(&self) -> bool {
        crate::trigger::replies_by_mail(self.replies_as())
    }

    /// Figures about the committed steps.
    pub fn debug_meta(&self) -> DebugMeta {
        DebugMeta::of(&self.totals)
    }
}

/// Status of a ledger row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CallStatus {
    /// The model asked for it. A call with effects has not run. A pure call or a dry run may have run: neither is ever `started`.
    Invoked,
    /// It may have run.
    Started,
    Done,
    Failed,
    /// It may or may not have taken effect.
    Uncertain,
    /// The call asks the user a question, which has no answer yet.
    Waiting,
    /// It may not run before a person approves it. It never ran.
    Unapproved,
    /// Closed without running: its run was cancelled or replaced.
    Abandoned,
}

impl CallStatus {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            CallStatus::Invoked => "invoked",
            CallStatus::Started => "started",
            CallStatus::Done => "done",
            CallStatus::Failed => "failed",
            CallStatus::Uncertain => "uncertain",
            CallStatus::Waiting => "waiting",
            CallStatus::Unapproved => "unapproved",
            CallStatus::Abandoned => "abandoned",
        }
    }

    /// Returns whether a call in this status may have taken effect if it has no outcome.
    pub fn may_have_run(self) -> bool {
        match self {
            CallStatus::Started | CallStatus::Done | CallStatus::Failed | CallStatus::Uncertain => true,
            CallStatus::Invoked | CallStatus::Waiting | CallStatus::Unapproved | CallStatus::Abandoned => {
                false
            }
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<CallStatus> {
        Some(match word {
            "invoked" => CallStatus::Invoked,
            "started" => CallStatus::Started,
            "done" => CallStatus::Done,
            "failed" => CallStatus::Failed,
            "uncertain" => CallStatus::Uncertain,
            "waiting" => CallStatus::Waiting,
            "unapproved" => CallStatus::Unapproved,
            "abandoned" => CallStatus::Abandoned,
            _ => return None,
        })
    }
}

/// A ledger row whose result is not in the transcript yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub call_id: CallId,
    pub effect: Effect,
    pub status: CallStatus,
    /// Set once the call has settled.
    pub outcome: Option<CallOutcome>,
}

/// Content of a settled call, as the ledger keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallOutcome {
    pub content: String,
    #[serde(default)]
    pub is_error: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
}

/// The change of a ledger row when a call ends or its question waits.
#[derive(Clone, Debug, PartialEq)]
pub struct CallUpdate {
    pub call_id: CallId,
    pub status: CallStatus,
    /// Number of the record with the result. `None` while there is no result: a question waits, or a person
    /// must decide.
    pub message_number: Option<i64>,
}
