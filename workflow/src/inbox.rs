//! Incoming messages: what a session does with a message that arrives, and which records a run writes when it
//! takes the waiting messages.

use crate::event::Event;
use crate::id::{CallId, RunId};
use crate::record::{Block, Details, Record, Role, ToolResult, storable, without_nul};
use crate::session::{CallOutcome, CallStatus, CallUpdate, InboxMessage, SessionStatus};
use serde::{Deserialize, Serialize};

/// What became of a message. Its sender gets this back; the inbox row keeps it in the column `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Acceptance {
    /// The message waits in the inbox. The open run shows it to the model in its next request for a reply.
    Queued,
    /// The message answered the open question.
    Delivered,
    /// It opened a run, or waits for the next one after a cancel. The run may be queued.
    NewRun,
}

impl Acceptance {
    /// All variants.
    pub const ALL: [Acceptance; 3] = [Acceptance::Queued, Acceptance::Delivered, Acceptance::NewRun];

    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Acceptance::Queued => "queued",
            Acceptance::Delivered => "delivered",
            Acceptance::NewRun => "new_run",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<Acceptance> {
        Acceptance::ALL.into_iter().find(|acceptance| acceptance.as_str() == word)
    }
}

/// What a session does with a message that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It waits in the inbox. The next request for a reply shows it, and the commit of that reply makes it a record. A run that
    /// has not started, or is paused for an operator, takes it when it starts or goes on. Nothing else changes.
    JoinsRun,
    /// It answers the open question, so the paused run continues.
    AnswersQuestion,
    /// It opens a new run now.
    OpensRun,
    /// The open run was cancelled and takes no more messages. The commit that closes that run opens the next
    /// run, which takes this message.
    AwaitsNextRun,
}

impl Arrival {
    /// Returns what the sender gets back.
    pub fn acceptance(self) -> Acceptance {
        match self {
            Arrival::JoinsRun => Acceptance::Queued,
            Arrival::AnswersQuestion => Acceptance::Delivered,
            Arrival::OpensRun | Arrival::AwaitsNextRun => Acceptance::NewRun,
        }
    }
}

/// Decides what a session in `status` does with a message. `has_run`: the session has at least one run.
/// Returns `None` if the session is archived or terminated and takes no messages.
///
/// | status | cancel requested | message |
/// |---|---|---|
/// | queued, running | no | joins the run |
/// | queued, running | yes | awaits the next run |
/// | needs_attention | either | joins the run, which an operator resumes |
/// | waiting_input | either | answers the question |
/// | created, completed, failed, cancelled | either | opens a run |
/// | archived, terminated | either | is refused |
pub fn on_arrival(status: SessionStatus, cancel_requested: bool, has_run: bool) -> Option<Arrival> {
    Some(match status {
        SessionStatus::Queued | SessionStatus::Running if cancel_requested => Arrival::AwaitsNextRun,
        SessionStatus::Queued | SessionStatus::Running | SessionStatus::NeedsAttention if has_run => {
            Arrival::JoinsRun
        }
        SessionStatus::WaitingInput if has_run => Arrival::AnswersQuestion,
        SessionStatus::Archived | SessionStatus::Terminated => return None,
        SessionStatus::Created
        | SessionStatus::Completed
        | SessionStatus::Failed
        | SessionStatus::Cancelled
        // These statuses need a run. Without one the row is damaged, and a new run repairs it.
        | SessionStatus::Queued
        | SessionStatus::Running
        | SessionStatus::NeedsAttention
        | SessionStatus::WaitingInput => Arrival::OpensRun,
    })
}

/// The question on which a run paused.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    pub call_id: CallId,
    /// Name of the tool that asked.
    pub name: String,
    /// Set if the question was closed without an answer. This outcome then becomes the call's result.
    pub closed_with: Option<CallOutcome>,
}

/// The run, the step and the number at which new records begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    pub run_id: RunId,
    pub step_number: i64,
    /// Number of the conversation's newest record. The next record gets the number after it.
    pub last_message_number: i64,
}

/// The rows that one commit writes to take messages into the transcript.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Taken {
    pub records: Vec<Record>,
    pub events: Vec<Event>,
    pub call_updates: Vec<CallUpdate>,
    /// Inbox rows that are in the transcript now.
    pub drained: Vec<i64>,
}

