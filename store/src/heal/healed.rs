//! The findings of a heal, as values for programs and as text for people.

use serde::Serialize;

/// One thing that was wrong and has been corrected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Healed {
    /// The session's conversation had no row.
    ConversationMade,
    /// The conversation would have given new messages numbers that old messages already have.
    NumbersCaughtUp {
        was: i64,
        is: i64,
    },
    QueuedRunsCounted {
        was: i32,
        is: i64,
    },
    /// The conversation pointed at a run that is not open, or at the wrong one.
    OpenRunCorrected {
        was: Option<String>,
        is: Option<String>,
    },
    /// The session's status contradicted its run.
    StatusCorrected {
        was: String,
        is: String,
    },
    /// The status was that of an open run, but the run had ended or paused: the run is open again.
    RunReopened {
        run_id: String,
    },
    /// Messages waited, or the status asked for a run, and there was no run: one was opened.
    RunOpened {
        run_id: String,
    },
    /// A run was open although its session is archived or terminated.
    RunEnded {
        run_id: String,
    },
    /// The conversation was free, but nothing had started its oldest queued run.
    ConversationGiven {
        session_id: String,
        run_id: String,
    },
    /// A run was open without a job.
    JobMade {
        step_number: i64,
    },
    /// Deliveries waited without a job to send them.
    DeliverJobMade {
        channel: String,
    },
    /// A session at rest still had rows of model calls in flight.
    GenerationsForgotten {
        generations: u64,
        chunks: u64,
    },
    /// The session waits for its provider's gate. It looks again now whether it may call.
    LooksAgain {
        gate_id: String,
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
                write!(f, "the status was {was} and is {is} now, to match its run")
            }
            Healed::RunReopened { run_id } => {
                write!(f, "the status was that of an open run, but no run was open: {run_id} goes on")
            }
            Healed::RunOpened { run_id } => write!(f, "a run was missing: {run_id} is opened"),
            Healed::RunEnded { run_id } => {
                write!(f, "{run_id} was open in a session that is archived or terminated: it is ended")
            }
            Healed::ConversationGiven { session_id, run_id } => {
                write!(f, "the conversation was free, but {run_id} of {session_id} was queued: it is started")
            }
            Healed::JobMade { step_number } => write!(f, "no job would have gone on with step {step_number}"),
            Healed::DeliverJobMade { channel } => {
                write!(f, "no job would have sent the messages that wait for {channel}")
            }
            Healed::GenerationsForgotten { generations, chunks } => {
                write!(f, "a session at rest still had {generations} model calls in flight ({chunks} chunks)")
            }
            Healed::LooksAgain { gate_id } => {
                write!(f, "the session waits for provider {gate_id}: it looks again now")
            }
        }
    }
}
