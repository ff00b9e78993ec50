//! A copy of a session that its worker keeps between two turns.

use super::parts::Parts;
use crate::Result;
use serde_json::Value;
use std::mem::size_of;
use std::sync::Arc;
use wakeful_workflow::id::{CallId, SessionId};
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::{Block, Outline, Record};
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::{LeftOut, Session};

/// A session that was read to be worked on, and perhaps kept.
#[derive(Clone, Debug)]
pub struct Hydrated {
    pub session: Session,
    /// `None`: it may not be kept.
    basis: Option<String>,
    weighed: Weighed,
}

/// What a later claim of a session need not read again.
///
/// Most of a long session never changes: its messages, its seeds and its pinned prefix. A copy has these and nothing else, and of the
/// messages only what [`Session::leave_out`] keeps.
/// [`Store::catch_up`](crate::Store::catch_up) reads all other parts as hydration does, and the messages that the copy lacks. So what
/// others did meanwhile (steps of other workers, messages, cancels, answers, a rebuilt state, another policy) needs no check: it is read.
///
/// Only the kept parts need one. The logs are append-only: an erasure is the one act that deletes messages, and its first transaction
/// deletes the session's row. So the copy is good while these stay as they were (`basis`, and the last message):
///
/// - the row. One that was made again under the same id has another `ordinal`, and one of a restored dump is in another table;
/// - the hash of the prefix, and the prefix itself;
/// - the number of seeds: a chat about a notice gets more of them when its first run starts;
/// - the server, by the time of its start. One that takes over after a failover may lack the last commits, and have others in
///   their stead. For the same reason the copy's last message is read again, and must be the same.
///
/// If one of them differs, the copy is dropped, and the session is hydrated. A session whose texts are sealed is never kept.
///
/// The fences of the step commit hold besides: a step that was planned on an old copy would be refused as `Moved`. But no model call
/// relies on that.
#[derive(Clone, Debug)]
pub struct Warm {
    session_id: SessionId,
    basis: String,
    prefix: Option<Prefix>,
    seeds: Vec<Seed>,
    records: Vec<Record>,
    left_out: Option<Arc<LeftOut>>,
    weighed: Weighed,
}

/// The memory of the first records of a session. They are weighed once, and not in each turn.
#[derive(Clone, Copy, Debug, Default)]
struct Weighed {
    records: usize,
    bytes: usize,
}

/// A session that was not read: the message that made it has left it with its job. What its row says is not known, so it is not
/// kept.
impl From<Session> for Hydrated {
    fn from(session: Session) -> Hydrated {
        Hydrated::new(session, None)
    }
}

impl Hydrated {
    pub(super) fn new(session: Session, basis: Option<String>) -> Hydrated {
        Hydrated { session, basis, weighed: Weighed::default() }
    }

    /// Drops the messages that the newest rebase leaves out: see [`Session::leave_out`].
    pub fn leave_out(&mut self) {
        if self.session.leave_out() {
            self.weighed = Weighed::default();
        }
    }

    /// Keeps the parts that do not change. The session's messages must be those of its last commit: of a commit whose outcome is
    /// unknown, nothing may be kept. `None`: nothing of this session may be.
    pub fn keep(self) -> Option<Warm> {
        let basis = self.basis?;
        let Session { session_id, prefix, seeds, records, left_out, .. } = self.session;
        Some(Warm { session_id, basis, prefix, seeds, records, left_out, weighed: self.weighed }.weighed())
    }
}

impl Warm {
    pub fn session_id(&self) -> &SessionId {
        &self.session_id
    }

    /// About how much memory the copy takes.
    pub fn bytes(&self) -> usize {
        let seeds: usize = self.seeds.iter().map(|seed| size_of::<Seed>() + seed.content.len()).sum();
        let ids = self.left_out.iter().flat_map(|left_out| &left_out.call_ids);
        let ids: usize = ids.map(|id| 2 * size_of::<CallId>() + id.as_str().len()).sum();
        size_of::<Warm>() + seeds + ids + self.weighed.bytes
    }

    fn weighed(mut self) -> Warm {
        // A session that was read again may have fewer messages than were weighed.
        if self.weighed.records > self.records.len() {
            self.weighed = Weighed::default();
        }
        if self.weighed.records == 0 {
            self.weighed.bytes = self.prefix.as_ref().map_or(0, bytes_of_prefix);
        }
        let new = &self.records[self.weighed.records.min(self.records.len())..];
        self.weighed.bytes += new.iter().map(bytes_of_record).sum::<usize>();
        self.weighed.records = self.records.len();
        self
    }

    /// The number of the last message of the copy. It is read again.
    pub(super) fn last(&self) -> i64 {
        self.records.last().map_or(i64::MIN, |record| record.message_number)
    }

    /// Joins what was read with what was kept. `None`: they do not fit.
    pub(super) fn joined(mut self, read: Parts) -> Result<Option<Hydrated>> {
        let Parts { fixed, changing, prefix, records } = read;
        let has_prefix = fixed.prefix_sha256.is_some() == prefix.is_some();
        if fixed.basis().as_ref() != Some(&self.basis) || !has_prefix {
            return Ok(None);
        }
        let mut newer = records.into_iter();
        if let Some(last) = self.records.last()
            && newer.next().as_ref() != Some(last)
        {
            return Ok(None);
        }
        self.records.extend(newer);
        let session = fixed.session(changing, self.prefix, self.seeds, (self.records, self.left_out))?;
        Ok(Some(Hydrated { session, basis: Some(self.basis), weighed: self.weighed }))
    }
}

fn bytes_of_prefix(prefix: &Prefix) -> usize {
    let tools = prefix.tools.iter().map(|tool| {
        size_of_val(tool) + tool.name.len() + tool.description.len() + bytes_of(&tool.parameters)
    });
    prefix.system.len() + tools.sum::<usize>()
}

/// Counts what the model sees, which the message knows already, and what it does not see of a tool's result. A message without
/// blocks is an outline: its texts are not here.
fn bytes_of_record(record: &Record) -> usize {
    let texts = if record.content.is_empty() { 0 } else { record.content.bytes() };
    let details = record.tool_results().filter_map(|result| result.details.as_ref());
    let attachments =
        record.details.attachments.iter().map(|one| size_of_val(one) + one.file_name.len() + 128);
    size_of::<Record>()
        + record.content.len() * size_of::<Block>()
        + size_of::<Outline>()
        + texts
        + details.map(bytes_of).sum::<usize>()
        + attachments.sum::<usize>()
}

fn bytes_of(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(bytes_of).sum(),
            Value::Object(fields) => {
                fields.iter().map(|(name, value)| size_of::<String>() + name.len() + bytes_of(value)).sum()
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}
