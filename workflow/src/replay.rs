//! Replay: a session that runs another one again, and what it takes from that one's log.
//!
//! A replay is a fork: up to its cut the two have the same messages. From there on their transcripts are held side by side
//! by place, the n-th message after the cut of one against the n-th of the other. (By number they would part where two
//! sessions of one conversation took turns.) As long as who speaks is the same at every place, the two are aligned, and
//! the user's messages are given to the replay exactly where the source took them, in mid-run as well.
#![doc = include_str!("replay.md")]

use crate::context::{Rebase, Strategy};
use crate::fault::Fault;
use crate::id::CallId;
use crate::policy::{Answers, Replay};
use crate::record::{Block, Record, Role, ToolCall, ToolResult};
use crate::session::{CallStatus, Session};
use std::collections::BTreeMap;

/// What a source session's log holds for its replays.
#[derive(Clone, Debug)]
pub struct Recording {
    pub session: Session,
    /// The model calls that were answered, by the number of their answer or of the summary that they gave.
    pub calls: BTreeMap<i64, RecordedCall>,
    /// How each call of a tool ended.
    pub settled: BTreeMap<CallId, CallStatus>,
    /// Where the context began, in the order of the journal.
    rebases: Vec<Rebase>,
    /// Calls by name and arguments, in the order in which they were asked for.
    same: BTreeMap<(String, String), Vec<CallId>>,
    /// Where each result stands: index of the record, and of the block in it.
    results: BTreeMap<CallId, (usize, usize)>,
}

/// A model call as the journal has it.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedCall {
    /// `provider/model`.
    pub model: String,
    /// Hash of the bytes that were sent.
    pub request_sha256: String,
    /// How its context was selected.
    pub context_strategy: Strategy,
    /// Of a call for a summary: where the context began from then on.
    pub rebase: Option<Rebase>,
    /// How much of the answer's text was in the request already, because the call went on from a text that was cut off.
    pub prefill_bytes: usize,
}

/// A message of the user, to be given to a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The source's number of it.
    pub message_number: i64,
    pub text: String,
}

/// The source's answer at the place where the replay owes one.
#[derive(Clone, Copy, Debug)]
pub struct RecordedAnswer<'a> {
    pub record: &'a Record,
    /// `None` where the source's journal does not tell (a session of before it was kept).
    pub call: Option<&'a RecordedCall>,
}

/// What came of a tool call in the source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecordedResult<'a> {
    Settled {
        status: CallStatus,
        result: &'a ToolResult,
        /// The source's number of the message that holds it: results follow one another as they did there.
        message_number: i64,
    },
    /// A person answered: the call asks again, and the answer comes as an input.
    Asked,
}

impl Recording {
    /// Puts together what the store has read of a session.
    pub fn new(
        session: Session,
        calls: BTreeMap<i64, RecordedCall>,
        settled: BTreeMap<CallId, CallStatus>,
    ) -> Recording {
        let mut same: BTreeMap<_, Vec<CallId>> = BTreeMap::new();
        let mut results = BTreeMap::new();
        for (index, record) in session.records.iter().enumerate() {
            for call in record.tool_calls() {
                same.entry(likeness(call)).or_default().push(call.call_id.clone());
            }
            for (block, content) in record.content.iter().enumerate() {
                if let Block::ToolResult(result) = content {
                    results.insert(result.call_id.clone(), (index, block));
                }
            }
        }
        Recording { session, calls, settled, rebases: Vec::new(), same, results }
    }

    /// With every rebase of the source's journal, in its order.
    pub fn with_rebases(self, rebases: Vec<Rebase>) -> Recording {
        Recording { rebases, ..self }
    }

    /// The rebase that held for the call that message `answer` is the answer to.
    pub fn rebase_of(&self, answer: i64) -> Option<&Rebase> {
        self.rebases.iter().rev().find(|rebase| rebase.at_message_number < answer)
    }

