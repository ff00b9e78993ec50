//! Replay: a session that runs another session again, and what it takes from that session's log.
//!
//! A replay is a fork: up to the cut, both have the same messages. After the cut, their transcripts are
//! compared by position: the n-th message of one with the n-th message of the other. (Message numbers differ
//! if other sessions of the conversation wrote messages in between.) The two are aligned as long as the same
//! role speaks at every position. While they are aligned, the replay gets each user message at the position
//! where the source took it, even in the middle of a run.
#![doc = include_str!("replay.md")]

use crate::fault::Fault;
use crate::id::CallId;
use crate::policy::{Answers, Replay};
use crate::record::{Block, Record, Role, ToolCall, ToolResult};
use crate::session::{CallStatus, Session};
use crate::strategy::{Rebase, Strategy};
use crate::turns::in_turns;
use std::collections::BTreeMap;

/// The log of a source session, as its replays need it.
#[derive(Clone, Debug)]
pub struct Recording {
    pub session: Session,
    /// The finished model calls, by the number of the reply or of the summary that they produced.
    pub calls: BTreeMap<i64, RecordedCall>,
    /// How each call of a tool ended.
    pub settled: BTreeMap<CallId, CallStatus>,
    /// All rebases, in the order of the journal.
    rebases: Vec<Rebase>,
    /// Calls by name and arguments, in the order in which the model asked for them.
    same: BTreeMap<(String, String), Vec<CallId>>,
    /// Position of each result: index of the record, and index of the block in it.
    results: BTreeMap<CallId, (usize, usize)>,
}

/// A model call as recorded in the journal.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedCall {
    /// `provider/model`.
    pub model: String,
    /// Hash of the bytes that were sent.
    pub request_sha256: String,
    /// How its context was selected.
    pub context_strategy: Strategy,
    /// If the call wrote a summary: the rebase that was committed with it.
    pub rebase: Option<Rebase>,
    /// Bytes of the reply's text that were a prefill in the request, because the call resumed a text that
    /// was interrupted.
    pub prefill_bytes: usize,
}

/// A user's message to give to a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Number of the message in the source.
    pub message_number: i64,
    pub text: String,
}

/// The source's reply at the position where the replay needs one.
#[derive(Clone, Copy, Debug)]
pub struct RecordedReply<'a> {
    pub record: &'a Record,
    /// `None` if the source's journal has no entry for the call.
    pub call: Option<&'a RecordedCall>,
}

/// The outcome of a tool call in the source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecordedResult<'a> {
    Settled {
        status: CallStatus,
        result: &'a ToolResult,
        /// Number of the source's message with the result. The replay keeps the order of the source's
        /// results.
        message_number: i64,
    },
    /// A person answered. The replay asks again, and gets the answer as an input.
    Asked,
}

impl Recording {
    /// Builds a recording from what the store has read.
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

    /// Adds all rebases of the source's journal, in order.
    pub fn with_rebases(self, rebases: Vec<Rebase>) -> Recording {
        Recording { rebases, ..self }
    }

    /// The rebase that applied to the model call whose reply is message `answer`.
    pub fn rebase_of(&self, answer: i64) -> Option<&Rebase> {
        self.rebases.iter().rev().find(|rebase| rebase.at_message_number < answer)
    }

    /// Returns whether a person has yet to approve this call of the source.
    fn awaits_approval(&self, call_id: &CallId) -> bool {
        self.settled.get(call_id) == Some(&CallStatus::Unapproved) && !self.results.contains_key(call_id)
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
            // The replay does not run the tool. So even if the source's call is uncertain, nobody has to
            // check the replay's.
            Some(
                CallStatus::Invoked
                | CallStatus::Started
                | CallStatus::Done
                | CallStatus::Failed
                | CallStatus::Uncertain
                | CallStatus::Waiting
                | CallStatus::Unapproved,
            )
            | None => said,
        };
        Some(RecordedResult::Settled { status, result, message_number: record.message_number })
    }
}

impl Input {
    /// The message's idempotency key. A message that is sent again after a crash is the same message.
    pub fn client_key(&self) -> String {
        format!("replay/{}", self.message_number)
    }

    fn of(record: &Record) -> Input {
        Input { message_number: record.message_number, text: record.text() }
    }
}

/// What was read of a replay so far. A replay asks before each step where it stands. With one follower for the whole replay, each
/// message of the replay and of the source is read once.
#[derive(Debug, Default)]
pub struct Follower {
    /// Number of the last message that was read.
    read_to: i64,
    /// How many messages were read, the source's included.
    messages_read: usize,
    /// The replay's messages after the cut, by number. Summaries are no positions.
    own: Vec<i64>,
    own_summaries: usize,
    /// The source's messages after the cut, and its summaries: their places in the recording.
    source: Option<(Vec<usize>, Vec<usize>)>,
    /// At some position another role speaks than in the source.
    differs: bool,
    /// How many calls of this likeness were read, and for each call how many of them came before it.
    alike: BTreeMap<(String, String), usize>,
    before: BTreeMap<CallId, ((String, String), usize)>,
}

