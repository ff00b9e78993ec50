//! The values that one commit writes, as columns.

use super::Performance;
use crate::encryption::{SEALED, Seal};
use crate::generation::NewGeneration;
use crate::json::to_json;
use crate::queue::Lease;
use crate::{Error, Result};
use wakeful_workflow::advance::{Next, OpenedCall, Transition};
use wakeful_workflow::blob::Blob;
use wakeful_workflow::derive::NewDelivery;
use wakeful_workflow::failure::Failure;
use wakeful_workflow::record::{Block, Usage};
use wakeful_workflow::session::{CallStatus, CallUpdate, Session};

/// What a block of a message has beside its text.
const BLOCK_BYTES: usize = 256;

/// The rows of one commit. It owns its values, because another task may write them.
#[derive(Debug, Default)]
pub(super) struct Rows {
    // The fence: the session's row must be as it was planned on, and this worker must hold the job's lease.
    pub session_id: String,
    pub space_id: String,
    pub conversation_id: String,
    pub last_message_number: i64,
    pub step_number: i64,
    pub job_id: i64,
    pub lease: i64,

    pub trace_context: Option<String>,
    pub worker_id: String,
    pub run_id: String,

    /// See [`Transition::is_progress`].
    pub progress: bool,
    pub status: Option<&'static str>,
    /// The end or the pause of the run, if this commit closes it.
    pub closes: Option<CloseRow>,
    /// The failure that it closes with: none or one.
    pub failures: Vec<FailureRow>,
    pub state: Option<String>,
    pub rebase: Option<String>,
    pub compaction_failures: Option<i64>,

    pub records: Vec<RecordRow>,
    /// Type and payload.
    pub events: Vec<(String, String)>,
    pub opened: Vec<OpenedRow>,
    pub closed: Vec<ClosedRow>,
    pub generation_over: bool,
    pub step: Option<StepRow>,
    pub intent: Option<IntentRow>,
}

#[derive(Debug)]
pub(super) struct CloseRow {
    pub error: Option<String>,
    /// The run waits for a person, so it has no end yet.
    pub pauses: bool,
    /// The state that the close's checkpoint points at.
    pub snapshot: Blob,
    /// Of an encrypted session: its data key, and the snapshot's bytes as they are stored.
    pub sealed_snapshot: Option<(String, Vec<u8>)>,
    /// What the session's `wake_seq` must still be, if the statement is to close the run without locks. `None`:
    /// the caller holds the locks and closes the run.
    pub wake_seq: Option<i64>,
}

/// A failure as the groups of errors count it. They are of several conversations, so the words of an encrypted one are not in
/// them.
#[derive(Debug)]
pub(super) struct FailureRow {
    pub fingerprint: String,
    pub kind: String,
    pub source: String,
    pub text: String,
    pub error: Option<String>,
}

impl FailureRow {
    fn new(seal: &Seal, failure: &Failure, error: Option<&str>) -> FailureRow {
        FailureRow {
            fingerprint: failure.fingerprint.clone(),
            kind: failure.kind.clone(),
            source: failure.source.clone(),
            text: if seal.is_on() { SEALED.to_owned() } else { failure.text.clone() },
            error: error.map(|error| seal.elsewhere(error).into_owned()),
        }
    }
}

#[derive(Debug)]
pub(super) struct RecordRow {
    pub number: i64,
    pub role: &'static str,
    pub content: String,
    pub internal: bool,
    pub details: String,
}

#[derive(Debug)]
pub(super) struct OpenedRow {
    /// The message that asks for the call.
    pub message_number: i64,
    pub call_id: String,
    pub name: String,
    pub args_sha256: String,
    pub effect: &'static str,
    /// Its status, unless this commit ends it.
    pub opens: CallStatus,
    /// The commit starts the call: the nonce, and how long the tool may run.
    pub nonce: Option<String>,
    pub timeout_s: f64,
    /// The commit also has the result of the call.
    pub ended: Option<ClosedRow>,
}

impl OpenedRow {
    pub fn status(&self) -> &'static str {
        match &self.ended {
            Some(ended) => ended.status,
            None => self.opens.as_str(),
        }
    }
}

