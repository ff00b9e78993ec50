//! The rows of a bundle, one type for each section. Fields are written in the order of their declaration.
//!
//! Times look like `2026-01-31T12:00:00.000000Z`, bodies are JSON, ids and numbers are those of the database.

use crate::effect::Effect;
use crate::inbox::Acceptance;
use crate::record::{Attachment, Block, Role};
use crate::session::{CallOutcome, CallStatus, SessionStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The session's row, with columns of its conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionRow {
    pub session_id: String,
    /// As stored: `space/id`.
    pub conversation_id: String,
    pub space_id: String,
    pub mailbox_id: String,
    pub trigger_type: String,
    pub trigger_id: String,
    pub agent: String,
    pub model_id: String,
    pub model_context_window: i32,
    pub status: SessionStatus,
    pub cancel_requested: bool,
    pub cancel_reason: Option<String>,
    pub error: Option<String>,
    pub policy: Option<Map<String, Value>>,
    pub tool_names: Option<Vec<String>>,
    pub prefix_sha256: Option<String>,
    pub initial_state: Map<String, Value>,
    pub state: Map<String, Value>,
    pub seed_message_count: i32,
    pub base_message_number: i64,
    pub last_message_number: i64,
    pub to_message_number: i64,
    pub last_step_number: i64,
    pub last_event_seq: i64,
    pub total_turns: i32,
    pub total_input_tokens: i64,
    pub total_output_tokens: i64,
    pub total_cached_tokens: i64,
    pub total_cache_write_tokens: i64,
    pub total_cost_micros: i64,
    pub started_at: String,
    pub completed_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository_id: Option<String>,
    pub parent_session_id: Option<String>,
    pub forked_from_message_id: Option<String>,
    pub parent_conversation_id: Option<String>,
    /// Number of the parent's last message that the fork contains.
    pub forked_at_message_number: Option<i64>,
    /// Number of the parent's last step at the fork. The session's own steps are numbered from there.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub base_step_number: i64,
    /// The latest change to the part of the transcript that the model sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebase: Option<Value>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub compaction_failures: i64,
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

/// A seed, numbered from 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeedRow {
    pub ordinal: i32,
    /// `system`, `user` or `assistant`.
    pub role: Role,
    pub content: String,
    pub is_new: bool,
    pub timestamp: Option<i64>,
    pub details: Option<Value>,
}

/// A run. Ordered by creation, then id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRow {
    pub run_id: String,
    pub status: RunStatus,
    pub prompt_message_number: Option<i64>,
    pub steps: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub tool_calls: i64,
    pub error: Option<String>,
    pub created_at: String,
    pub started_at: Option<String>,
    pub completed_at: Option<String>,
}

/// Status of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    Queued,
    Running,
    WaitingInput,
    NeedsAttention,
    Completed,
    Failed,
    Cancelled,
}

impl RunStatus {
    /// The stored word. Sessions use the same words.
    pub fn as_str(self) -> &'static str {
        match self {
            RunStatus::Queued => "queued",
            RunStatus::Running => "running",
            RunStatus::WaitingInput => "waiting_input",
            RunStatus::NeedsAttention => "needs_attention",
            RunStatus::Completed => "completed",
            RunStatus::Failed => "failed",
            RunStatus::Cancelled => "cancelled",
        }
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordRow {
    pub message_number: i64,
    pub message_id: String,
    pub run_id: String,
    pub step_number: i64,
    pub role: Role,
    pub content: Vec<Block>,
    pub internal: bool,
    pub details: Map<String, Value>,
    pub created_at: String,
}

/// The cached result of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRow {
    pub step_number: i64,
    pub run_id: String,
    pub from_message_number: i64,
    pub to_message_number: i64,
    pub finish_reason: String,
    pub input_tokens: i32,
    pub output_tokens: i32,
    pub cached_tokens: i32,
    pub cache_write_tokens: i32,
    pub cost_micros: i64,
    pub executed_local_tool_count: i32,
    pub attempt: i32,
    pub event_seq: i64,
    pub started_at: String,
    pub committed_at: String,
    /// The tree of the workspace after the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_sha256: Option<String>,
}

/// A journal entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventRow {
    pub seq: i64,
    pub ts: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub run_id: Option<String>,
    pub step_number: Option<i64>,
    pub payload: Value,
    pub dedupe_key: Option<String>,
}

/// A ledger row. Ordered by the message that asked, then call id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallRow {
    pub call_id: String,
    pub run_id: String,
    pub step_number: i64,
    pub message_number: i64,
    pub result_message_number: Option<i64>,
    pub name: String,
    pub args_sha256: String,
    pub effect: Effect,
    pub status: CallStatus,
    pub attempts: i32,
    pub outcome: Option<CallOutcome>,
    pub receipt: Option<Value>,
    pub resolution: Option<Value>,
    pub started_at: Option<String>,
    pub settled_at: Option<String>,
}

/// An outgoing message, numbered from 1 in the order of sending.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeliveryRow {
    pub place: i64,
    pub delivery_id: String,
    pub channel: String,
    pub source_key: String,
    pub content: Value,
    pub status: DeliveryStatus,
    pub attempt: i32,
    pub not_after: Option<String>,
    pub receipt: Option<Value>,
    pub last_error: Option<String>,
    pub resolution: Option<Value>,
    /// Recipients that it did not reach: `[{"recipient", "how", "status", "reason"}]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub undelivered: Vec<Value>,
    pub created_at: String,
    pub settled_at: Option<String>,
}

/// Status of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryStatus {
    Queued,
    Sending,
    Sent,
    Failed,
    Expired,
    Uncertain,
}

impl DeliveryStatus {
    /// The stored word.
    pub fn as_str(self) -> &'static str {
        match self {
            DeliveryStatus::Queued => "queued",
            DeliveryStatus::Sending => "sending",
            DeliveryStatus::Sent => "sent",
            DeliveryStatus::Failed => "failed",
            DeliveryStatus::Expired => "expired",
            DeliveryStatus::Uncertain => "uncertain",
        }
    }
}

/// An incoming message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InboxRow {
    pub inbox_id: i64,
    pub client_key: String,
    pub content: String,
    pub content_sha256: String,
    pub sender: Option<String>,
    /// The files that came with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
    pub status: InboxStatus,
    pub run_id: String,
    pub outcome: Acceptance,
    pub created_at: String,
}

/// Whether an incoming message is in the transcript yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InboxStatus {
    Pending,
    Drained,
}

impl InboxStatus {
    /// The stored word.
    pub fn as_str(self) -> &'static str {
        match self {
            InboxStatus::Pending => "pending",
            InboxStatus::Drained => "drained",
        }
    }
}

/// A part of a blob: [`PART_BYTES`](super::PART_BYTES), or the rest. Blobs are ordered by hash, parts by
/// offset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobPart {
    pub sha256: String,
    pub media_type: String,
    /// Size of the whole blob.
    pub bytes: i64,
    /// Offset of this part in the blob.
    pub at: i64,
    pub base64: String,
}
