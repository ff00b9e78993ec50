//! Turns the outcome of an action into one [`Transition`], which the store commits unchanged.

mod draft;
mod transition;

pub use draft::{INLINE_OUTPUT_BYTES, INLINE_VALUE_BYTES, STEPS_PER_CHECKPOINT};
pub use transition::{Closing, Next, OpenedCall, StepResult, Transition};

use crate::agent::AgentPolicy;
use crate::effect::Effect;
use crate::fault::Fault;
use crate::id::GenerationId;
use crate::plan::Stop;
use crate::record::{FinishReason, Reply, ToolCall, Usage};
use crate::session::{CallOutcome, CallStatus, Session, SessionStatus};
use crate::strategy::{Rebase, Strategy};
use draft::Draft;
use std::collections::BTreeMap;

/// The outcome of an [`Action`](crate::plan::Action).
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Begun,
    Replied(Generated),
    /// The model was asked for a summary of the context.
    Compacted(Compaction),
    /// Every planned call, in order.
    Called(Vec<Performed>),
    Stopped(Stop),
    Paused,
}

/// A finished model call.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    pub generation_id: GenerationId,
    pub attempt: i64,
    pub model: String,
    pub request_sha256: String,
    /// When it began, by the database's clock.
    pub started_at: String,
    /// How many changes the projection made to the request's copy of the transcript.
    pub repairs: i64,
    /// The earlier attempt whose text was sent as the prefill. The reply begins with that text.
    pub resumes: Option<GenerationId>,
    /// The length of that prefill.
    pub prefill_bytes: Option<i64>,
    pub reply: Reply,
    /// How the context of this call was selected. `rebase` is set when this call moved the beginning of the
    /// context.
    pub context_strategy: Strategy,
    pub rebase: Option<Rebase>,
    /// The effect of each tool that the model was offered. A call of any other name is refused and never runs.
    pub effects: BTreeMap<String, Effect>,
}

/// A model call for a summary of the context.
#[derive(Clone, Debug, PartialEq)]
pub struct Compaction {
    pub generation_id: GenerationId,
    pub attempt: i64,
    pub model: String,
    pub request_sha256: String,
    /// When it began, by the database's clock.
    pub started_at: String,
    pub repairs: i64,
    pub end: CompactionEnd,
}

/// How a summary call ended.
#[derive(Clone, Debug, PartialEq)]
pub enum CompactionEnd {
    /// The text of the summary's record, and the rebase that points at it.
    Written {
        text: String,
        finish_reason: FinishReason,
        usage: Usage,
        rebase: Rebase,
    },
    Failed(Fault),
}

/// One planned call and its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Performed {
    pub call: ToolCall,
    pub ending: CallEnd,
}

/// How a tool call ended in this step. [`CallOutcome`] is the content that the ledger keeps of it.
#[derive(Clone, Debug, PartialEq)]
pub enum CallEnd {
    /// `Done`, `Failed`, or `Uncertain` where a person settled it.
    Settled(CallStatus, CallOutcome),
    /// The call may have taken effect. `known`: the journal already has an entry for that.
    Uncertain { known: bool },
    /// The tool asks the user this question.
    Asked(String),
    /// The user answered it.
    Answered { inbox_id: i64, text: String },
    /// It was closed without being run.
    Abandoned,
}

/// Returns the transition for `outcome`. Never fails: if an outcome does not fit the session (a defect of the
/// worker), the commit's fence rejects the transition and nothing is lost.
pub fn advance(session: &Session, outcome: Outcome, policy: AgentPolicy) -> Transition {
    let draft = Draft::new(session, policy);
    match outcome {
        Outcome::Begun => draft.begin(),
        Outcome::Replied(generated) => draft.reply(generated),
        Outcome::Compacted(compaction) => draft.compacted(compaction),
        Outcome::Called(performed) => draft.results(performed),
        Outcome::Stopped(Stop::Cancelled) => draft.cancel(),
        Outcome::Stopped(Stop::Failed(fault)) => draft.fail(&fault),
        Outcome::Stopped(Stop::Finished) => draft.close(SessionStatus::Completed, None),
        Outcome::Paused => draft.close(SessionStatus::WaitingInput, None),
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod routes;
#[cfg(test)]
mod tests;