/// Takes `messages` into the transcript, in order, beginning at `position`. If `question` is open, the first
/// message answers it, and every other message becomes a message of the user. If the question was closed
/// without an answer, its result comes first, and all messages become messages of the user.
pub fn take(position: &Position, question: Option<Question>, messages: &[InboxMessage]) -> Taken {
    let mut taken = Taken::default();
    let mut open = match question {
        Some(Question { call_id, name, closed_with: Some(outcome) }) => {
            taken.result(position, call_id, name, CallStatus::Failed, outcome, Details::default());
            None
        }
        open => open,
    };
    for message in messages {
        let details = Details {
            inbox_id: Some(message.inbox_id),
            attachments: message.attachments.clone(),
            ..Details::default()
        };
        match open.take() {
            Some(Question { call_id, name, .. }) => {
                // The user's own words are never cut, however long they are.
                let outcome = CallOutcome { content: message.text.clone(), is_error: false, details: None };
                taken.result(position, call_id, name, CallStatus::Done, outcome, details);
            }
            None => {
                let text = Block::Text { text: without_nul(message.text.clone()) };
                taken.push(position, Role::User, text, details);
            }
        }
        taken.drained.push(message.inbox_id);
    }
    taken
}

impl Taken {
    fn push(&mut self, position: &Position, role: Role, block: Block, details: Details) -> i64 {
        let message_number = position.last_message_number + self.records.len() as i64 + 1;
        self.records.push(Record {
            message_number,
            run_id: position.run_id.clone(),
            step_number: position.step_number,
            role,
            content: vec![block].into(),
            internal: false,
            details,
        });
        message_number
    }

