//! Session statuses and their allowed transitions.

use serde::{Deserialize, Serialize};

/// Status of a session. It follows the newest run. `created`, `archived` and `terminated` need no run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SessionStatus {
    /// The session has never run.
    Created,
    /// A run is open but no step of it has begun, or the run waits until the conversation's current run
    /// closes.
    Queued,
    Running,
    /// The run pauses for the user's answer.
    WaitingInput,
    /// The run pauses for an operator.
    NeedsAttention,
    Completed,
    Failed,
    /// A person cancelled its run, or its question expired where the agent's runs end by that. It takes messages,
    /// and is never retried.
    Cancelled,
    /// A person archived the session. It takes no messages.
    Archived,
    /// A person ended the session for good. It takes no messages.
    Terminated,
}

impl SessionStatus {
    /// Every status, in the usual order of a session's life.
    pub const ALL: [SessionStatus; 10] = [
        SessionStatus::Created,
        SessionStatus::Queued,
        SessionStatus::Running,
        SessionStatus::WaitingInput,
        SessionStatus::NeedsAttention,
        SessionStatus::Completed,
        SessionStatus::Failed,
        SessionStatus::Cancelled,
        SessionStatus::Archived,
        SessionStatus::Terminated,
    ];

    /// Their words, in the same order.
    pub const WORDS: [&str; SessionStatus::ALL.len()] = {
        let mut words = [""; SessionStatus::ALL.len()];
        let mut at = 0;
        while at < words.len() {
            words[at] = SessionStatus::ALL[at].as_str();
            at += 1;
        }
        words
    };

    /// The word that is stored and shown.
    pub const fn as_str(self) -> &'static str {
        match self {
            SessionStatus::Created => "created",
            SessionStatus::Queued => "queued",
            SessionStatus::Running => "running",
            SessionStatus::WaitingInput => "waiting_input",
            SessionStatus::NeedsAttention => "needs_attention",
            SessionStatus::Completed => "completed",
            SessionStatus::Failed => "failed",
            SessionStatus::Cancelled => "cancelled",
            SessionStatus::Archived => "archived",
            SessionStatus::Terminated => "terminated",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<SessionStatus> {
        SessionStatus::ALL.into_iter().find(|status| status.as_str() == word)
    }

    /// Returns whether `next` may follow. The store checks this before it carries out a person's request, and
    /// the property tests of `advance` check every transition. Only a heal ignores it, because a heal repairs
    /// rows that should not exist.
    pub fn may_become(self, next: SessionStatus) -> bool {
        use SessionStatus::{
            Archived, Cancelled, Completed, Created, Failed, NeedsAttention, Queued, Running, Terminated,
            WaitingInput,
        };
        match self {
            Created => matches!(next, Queued | Archived | Terminated),
            Queued => {
                matches!(next, Running | Completed | Failed | Cancelled | WaitingInput | NeedsAttention)
            }
            Running => matches!(next, WaitingInput | NeedsAttention | Completed | Failed | Cancelled),
            // Only a session at rest is archived: cancel a paused run first.
            WaitingInput | NeedsAttention => matches!(next, Queued | Failed | Cancelled),
            Completed | Failed | Cancelled => matches!(next, Queued | Archived | Terminated),
            Archived => matches!(next, Terminated),
            Terminated => false,
        }
    }

    /// Returns whether the run waits for a person.
    pub fn is_paused(self) -> bool {
        matches!(self, SessionStatus::WaitingInput | SessionStatus::NeedsAttention)
    }

    /// Returns whether a step job exists, or will exist as soon as the conversation is free.
    pub fn is_open(self) -> bool {
        matches!(self, SessionStatus::Queued | SessionStatus::Running)
    }

    /// Returns whether no run is open or paused, and the session may be put away.
    pub fn is_at_rest(self) -> bool {
        use SessionStatus::{Cancelled, Completed, Created, Failed};
        matches!(self, Created | Completed | Failed | Cancelled)
    }

    /// Returns whether a person or a command may retry the run: it failed, or waits for an operator. A
    /// cancelled run is never retried, because somebody wanted its end.
    pub fn may_be_retried(self) -> bool {
        matches!(self, SessionStatus::Failed | SessionStatus::NeedsAttention)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_reads_back_as_it_is_written() {
        for status in SessionStatus::ALL {
            assert_eq!(SessionStatus::parse(status.as_str()), Some(status));
        }
        assert_eq!(SessionStatus::parse("forked"), None);
    }

    #[test]
    fn terminated_is_final_and_archived_only_ends() {
        for next in SessionStatus::ALL {
            assert!(!SessionStatus::Terminated.may_become(next));
            assert_eq!(SessionStatus::Archived.may_become(next), next == SessionStatus::Terminated);
        }
    }

    #[test]
    fn only_what_rests_is_put_away() {
        for status in SessionStatus::ALL {
            let rests = status.is_at_rest();
            assert_eq!(status.may_become(SessionStatus::Archived), rests, "{status:?}");
            let ends = rests || status == SessionStatus::Archived;
            assert_eq!(status.may_become(SessionStatus::Terminated), ends, "{status:?}");
        }
    }

    #[test]
    fn every_resting_status_can_be_woken_by_a_message() {
        for status in SessionStatus::ALL {
            if status.is_at_rest() || status.is_paused() {
                assert!(status.may_become(SessionStatus::Queued), "{status:?}");
            }
        }
    }
}
