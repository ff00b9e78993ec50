//! The two decisions of a step, `plan` and `advance`, and the defects that a test may put into them (see
//! [`crate::mutant`]). Without one these are the workflow's own.

use wakeful_workflow::advance::{self, Outcome, Transition};
use wakeful_workflow::agent::{Limits, AgentPolicy};
use wakeful_workflow::plan::{self, Action, How};
use wakeful_workflow::session::Session;

/// What is owed: [`plan::plan`], unless this process is to show what it guards against.
pub(super) fn plan(session: &Session, limits: &Limits) -> Action {
    match plan::plan(session, limits) {
        // The defect of looking at the newest entry alone: it is a result, so the model is next.
        Action::CallTools { calls }
            if crate::mutant("last_event_only")
                && calls.iter().any(|planned| matches!(planned.how, How::Reuse(..))) =>
        {
            Action::CallModel
        }
        action => action,
    }
}

/// What `outcome` makes of the session: [`advance::advance`], unless this process is to show what it guards against.
pub(super) fn advance(session: &Session, outcome: Outcome, policy: AgentPolicy) -> Transition {
    let shrunk = match &outcome {
        Outcome::Replied(generated) if crate::mutant("repair_in_place") => generated.repairs,
        _ => return advance::advance(session, outcome, policy),
    };
    // The defect: repair worked on the session itself, whose list is shorter now, and what stands beyond the place
    // where the list once ended is taken for new.
    let mut repaired = session.clone();
    repaired.last_message_number -= shrunk;
    let mut transition = advance::advance(&repaired, outcome, policy);
    transition.records.retain(|record| record.message_number > session.last_message_number);
    transition
}