    fn result(&self, call_id: &CallId) -> Option<RecordedResult<'_>> {
        let (index, block) = *self.results.get(call_id)?;
        let record = &self.session.records[index];
        let Block::ToolResult(result) = &record.content[block] else { return None };
        if record.details.inbox_id.is_some() {
            return Some(RecordedResult::Asked);
        }
        let said = if result.is_error { CallStatus::Failed } else { CallStatus::Done };
        let status = match self.settled.get(call_id) {
            Some(CallStatus::Abandoned) => CallStatus::Abandoned,
            // What nobody could know of the source's call is known of this one: it never ran, and nobody has to look.
            Some(
                CallStatus::Invoked
                | CallStatus::Started
                | CallStatus::Done
                | CallStatus::Failed
                | CallStatus::Uncertain
                | CallStatus::Waiting,
            )
            | None => said,
        };
        Some(RecordedResult::Settled { status, result, message_number: record.message_number })
    }
}

impl Input {
    /// Under this key it is sent: sent again, after a crash, it is the same message.
    pub fn client_key(&self) -> String {
        format!("replay/{}", self.message_number)
    }

    fn of(record: &Record) -> Input {
        Input { message_number: record.message_number, text: record.text() }
    }
}

/// A replay beside its source, from the cut on. Summaries of the context have no place among what was said.
struct Beside<'r, 's> {
    own: Vec<&'r Record>,
    source: Vec<&'s Record>,
    /// Messages that the replay was given and has not taken yet.
    pending: usize,
    /// How many summaries the replay has, and those of the source.
    own_summaries: usize,
    summaries: Vec<&'s Record>,
}

impl<'r, 's> Beside<'r, 's> {
    fn new(replay: &'r Session, rules: &Replay, recording: &'s Recording) -> Beside<'r, 's> {
        let cut = rules.after_message_number;
        let (summaries, source) =
            after(&recording.session.records, cut).iter().partition(|record| record.is_summary());
        let (own_summaries, own): (Vec<_>, Vec<_>) =
            after(&replay.records, cut).iter().partition(|record| record.is_summary());
        Beside { own, source, pending: replay.inbox.len(), own_summaries: own_summaries.len(), summaries }
    }

    /// Whether the same speaks at every place so far, the messages that wait included.
    fn is_aligned(&self) -> bool {
        let place = self.own.len() + self.pending;
        self.source.len() >= place
            && self
                .own
                .iter()
                .zip(&self.source)
                .all(|(own, source)| own.role == source.role && is_input(own) == is_input(source))
            && self.source[self.own.len()..place].iter().all(|record| is_input(record))
    }

    /// What the source has where the replay's next message will be.
    fn next(&self) -> Option<&'s Record> {
        self.source.get(self.own.len() + self.pending).copied()
    }

    /// The summary that the source wrote before its next message, if the replay has none for it.
    fn summary(&self) -> Option<&'s Record> {
        let next = self.next().map_or(i64::MAX, |next| next.message_number);
        let summary = self.summaries.get(self.own_summaries).copied();
        summary.filter(|summary| summary.message_number < next)
    }
}

fn after(records: &[Record], cut: i64) -> &[Record] {
    &records[records.partition_point(|record| record.message_number <= cut)..]
}

/// A message that came from outside: the user's, or the answer to a question.
fn is_input(record: &Record) -> bool {
    match record.role {
        Role::User => true,
        Role::Tool => record.details.inbox_id.is_some(),
        Role::System | Role::Assistant => false,
    }
}

/// The message that the source took right before the model call that `replay` is about to make, if the replay has not
/// been given it: it is to be sent first.
pub fn due(replay: &Session, rules: &Replay, recording: &Recording) -> Option<Input> {
    let beside = Beside::new(replay, rules, recording);
    let next = beside.next().filter(|_| rules.fed)?;
    (next.role == Role::User && beside.is_aligned()).then(|| Input::of(next))
}

/// The user's next message, for a replay that rests: the first one of the source that it has not been given. After a
/// divergence the messages come in their order, each when the replay rests.
pub fn next_input(replay: &Session, rules: &Replay, recording: &Recording) -> Option<Input> {
    let beside = Beside::new(replay, rules, recording);
    let given = beside.own.iter().filter(|record| is_input(record)).count() + beside.pending;
    beside.source.iter().filter(|record| is_input(record)).nth(given).map(|record| Input::of(record))
}

/// Whether the replay has come to the end of its source, the same speaking at every place: it has nothing more to do, even
/// if its run ended because the recording did.
pub fn is_at_the_end(replay: &Session, rules: &Replay, recording: &Recording) -> bool {
    let beside = Beside::new(replay, rules, recording);
    beside.is_aligned() && beside.next().is_none()
}

