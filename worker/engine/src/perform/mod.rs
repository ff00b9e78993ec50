//! Perform: the only door to models and tools. An [`Action`] comes in, an [`Outcome`] goes out, and no transaction is
//! open meanwhile.

mod chunks;
mod compact;
mod generate;
mod intent;
mod recorded;
mod tools;

use crate::ctx::Ctx;
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::Outcome;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::plan::{Action, Stop};
use wakeful_workflow::replay::has_recorded_answers;
use wakeful_workflow::session::Session;

/// Why an action has no outcome.
#[derive(Debug)]
pub enum Interrupted {
    /// It failed; [`Fault::verdict`] says what that means.
    Fault(Fault),
    /// The lease is lost, or the session is not as it was read: nothing may be done on the strength of it.
    Moved,
    /// The database did not answer.
    Store(wakeful_store::Error),
}

impl From<Fault> for Interrupted {
    fn from(fault: Fault) -> Self {
        Interrupted::Fault(fault)
    }
}

impl From<wakeful_store::Error> for Interrupted {
    fn from(error: wakeful_store::Error) -> Self {
        Interrupted::Store(error)
    }
}

/// Performs `action` for `session`. Dropping the future abandons it: what that may leave behind is what the ledger is for.
///
/// # Errors
/// [`Interrupted`].
pub async fn perform(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    action: Action,
) -> Result<Outcome, Interrupted> {
    match action {
        Action::Begin => Ok(Outcome::Begun),
        // Which of the two it is, the source says.
        Action::CallModel | Action::Compact if has_recorded_answers(session) => {
            match recorded::summary(ctx, lease, session, agent).await? {
                Some(outcome) => Ok(outcome),
                None => recorded::answer(ctx, lease, session, agent).await,
            }
        }
        Action::CallModel => {
            let outcome = generate::call_model(ctx, lease, session, agent).await?;
            if crate::mutant("tools_before_commit") {
                tools::call_before_commit(ctx, lease, session, agent, &outcome).await;
            }
            Ok(outcome)
        }
        Action::Compact => compact::compact(ctx, lease, session, agent).await,
        Action::CallTools { calls } => tools::call_tools(ctx, lease, session, agent, calls).await,
        Action::Stop(stop) => Ok(Outcome::Stopped(stop)),
        Action::Pause => Ok(Outcome::Paused),
        Action::Rest => Ok(Outcome::Stopped(Stop::Finished)),
    }
}
