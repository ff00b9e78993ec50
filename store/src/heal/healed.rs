//! What a heal found wrong, for programs and in words.

use serde::Serialize;

/// One thing that was wrong, and is right now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Healed {
    /// The session's conversation had no row.
    ConversationMade,
    /// The conversation would have given numbers to new messages that old ones have.
    NumbersCaughtUp {
        was: i64,
        is: i64,
    },
    QueuedRunsCounted {
        was: i32,
        is: i64,
    },
    /// The conversation pointed at a run that is not open, or not at the one that is.
    OpenRunCorrected {
        was: Option<String>,
        is: Option<String>,
    },
    /// The session's status said something else than its run.
    StatusCorrected {
        was: String,
        is: String,
    },
    /// The status spoke of a run that was over or paused: it goes on.
    RunReopened {
        run_id: String,
    },
    /// Nobody would have read the messages that wait, or done what the status says.
    RunOpened {
        run_id: String,
    },
    /// A run was open although its session is put away.
    RunEnded {
        run_id: String,
    },
    /// The run's turn had come and nobody had given it the conversation.
    ConversationGiven {
        session_id: String,
        run_id: String,
    },
    /// A run was open and no job would have worked on it.
    JobMade {
        step_number: i64,
    },
    /// Messages waited to be sent and no job would have sent them.
    DeliverJobMade {
        channel: String,
    },
    /// Model calls in flight of a session that is at rest.
    GenerationsForgotten {
        generations: u64,
        chunks: u64,
    },
}

impl std::fmt::Display for Healed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |run: &Option<String>| run.clone().unwrap_or_else(|| "none".to_owned());
        match self {
            Healed::ConversationMade => write!(f, "the conversation had no row"),
            Healed::NumbersCaughtUp { was, is } => {
                write!(f, "the conversation's last message number was {was} and is {is}")
            }
            Healed::QueuedRunsCounted { was, is } => {
                write!(f, "the conversation counted {was} queued runs and there are {is}")
            }
            Healed::OpenRunCorrected { was, is } => {
                write!(f, "the conversation's open run was {} and is {}", name(was), name(is))
            }
            Healed::StatusCorrected { was, is } => {
                write!(f, "the status was {was} and is {is}, as its run is")
            }
            Healed::RunReopened { run_id } => {
                write!(f, "the status spoke of an open run and there was none: {run_id} goes on")
            }
            Healed::RunOpened { run_id } => write!(f, "nobody would have gone on: {run_id} is opened"),
            Healed::RunEnded { run_id } => {
                write!(f, "{run_id} was open in a session that is put away: it is ended")
            }
            Healed::ConversationGiven { session_id, run_id } => {
                write!(f, "the conversation was free: {run_id} of {session_id} has it")
            }
            Healed::JobMade { step_number } => write!(f, "no job would have gone on with step {step_number}"),
            Healed::DeliverJobMade { channel } => {
                write!(f, "no job would have sent what waits for {channel}")
            }
            Healed::GenerationsForgotten { generations, chunks } => {
                write!(f, "{generations} model calls ({chunks} chunks) were left of a session at rest")
            }
        }
    }
}
