//! The bundle: one session as lines of JSON, to be carried to another database.
//!
//! The header says what is inside, then one line a row, section after section in the order of [`Section`], and last
//! the SHA-256 of every byte before that line. A row has exactly one form: a reader writes what it has read and refuses a
//! line that differs. So fields that it does not know, keys that come twice, other spellings of a number and what is left
//! out are all found by one rule, and the same state always gives the same bytes.
//!
//! Not in a bundle: what belongs to workers (leases, worker ids, nonces, jobs), model calls in flight, and the time of the
//! export. An imported session equals the one that was exported when [`normal::normal`] makes the same of both.
//!
//! To add a column: a field below that is skipped where it is empty, and its line in the store's `export` and `import`.

pub mod check;
pub mod import;
pub mod normal;
pub mod redact;
mod scan;

pub use check::{Checker, Refused};

use crate::event::Event;
use crate::record::{Attachment, Block, Role};
use crate::session::{CallOutcome, CallStatus, SessionStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The version that is written, and the only one that is read.
pub const VERSION: i64 = 1;

/// How many bytes of a blob one line holds. Every part but a blob's last is as long.
pub const PART_BYTES: usize = 128 << 10;

/// A blob is no larger: an import holds one whole, to write it at once.
pub const BLOB_BYTES: i64 = 16 << 20;

/// What a bundle may be at most. Everything else has fixed bounds, so that a check needs little memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The whole, unpacked.
    pub bytes: u64,
    /// One line.
    pub line_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { bytes: 256 << 20, line_bytes: 8 << 20 }
    }
}

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The version.
    pub wakeful_bundle: i64,
    pub session_id: String,
    /// Texts, arguments, results and states are replaced by their sizes and hashes.
    pub redacted: bool,
    /// Up to where the logs were taken.
    pub cut: Cut,
    pub counts: Counts,
    /// Message numbers that belong to other sessions of the conversation: first and last of each stretch.
    pub gaps: Vec<(i64, i64)>,
}

/// The newest row of each log when the bundle was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    pub message_number: i64,
    pub step_number: i64,
    pub event_seq: i64,
}

/// How many rows of each kind follow. Blobs are those that the rows point at, each once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub seeds: i64,
    pub runs: i64,
    pub records: i64,
    pub steps: i64,
    pub events: i64,
    pub calls: i64,
    pub deliveries: i64,
    pub inbox: i64,
}

/// The last line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trailer {
    pub sha256: String,
}

/// A line between the first and the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    Session(Box<SessionRow>),
    Seed(SeedRow),
    Run(RunRow),
    Record(RecordRow),
    Step(StepRow),
    Event(EventRow),
    Call(CallRow),
    Delivery(DeliveryRow),
    Inbox(InboxRow),
    Blob(BlobPart),
}

/// The sections, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    Session,
    Seed,
    Run,
    Record,
    Step,
    Event,
    Call,
    Delivery,
    Inbox,
    Blob,
}

impl Line {
    /// The section that the line belongs to.
    pub fn section(&self) -> Section {
        match self {
            Line::Session(_) => Section::Session,
            Line::Seed(_) => Section::Seed,
            Line::Run(_) => Section::Run,
            Line::Record(_) => Section::Record,
            Line::Step(_) => Section::Step,
            Line::Event(_) => Section::Event,
            Line::Call(_) => Section::Call,
            Line::Delivery(_) => Section::Delivery,
            Line::Inbox(_) => Section::Inbox,
            Line::Blob(_) => Section::Blob,
        }
    }

    /// The line as it stands in a bundle, newline included.
    pub fn to_bytes(&self) -> Vec<u8> {
        line(self)
    }
}

impl Section {
    /// The word that its lines begin with.
    pub fn as_str(self) -> &'static str {
        match self {
            Section::Session => "session",
            Section::Seed => "seed",
            Section::Run => "run",
            Section::Record => "record",
            Section::Step => "step",
            Section::Event => "event",
            Section::Call => "call",
            Section::Delivery => "delivery",
            Section::Inbox => "inbox",
            Section::Blob => "blob",
        }
    }
}

