//! Leaving Absurd: reads the checkpoints of a task as the messages of a session, and compares the two.
//!
//! Absurd keeps the result of each step of a task as JSON under the step's name. For an agent, these results hold the
//! messages. This module knows three usual shapes of such results and a fourth that the configuration declares
//! ([`shape`]), four libraries' formats of a message ([`message`]), and the order of the steps ([`names`]). [`rows`] makes
//! the rows of a session from them, in the types of a bundle. [`compare`] holds the messages of the checkpoints against
//! those that the session hydrates to.
//!
//! `store/src/absurd` reads Absurd's tables and writes ours.

pub mod compare;
pub mod declared;
pub mod message;
pub mod names;
pub mod opening;
pub mod rows;
pub mod shape;

use serde::Serialize;
use serde_json::Value;

/// The beginning of the trigger type of a session that was a task: `absurd:` and the queue's name.
pub const TRIGGER_PREFIX: &str = "absurd:";

/// The part of a record's details that says where the message comes from.
pub const DETAILS: &str = "absurd";

/// State of a task in Absurd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    Pending,
    Running,
    Sleeping,
    Completed,
    Failed,
    Cancelled,
}

impl TaskState {
    /// Absurd's word.
    pub fn as_str(self) -> &'static str {
        match self {
            TaskState::Pending => "pending",
            TaskState::Running => "running",
            TaskState::Sleeping => "sleeping",
            TaskState::Completed => "completed",
            TaskState::Failed => "failed",
            TaskState::Cancelled => "cancelled",
        }
    }

    /// Reads Absurd's word.
    pub fn parse(word: &str) -> Option<TaskState> {
        let all = [
            TaskState::Pending,
            TaskState::Running,
            TaskState::Sleeping,
            TaskState::Completed,
            TaskState::Failed,
            TaskState::Cancelled,
        ];
        all.into_iter().find(|state| state.as_str() == word)
    }

    /// Returns whether Absurd does nothing more with the task.
    pub fn is_over(self) -> bool {
        match self {
            TaskState::Completed | TaskState::Failed | TaskState::Cancelled => true,
            TaskState::Pending | TaskState::Running | TaskState::Sleeping => false,
        }
    }
}

/// A task without its checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    pub queue: String,
    pub task_id: String,
    pub name: String,
    pub params: Value,
    pub state: TaskState,
    /// Number of the attempt whose checkpoints count. Those of a newer one do not.
    pub attempt: i64,
    /// As in a bundle: `2026-01-31T12:00:00.000000Z`.
    pub enqueued_at: String,
    pub started_at: Option<String>,
    pub ended_at: Option<String>,
    /// Why the last attempt failed.
    pub failure: Option<Value>,
    /// What the task returned.
    pub result: Option<Value>,
    pub idempotency_key: Option<String>,
    /// The event that it waits for.
    pub waits_for: Option<String>,
    /// When it wakes up. `None`: when the event comes.
    pub wakes_at: Option<String>,
    /// `take` has parked it, so Absurd runs it no more.
    pub parked: bool,
}

impl Task {
    /// The trigger type of its session.
    pub fn trigger_type(&self) -> String {
        format!("{TRIGGER_PREFIX}{}", self.queue)
    }
}

/// A checkpoint without its state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listed {
    pub name: String,
    /// Absurd's word. Only `committed` ones count.
    pub status: String,
    /// The attempt that wrote it. `None`: its row is gone, and the checkpoint counts.
    pub attempt: Option<i64>,
    pub updated_at: String,
    /// Bytes in Absurd's table.
    pub bytes: i64,
}

impl Listed {
    /// Returns whether Absurd would show it to the task's current attempt.
    pub fn counts(&self, attempt: i64) -> bool {
        self.status == "committed" && self.attempt.is_none_or(|own| own <= attempt)
    }
}