#[derive(Debug)]
pub(super) struct ClosedRow {
    pub call_id: String,
    pub status: &'static str,
    pub message_number: Option<i64>,
}

#[derive(Debug)]
pub(super) struct StepRow {
    pub from_message_number: i64,
    pub to_message_number: i64,
    pub finish_reason: &'static str,
    pub usage: Usage,
    pub tool_calls: i32,
    pub attempt: i32,
    pub elapsed_s: f64,
    /// The tree of the workspace, if a step has ever changed it.
    pub workspace_sha256: Option<String>,
}

#[derive(Debug)]
pub(super) struct IntentRow {
    pub generation_id: String,
    pub step_number: i64,
    pub attempt: i64,
    pub model: String,
    pub request_sha256: String,
    pub base_sha256: String,
    pub repairs: i64,
    pub resumes: Option<String>,
    pub purpose: &'static str,
    pub context_strategy: &'static str,
}

/// Rows that few commits write. They can be large, so they are borrowed.
#[derive(Debug)]
pub(super) struct Rare<'a> {
    pub deliveries: &'a [NewDelivery],
    /// Inbox rows that this commit takes into the transcript.
    pub drained: &'a [i64],
    pub blobs: &'a [Blob],
    pub seal: &'a Seal,
}

impl<'a> Rare<'a> {
    pub fn new(seal: &'a Seal, transition: &'a Transition) -> Rare<'a> {
        Rare {
            seal,
            deliveries: &transition.deliveries,
            drained: &transition.inbox_drained,
            blobs: &transition.blobs,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.deliveries.is_empty() && self.drained.is_empty() && self.blobs.is_empty()
    }
}

impl Rows {
    /// `seal` is the session's.
    pub fn new(
        seal: &Seal,
        lease: &Lease,
        session: &Session,
        transition: &Transition,
        performance: &Performance<'_>,
    ) -> Result<Rows> {
        let closing = match &transition.next {
            Next::Close(closing) => Some(closing),
            Next::SameStep | Next::NextStep => None,
        };
        let events = transition.events.iter().chain(closing.iter().flat_map(|closing| &closing.events));
        let records = transition.records.iter().map(|record| {
            Ok(RecordRow {
                number: record.message_number,
                role: record.role.as_str(),
                content: seal.json(content_to_json(&record.content)?)?,
                internal: record.internal,
                details: seal.json(to_json(&record.details)?)?,
            })
        });
        let opened_by = transition
            .records
            .iter()
            .rfind(|record| record.is_reply())
            .map_or(session.last_message_number, |reply| reply.message_number);
        let closed = |call: &CallUpdate| ClosedRow {
            call_id: call.call_id.as_str().to_owned(),
            status: call.status.as_str(),
            message_number: call.message_number,
        };
        let ended = |call: &OpenedCall| {
            transition.call_updates.iter().find(|update| update.call_id == call.call_id).map(closed)
        };
        let opened_before =
            |update: &&CallUpdate| transition.calls_opened.iter().all(|call| call.call_id != update.call_id);
        let state = (!transition.state_updates.is_empty()).then(|| {
            let updates = transition.state_updates.iter();
            let updates = updates.map(|update| (update.key.clone(), update.value.clone())).collect();
            serde_json::Value::Object(seal.state(updates)).to_string()
        });
        let rebase = transition.rebase.as_ref().map(serde_json::to_string).transpose();
        let step = transition.step.as_ref().map(|step| StepRow {
            from_message_number: step.from_message_number,
            to_message_number: step.to_message_number,
            finish_reason: step.finish_reason.as_str(),
            usage: step.usage,
            tool_calls: step.executed_local_tool_count as i32,
            attempt: performance.attempt,
            elapsed_s: performance.elapsed_s,
            workspace_sha256: transition
                .workspace()
                .or(session.workspace.as_ref())
                .map(|snapshot| snapshot.tree_sha256.clone()),
        });
        Ok(Rows {
            session_id: session.session_id.as_str().to_owned(),
            space_id: session.space_id.clone(),
            conversation_id: session.conversation_id.as_str().to_owned(),
            last_message_number: session.last_message_number,
            step_number: transition.step_number,
            job_id: lease.job_id,
            lease: lease.token,
            trace_context: lease.trace_context.clone(),
            worker_id: lease.worker_id.to_string(),
            run_id: transition.run_id.as_str().to_owned(),
            progress: transition.is_progress(),
            status: transition.status().map(|status| status.as_str()),
            closes: closing.map(|closing| CloseRow {
                error: closing.error.as_deref().map(|error| seal.error(error).into_owned()),
                pauses: closing.status.is_paused(),
                snapshot: closing.snapshot.clone(),
                sealed_snapshot: seal
                    .key_id()
                    .map(|key_id| (key_id.to_owned(), seal.bytes(&closing.snapshot.bytes))),
                wake_seq: None,
            }),
            failures: closing
                .iter()
                .filter_map(|closing| closing.failure.as_deref())
                .map(|failure| FailureRow::new(seal, failure, closing.and_then(|one| one.error.as_deref())))
                .collect(),
            state,
            rebase: rebase.map_err(|error| Error::corrupt("rebase", error))?,
            compaction_failures: transition.compaction_failures,
            records: records.collect::<Result<_>>()?,
            events: events.map(|event| seal.entry(event)).collect(),
            opened: transition
                .calls_opened
                .iter()
                .map(|call| OpenedRow {
                    message_number: opened_by,
                    call_id: call.call_id.as_str().to_owned(),
                    name: call.name.clone(),
                    args_sha256: call.args_sha256.clone(),
                    effect: call.effect.as_str(),
                    opens: call.status(),
                    nonce: call.start.as_ref().map(|start| start.nonce.clone()),
                    timeout_s: call.start.as_ref().map_or(0.0, |start| start.timeout_s as f64),
                    ended: ended(call),
                })
                .collect(),
            closed: transition.call_updates.iter().filter(opened_before).map(closed).collect(),
            generation_over: transition.generation_over,
            step,
            intent: if closing.is_none() { performance.intent.as_ref().map(intent) } else { None },
        })
    }