/// `value` as a line. The first and the last line of a bundle are made by it too.
pub fn line(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(value).expect("rows of text, numbers and JSON values serialise");
    bytes.push(b'\n');
    bytes
}

/// The session's row, with what is known of its conversation. Times are `2026-01-31T12:00:00.000000Z`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionRow {
    pub session_id: String,
    /// As it is stored: `space/id`.
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
    /// The last message that a fork was given.
    pub forked_at_message_number: Option<i64>,
    /// Steps of the session that this one was forked from: its own begin after them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub base_step_number: i64,
    /// The newest change of what the model sees of the transcript.
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

/// Where a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    Queued,
    Running,
    WaitingInput,
    NeedsAttention,
    Completed,
    Failed,
}

impl RunStatus {
    /// The word that is stored. The words are the session's.
    pub fn as_str(self) -> &'static str {
        match self {
            RunStatus::Queued => "queued",
            RunStatus::Running => "running",
            RunStatus::WaitingInput => "waiting_input",
            RunStatus::NeedsAttention => "needs_attention",
            RunStatus::Completed => "completed",
            RunStatus::Failed => "failed",
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
    pub effect: crate::effect::Effect,
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
    pub created_at: String,
    pub settled_at: Option<String>,
}

/// Where a delivery stands.
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
    /// The word that is stored.
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

/// A message as it came in.
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
    pub outcome: InboxOutcome,
    pub created_at: String,
}

/// Whether a message that came in is in the transcript.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InboxStatus {
    Pending,
    Drained,
}

impl InboxStatus {
    /// The word that is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            InboxStatus::Pending => "pending",
            InboxStatus::Drained => "drained",
        }
    }
}

/// What its sender was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InboxOutcome {
    Queued,
    Delivered,
    NewRun,
}

impl InboxOutcome {
    /// The word that is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            InboxOutcome::Queued => "queued",
            InboxOutcome::Delivered => "delivered",
            InboxOutcome::NewRun => "new_run",
        }
    }
}

/// [`PART_BYTES`] of a blob, or its rest. Blobs are ordered by hash, parts by place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobPart {
    pub sha256: String,
    pub media_type: String,
    /// Of the whole blob.
    pub bytes: i64,
    /// Where this part begins.
    pub at: i64,
    pub base64: String,
}

/// The hashes of the blobs that a row points at. What else may point at one is a line here.
pub fn blobs_of(line: &Line) -> Vec<&str> {
    match line {
        Line::Session(row) => row.prefix_sha256.as_deref().into_iter().collect(),
        Line::Event(row) => match row.kind.as_str() {
            "checkpoint" => row.payload["state_sha256"].as_str().into_iter().collect(),
            "context_update" => row.payload["value_sha256"].as_str().into_iter().collect(),
            "TOOL_RESULT" => row.payload["output_sha256"].as_str().into_iter().collect(),
            _ => Vec::new(),
        },
        // A fork has the messages of another journal.
        Line::Record(row) => row
            .content
            .iter()
            .filter_map(|block| match block {
                Block::ToolResult(result) => result.output.as_ref().map(|output| output.sha256.as_str()),
                Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => None,
            })
            .chain(
                row.details
                    .get("attachments")
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten()
                    .filter_map(|file| file["sha256"].as_str()),
            )
            .collect(),
        Line::Inbox(row) => row.attachments.iter().map(|file| file.sha256.as_str()).collect(),
        Line::Call(_) | Line::Seed(_) | Line::Run(_) | Line::Step(_) | Line::Delivery(_) | Line::Blob(_) => {
            Vec::new()
        }
    }
}

/// A journal entry's type and payload in their one form. What is no entry that this version knows stays as it is.
pub fn payload_of(kind: &str, payload: Value) -> Value {
    match Event::from_row(kind, payload.clone()) {
        Ok(event) => event.to_row().1,
        Err(_) => payload,
    }
}