impl Follower {
    /// Reads what is new in the replay. Use one follower for one replay.
    pub fn follow<'f, 'r, 's>(
        &'f mut self,
        replay: &'r Session,
        rules: &Replay,
        recording: &'s Recording,
    ) -> Alignment<'f, 'r, 's> {
        // A message that was read before its commit may never have been committed.
        let last = replay.records.last().map_or(0, |record| record.message_number);
        if last < self.read_to {
            *self = Follower { messages_read: self.messages_read, ..Follower::default() };
        }
        let cut = rules.after_message_number;
        let records = &recording.session.records;
        let (source, _) = self.source.get_or_insert_with(|| {
            let first = records.len() - after(records, cut).len();
            self.messages_read += records.len() - first;
            // In the order in which the source's model was shown them: a message that came while a call waited is due after the
            // call's result.
            let places: BTreeMap<i64, usize> =
                (first..records.len()).map(|at| (records[at].message_number, at)).collect();
            let shown = in_turns(records[first..].iter()).into_iter();
            shown.map(|record| places[&record.message_number]).partition(|at| !records[*at].is_summary())
        });
        for record in after(&replay.records, self.read_to) {
            self.read_to = record.message_number;
            self.messages_read += 1;
            for call in record.tool_calls() {
                let likeness = likeness(call);
                let alike = self.alike.entry(likeness.clone()).or_default();
                self.before.insert(call.call_id.clone(), (likeness, *alike));
                *alike += 1;
            }
            if record.message_number <= cut {
                continue;
            }
            if record.is_summary() {
                self.own_summaries += 1;
                continue;
            }
            let there = source.get(self.own.len()).map(|at| &records[*at]);
            self.differs |=
                there.is_none_or(|there| there.role != record.role || is_input(there) != is_input(record));
            self.own.push(record.message_number);
        }
        Alignment { follower: self, replay, recording, fed: rules.fed, cut }
    }

    /// How many messages were read, the source's included.
    pub fn messages_read(&self) -> usize {
        self.messages_read
    }
}

/// A replay next to its source, from the cut on. Summaries do not count as positions.
pub struct Alignment<'f, 'r, 's> {
    follower: &'f Follower,
    replay: &'r Session,
    recording: &'s Recording,
    fed: bool,
    cut: i64,
}

