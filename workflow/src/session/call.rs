//! Rows of the ledger as a step sees them: one for each tool call.

use crate::effect::Effect;
use crate::id::CallId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Status of a ledger row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallStatus {
    /// The model asked for it. It never ran.
    Invoked,
    /// It may have run.
    Started,
    Done,
    Failed,
    /// It may or may not have taken effect.
    Uncertain,
    /// The call asks the user a question, which has no answer yet.
    Waiting,
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
            CallStatus::Abandoned => "abandoned",
        }
    }

    /// Returns whether a call in this status may have taken effect if it has no outcome.
    pub fn may_have_run(self) -> bool {
        match self {
            CallStatus::Started | CallStatus::Done | CallStatus::Failed | CallStatus::Uncertain => true,
            CallStatus::Invoked | CallStatus::Waiting | CallStatus::Abandoned => false,
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
pub struct ClosedCall {
    pub call_id: CallId,
    pub status: CallStatus,
    /// Number of the record with the result. `None` while there is no result: a question waits, or a person
    /// must decide.
    pub message_number: Option<i64>,
}