/// The summary of the context that the source has where `replay`, whose answers are recorded, owes its next answer: it is
/// to be written first.
pub fn summary<'a>(replay: &Session, rules: &Replay, recording: &'a Recording) -> Option<RecordedAnswer<'a>> {
    let record = Beside::new(replay, rules, recording).summary()?;
    Some(RecordedAnswer { record, call: recording.calls.get(&record.message_number) })
}

/// The answer that the source got where `replay` owes its next one.
///
/// # Errors
/// [`Fault::RecordingOver`]: the source has no answer there.
pub fn answer<'a>(
    replay: &Session,
    rules: &Replay,
    recording: &'a Recording,
) -> Result<RecordedAnswer<'a>, Fault> {
    let beside = Beside::new(replay, rules, recording);
    let over = |message: String| Err(Fault::RecordingOver { message });
    match beside.next() {
        None => over("the source has no further answer".to_owned()),
        Some(_) if !beside.is_aligned() => {
            over("the transcript is no longer beside the source's, so no answer of it fits".to_owned())
        }
        Some(record) if record.role == Role::Assistant => {
            Ok(RecordedAnswer { record, call: recording.calls.get(&record.message_number) })
        }
        Some(record) => over(format!(
            "message {} of the source is no answer of its model (role {})",
            record.message_number,
            record.role.as_str()
        )),
    }
}

/// What came of `call` in the source: of the call with the same name and arguments, the n-th such of one being the n-th of
/// the other; else of the call of that name in the same place. `None`: it was never recorded.
pub fn result<'a>(
    replay: &Session,
    rules: &Replay,
    recording: &'a Recording,
    call_id: &CallId,
) -> Option<RecordedResult<'a>> {
    let (at, call) =
        replay.records.iter().enumerate().rev().find_map(|(at, record)| {
            Some((at, record.tool_calls().find(|call| &call.call_id == call_id)?))
        })?;
    let likeness = likeness(call);
    if let Some(recorded) = recording.same.get(&likeness) {
        let before = replay.records[..=at]
            .iter()
            .flat_map(Record::tool_calls)
            .take_while(|other| &other.call_id != call_id)
            .filter(|other| other.name == call.name && self::likeness(other) == likeness)
            .count();
        if let Some(recorded) = recorded.get(before) {
            return recording.result(recorded);
        }
    }
    let asked_in = &replay.records[at];
    let beside = Beside::new(replay, rules, recording);
    let place = beside.own.iter().position(|own| own.message_number == asked_in.message_number)?;
    let index = asked_in.tool_calls().position(|other| &other.call_id == call_id)?;
    let beside = beside.source.get(place).copied()?;
    let recorded = beside.tool_calls().nth(index).filter(|recorded| recorded.name == call.name)?;
    recording.result(&recorded.call_id)
}

/// The calls after the cut that the source has no result for, each with the number of the message that asked: in a replay
/// of recorded tools they were carried out as in a dry run.
pub fn unrecorded<'a>(
    replay: &'a Session,
    rules: &Replay,
    recording: &Recording,
) -> Vec<(i64, &'a ToolCall)> {
    after(&replay.records, rules.after_message_number)
        .iter()
        .flat_map(|record| record.tool_calls().map(|call| (record.message_number, call)))
        .filter(|(_, call)| result(replay, rules, recording, &call.call_id).is_none())
        .collect()
}

/// What the request of a recorded call ended with: the beginning of its answer.
pub fn prefill(answer: &RecordedAnswer<'_>) -> Option<String> {
    let bytes = answer.call.map_or(0, |call| call.prefill_bytes);
    let text = answer.record.content.iter().find_map(|block| match block {
        Block::Text { text } => Some(text.as_str()),
        Block::ToolCall(_) | Block::ToolResult(_) | Block::Provider { .. } => None,
    })?;
    text.get(..bytes).filter(|text| !text.is_empty()).map(str::to_owned)
}

/// Whether the session's answers are its source's.
pub fn has_recorded_answers(session: &Session) -> bool {
    session.policy.replay.as_ref().is_some_and(|replay| replay.answers == Answers::Recorded)
}

fn likeness(call: &ToolCall) -> (String, String) {
    // Keys are sorted, so equal arguments give equal text.
    (call.name.clone(), call.malformed.clone().unwrap_or_else(|| call.arguments.to_string()))
}

#[cfg(test)]
mod tests;