impl<'r, 's> Alignment<'_, 'r, 's> {
    /// The source's message at a position.
    fn source(&self, position: usize) -> Option<&'s Record> {
        let (positions, _) = self.follower.source.as_ref()?;
        positions.get(position).map(|at| &self.recording.session.records[*at])
    }

    /// The position of the replay's next message. Messages that it was given and has not taken yet count too.
    fn place(&self) -> usize {
        self.follower.own.len() + self.replay.inbox.len()
    }

    /// Returns whether the same role speaks at every position so far, waiting messages included.
    fn is_aligned(&self) -> bool {
        !self.follower.differs
            && (self.follower.own.len()..self.place()).all(|at| self.source(at).is_some_and(is_input))
    }

    /// The source's message at the position of the replay's next one.
    fn next(&self) -> Option<&'s Record> {
        self.source(self.place())
    }

    /// The message that the source took right before the model call that the replay is about to make. Send it
    /// before the call. `None` if there is none, or if the replay was given it already.
    pub fn due(&self) -> Option<Input> {
        let next = self.next().filter(|_| self.fed)?;
        (next.role == Role::User && self.is_aligned()).then(|| Input::of(next))
    }

    /// The user's next message for a replay at rest: the first user message of the source that the replay does
    /// not have yet. After a divergence the replay still gets the messages in order, one each time it rests.
    pub fn next_input(&self) -> Option<Input> {
        let own = after(&self.replay.records, self.cut).iter().filter(|record| !record.is_summary());
        let given = own.filter(|record| is_input(record)).count() + self.replay.inbox.len();
        let (positions, _) = self.follower.source.as_ref()?;
        let source = positions.iter().map(|at| &self.recording.session.records[*at]);
        source.filter(|record| is_input(record)).nth(given).map(Input::of)
    }

    /// Returns whether the replay has reached the end of its source while aligned. It then has nothing more to
    /// do, even if its run ended because the recording did.
    pub fn is_at_the_end(&self) -> bool {
        self.is_aligned() && self.next().is_none()
    }

    /// The source's summary before the reply that the replay needs next. A replay with recorded replies must write
    /// it first.
    pub fn summary(&self) -> Option<RecordedReply<'s>> {
        let (_, summaries) = self.follower.source.as_ref()?;
        let next = self.next().map_or(i64::MAX, |next| next.message_number);
        let record = &self.recording.session.records[*summaries.get(self.follower.own_summaries)?];
        (record.message_number < next)
            .then(|| RecordedReply { record, call: self.recording.calls.get(&record.message_number) })
    }

    /// The source's reply at the position where the replay needs one.
    ///
    /// # Errors
    /// [`Fault::RecordingOver`] if the source has no reply there.
    pub fn answer(&self) -> Result<RecordedReply<'s>, Fault> {
        let over = |message: String| Err(Fault::RecordingOver { message });
        match self.next() {
            None => over("the source has no further answer".to_owned()),
            Some(_) if !self.is_aligned() => {
                over("the replay has diverged from its source, so no recorded answer fits".to_owned())
            }
            Some(record) if record.role == Role::Assistant => {
                Ok(RecordedReply { record, call: self.recording.calls.get(&record.message_number) })
            }
            Some(record) => over(format!(
                "message {} of the source is no answer of its model (role {})",
                record.message_number,
                record.role.as_str()
            )),
        }
    }

    /// The outcome of `call_id` in the source. Matches the replay's n-th call with this name and these arguments
    /// to the source's n-th such call. Without a match, takes the source's call at the same position if it has
    /// the same name. `None` if the source recorded neither.
    pub fn result(&self, call_id: &CallId) -> Option<RecordedResult<'s>> {
        let (likeness, before) = self.follower.before.get(call_id)?;
        let alike = self.recording.same.get(likeness);
        if let Some(recorded) = alike.and_then(|alike| alike.get(*before)) {
            return self.recording.result(recorded);
        }
        let (asked_in, index) = self.replay.records.iter().rev().find_map(|record| {
            Some((record, record.tool_calls().position(|call| &call.call_id == call_id)?))
        })?;
        let place = self.follower.own.binary_search(&asked_in.message_number).ok()?;
        let recorded = self.source(place)?.tool_calls().nth(index)?;
        (recorded.name == likeness.0).then(|| self.recording.result(&recorded.call_id)).flatten()
    }

    /// Which calls of the source's next reply a person has yet to approve, in their order. A replay with recorded replies and tools
    /// holds them too, and so comes to rest where its source waits.
    pub fn unapproved(&self) -> Vec<bool> {
        let calls = self.answer().into_iter().flat_map(|answer| answer.record.tool_calls());
        calls.map(|call| self.recording.awaits_approval(&call.call_id)).collect()
    }

    /// The calls after the cut for which the source has no result, each with the number of the message that
    /// asked. A replay with recorded tools runs these calls as in a dry run, except those that it holds.
    pub fn unrecorded(&self) -> Vec<(i64, &'r ToolCall)> {
        after(&self.replay.records, self.cut)
            .iter()
            .flat_map(|record| record.tool_calls().map(|call| (record.message_number, call)))
            .filter(|(_, call)| {
                let row = self.replay.call(&call.call_id);
                row.is_none_or(|row| row.status != CallStatus::Unapproved)
                    && self.result(&call.call_id).is_none()
            })
            .collect()
    }
}

fn after(records: &[Record], cut: i64) -> &[Record] {
    &records[records.partition_point(|record| record.message_number <= cut)..]
}

/// A message that came from outside: the user's, or the answer to a question.
fn is_input(record: &Record) -> bool {
    match record.role {
        Role::User => !record.details.asks_again,
        Role::Tool => record.details.inbox_id.is_some(),
        Role::System | Role::Assistant => false,
    }
}

/// The prefill of a recorded call, which is the beginning of its reply.
pub fn prefill(answer: &RecordedReply<'_>) -> Option<String> {
    let bytes = answer.call.map_or(0, |call| call.prefill_bytes);
    let text = answer.record.content.iter().find_map(|block| match block {
        Block::Text { text } => Some(text.as_str()),
        Block::ToolCall(_) | Block::ToolResult(_) | Block::Provider { .. } => None,
    })?;
    text.get(..bytes).filter(|text| !text.is_empty()).map(str::to_owned)
}

/// Returns whether the session is a replay that reuses the model's replies of its source.
pub fn has_recorded_replies(session: &Session) -> bool {
    session.policy.replay.as_ref().is_some_and(|replay| replay.answers == Answers::Recorded)
}

fn likeness(call: &ToolCall) -> (String, String) {
    // Keys are sorted, so equal arguments give equal text.
    (call.name.clone(), call.malformed.clone().unwrap_or_else(|| call.arguments.to_string()))
}

#[cfg(test)]
mod tests;