    /// Lets the statement close the run by itself, if the session still has this `wake_seq`.
    pub fn unlocked(mut self, wake_seq: i64) -> Rows {
        if let Some(close) = &mut self.closes {
            close.wake_seq = Some(wake_seq);
        }
        self
    }

    /// The `wake_seq` that a close without locks was planned on.
    pub fn planned_wake_seq(&self) -> Option<i64> {
        self.closes.as_ref().and_then(|close| close.wake_seq)
    }

    /// Bytes that its texts send to the database, without those of bounded length.
    pub fn bytes(&self) -> usize {
        let records = self.records.iter().map(|record| record.content.len() + record.details.len());
        let events = self.events.iter().map(|(_, payload)| payload.len());
        let snapshot = self.closes.as_ref().map_or(0, |close| close.snapshot.bytes.len());
        records.chain(events).sum::<usize>() + self.state.as_ref().map_or(0, String::len) + snapshot
    }
}

/// Most of a content is texts, so the size of its JSON is known approximately.
fn content_to_json(content: &[Block]) -> Result<String> {
    let bytes = |block: &Block| match block {
        Block::Text { text } => text.len(),
        Block::ToolResult(result) => result.content.len(),
        Block::ToolCall(_) | Block::Provider { .. } => 0,
    };
    let size = content.iter().map(|block| bytes(block) + BLOCK_BYTES).sum::<usize>();
    let mut json = Vec::with_capacity(size + size / 8);
    serde_json::to_writer(&mut json, content).map_err(|error| Error::corrupt("message", error))?;
    String::from_utf8(json).map_err(|error| Error::corrupt("message", error))
}

fn intent(new: &NewGeneration<'_>) -> IntentRow {
    IntentRow {
        generation_id: new.generation_id.as_str().to_owned(),
        step_number: new.step_number,
        attempt: new.attempt,
        model: new.model.to_owned(),
        request_sha256: new.request_sha256.to_owned(),
        base_sha256: new.base_sha256.to_owned(),
        repairs: new.repairs,
        resumes: new.resumes.map(|resumes| resumes.as_str().to_owned()),
        purpose: new.purpose.as_str(),
        context_strategy: new.context_strategy.as_str(),
    }
}
