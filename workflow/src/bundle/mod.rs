//! The bundle: one session as lines of JSON, to be carried to another database.
//!
//! The first line is the header. Then comes one line per row, in the order of [`Section`]. The last line is
//! the SHA-256 of all bytes before it. A row has exactly one form: the reader serialises what it parsed, and
//! refuses a line that differs. This rule finds unknown fields, duplicate keys, other spellings of a number
//! and omitted fields. It also makes equal states give equal bytes.
//!
//! A bundle does not contain what belongs to workers (leases, worker ids, nonces, jobs), model calls in
//! flight, or the time of the export. An imported session equals the exported one if [`normal::normal`] gives
//! the same text for both.
//!
//! To add a column, add a field to `row.rs` that is skipped when empty, and a line to the store's `export`
//! and `import`.
#![doc = include_str!("README.md")]

pub mod check;
pub mod import;
pub mod normal;
pub mod redact;
mod row;
mod scan;

pub use check::{Checker, Refused};
pub use row::{
    BlobPart, CallRow, DeliveryRow, DeliveryStatus, EventRow, InboxRow, InboxStatus, RecordRow, RunRow,
    RunStatus, SeedRow, SessionRow, StepRow,
};

use crate::event::Event;
use crate::record::Block;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version that is written, and the only one that can be read.
pub const VERSION: i64 = 1;

/// Bytes of a blob per line. Every part except a blob's last has this size.
pub const PART_BYTES: usize = 128 << 10;

/// Maximum size of a blob. An import holds one whole blob in memory to write it at once. The files of the
/// largest mail fit.
pub const BLOB_BYTES: i64 = 40 << 20;

/// Maximum size of a bundle. Everything else has fixed bounds, so that a check needs little memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The whole bundle, unpacked.
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
    /// Whether texts, arguments, results and states are replaced by their sizes and hashes.
    pub redacted: bool,
    /// Where the logs end in this bundle.
    pub cut: Cut,
    pub counts: Counts,
    /// Ranges of message numbers that belong to other sessions of the conversation, as (first, last).
    pub gaps: Vec<(i64, i64)>,
}

/// The newest row of each log when the bundle was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    pub message_number: i64,
    pub step_number: i64,
    pub event_seq: i64,
}

/// How many rows of each kind follow. Blobs are not counted: each blob that a row refers to follows exactly
/// once.
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

    /// The line as written to a bundle, newline included.
    pub fn to_bytes(&self) -> Vec<u8> {
        line(self)
    }
}

impl Section {
    /// The key that its lines begin with.
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

/// Serialises `value` as one line, newline included. Also used for the header and the trailer.
pub fn line(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(value).expect("rows of text, numbers and JSON values serialise");
    bytes.push(b'\n');
    bytes
}

/// The hashes of the blobs that a row refers to. A new kind of reference needs a line here.
pub fn blobs_of(line: &Line) -> Vec<&str> {
    match line {
        Line::Session(row) => row.prefix_sha256.as_deref().into_iter().collect(),
        Line::Event(row) => match row.kind.as_str() {
            "checkpoint" => row.payload["state_sha256"].as_str().into_iter().collect(),
            "context_update" => row.payload["value_sha256"].as_str().into_iter().collect(),
            "TOOL_RESULT" => row.payload["output_sha256"].as_str().into_iter().collect(),
            "WORKSPACE_SNAPSHOT" => {
                let packs = row.payload["packs"].as_array().into_iter().flatten();
                packs.filter_map(|pack| pack["sha256"].as_str()).collect()
            }
            _ => Vec::new(),
        },
        // A fork's records may refer to outputs whose events are in the parent's journal, so read the records
        // too.
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

/// A journal entry's payload in its one form. An unknown entry keeps its payload unchanged.
pub fn payload_of(kind: &str, payload: Value) -> Value {
    match Event::from_row(kind, payload.clone()) {
        Ok(event) => event.to_row().1,
        Err(_) => payload,
    }
}