    /// Closes the question's call with a result.
    fn result(
        &mut self,
        position: &Position,
        call_id: CallId,
        name: String,
        status: CallStatus,
        outcome: CallOutcome,
        details: Details,
    ) {
        let content = without_nul(outcome.content);
        let (bytes, ok) = (content.len(), !outcome.is_error);
        let result = Block::ToolResult(ToolResult {
            call_id: call_id.clone(),
            name,
            content,
            is_error: outcome.is_error,
            details: outcome.details.map(storable),
            output: None,
        });
        let message_number = self.push(position, Role::Tool, result, details);
        self.events.push(Event::ToolResult {
            call_id: call_id.clone(),
            ok,
            message_number,
            bytes,
            output_sha256: None,
        });
        self.call_updates.push(CallUpdate { call_id, status, message_number: Some(message_number) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;
    use crate::record::{Attachment, text_of};
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn each_status_has_its_answer_for_a_message() {
        use Acceptance::{Delivered, NewRun, Queued};
        for (status, ordinary, cancelled) in [
            (SessionStatus::Created, Some(NewRun), Some(NewRun)),
            (SessionStatus::Queued, Some(Queued), Some(NewRun)),
            (SessionStatus::Running, Some(Queued), Some(NewRun)),
            (SessionStatus::WaitingInput, Some(Delivered), Some(Delivered)),
            (SessionStatus::NeedsAttention, Some(Queued), Some(Queued)),
            (SessionStatus::Completed, Some(NewRun), Some(NewRun)),
            (SessionStatus::Failed, Some(NewRun), Some(NewRun)),
            (SessionStatus::Cancelled, Some(NewRun), Some(NewRun)),
            (SessionStatus::Archived, None, None),
            (SessionStatus::Terminated, None, None),
        ] {
            let answer = |cancelled| on_arrival(status, cancelled, true).map(Arrival::acceptance);
            assert_eq!((answer(false), answer(true)), (ordinary, cancelled), "{status:?}");
        }
    }

    #[test]
    fn only_a_run_that_is_asked_to_end_defers_the_run_of_a_message() {
        for status in SessionStatus::ALL {
            for cancelled in [false, true] {
                for has_run in [false, true] {
                    let arrival = on_arrival(status, cancelled, has_run);
                    let is_put_away = matches!(status, SessionStatus::Archived | SessionStatus::Terminated);
                    assert_eq!(arrival.is_none(), is_put_away, "{status:?}");
                    let defers = arrival == Some(Arrival::AwaitsNextRun);
                    assert_eq!(defers, status.is_open() && cancelled, "{status:?}");
                    let needs_run = matches!(arrival, Some(Arrival::JoinsRun | Arrival::AnswersQuestion));
                    assert!(has_run || !needs_run, "{status:?}");
                    // A message may open a run at once only if the status may become `queued`.
                    if arrival == Some(Arrival::OpensRun) && has_run {
                        assert!(status.may_become(SessionStatus::Queued), "{status:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_answer_reads_back_as_it_is_written() {
        for acceptance in Acceptance::ALL {
            assert_eq!(Acceptance::parse(acceptance.as_str()), Some(acceptance));
            assert_eq!(serde_json::to_value(acceptance).unwrap(), acceptance.as_str());
        }
        assert_eq!(Acceptance::parse("accepted"), None);
    }

    fn position() -> Position {
        Position { run_id: example::RUN.into(), step_number: 3, last_message_number: 7 }
    }

    fn question(closed_with: Option<CallOutcome>) -> Question {
        Question { call_id: "call_1".into(), name: "ask_user".into(), closed_with }
    }

    #[test]
    fn the_first_message_answers_an_open_question_and_the_others_are_the_users() {
        let taken = take(
            &position(),
            Some(question(None)),
            &[example::message(1, "Red."), example::message(2, "Or blue?")],
        );
        let said: Vec<_> = taken
            .records
            .iter()
            .map(|record| (record.message_number, record.role, text_of(&record.content)))
            .collect();
        assert_eq!(said, [(8, Role::Tool, "Red.".to_owned()), (9, Role::User, "Or blue?".to_owned())]);
        assert_eq!(taken.drained, [1, 2]);
        assert_eq!(taken.call_updates[0].status, CallStatus::Done);
        assert_eq!(taken.call_updates[0].message_number, Some(8));
    }

    #[test]
    fn a_message_that_comes_after_the_question_was_closed_does_not_answer_it() {
        let outcome = CallOutcome { is_error: true, ..example::outcome("no answer came") };
        let taken = take(&position(), Some(question(Some(outcome))), &[example::message(1, "Red.")]);
        let roles: Vec<Role> = taken.records.iter().map(|record| record.role).collect();
        assert_eq!(roles, [Role::Tool, Role::User]);
        assert_eq!(taken.call_updates[0].status, CallStatus::Failed);
        assert!(matches!(taken.events[..], [Event::ToolResult { ok: false, message_number: 8, .. }]));
    }

    proptest! {
        #[test]
        fn every_message_becomes_one_record_in_its_order(
            texts in vec("[a-z\u{0}]{0,9}", 0..6),
            asked in proptest::option::of(any::<bool>()),
        ) {
            let file = Attachment {
                file_name: "a.txt".into(),
                media_type: "text/plain".into(),
                bytes: 1,
                sha256: "0".repeat(64),
            };
            let messages: Vec<InboxMessage> = texts
                .iter()
                .zip(1..)
                .map(|(text, inbox_id)| InboxMessage {
                    attachments: vec![file.clone()],
                    ..example::message(inbox_id, text)
                })
                .collect();
            let closed = asked == Some(true);
            let asked = asked.map(|closed| question(closed.then(|| example::outcome("no answer"))));
            let was_asked = asked.is_some();
            let taken = take(&position(), asked, &messages);
            prop_assert_eq!(taken.records.len(), messages.len() + usize::from(closed));
            prop_assert!(taken.records.iter().zip(8..).all(|(record, number)| record.message_number == number));
            let of_messages = &taken.records[usize::from(closed)..];
            for (record, message) in of_messages.iter().zip(&messages) {
                prop_assert_eq!(record.details.inbox_id, Some(message.inbox_id));
                prop_assert_eq!(&record.details.attachments, &message.attachments);
                prop_assert_eq!(text_of(&record.content), without_nul(message.text.clone()));
            }
            let drained: Vec<i64> = messages.iter().map(|message| message.inbox_id).collect();
            prop_assert_eq!(&taken.drained, &drained);
            // Its result or the first message closes the question, once. Without either it stays open.
            let closes = was_asked && (closed || !messages.is_empty());
            prop_assert_eq!(taken.call_updates.len(), usize::from(closes));
            prop_assert_eq!(taken.events.len(), taken.call_updates.len());
        }
    }
}
