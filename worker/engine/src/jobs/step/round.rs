//! What one round of a step begins with, and what it leads to.

use super::ClaimEnd;
use crate::perform::{CommittedCall, StartedCalls};
use wakeful_workflow::advance::Performed;

/// What [`super::action::plan_and_perform`] leads to.
#[expect(
    clippy::large_enum_variant,
    reason = "only one such value exists at a time, and it is matched at once"
)]
pub(super) enum RoundResult {
    Performed(Performed),
    End(ClaimEnd),
    /// The session was read again, so the caller plans again.
    Again,
}

/// What the commit before has made ready for the next action.
pub(super) struct Ready<'a> {
    /// The model call whose intent it recorded.
    pub(super) call: Option<CommittedCall>,
    /// The tool calls that it started.
    pub(super) started: &'a StartedCalls,
    /// The results of the calls that it opened, if these have ended already.
    pub(super) results: Option<Performed>,
}
