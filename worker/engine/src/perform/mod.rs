//! Hops 4 and 5. [`perform`] is the only caller of models and tools: it takes an [`Action`] and returns an
//! [`Outcome`]. No transaction is open while a model or a tool works.
#![doc = include_str!("README.md")]

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

/// Why an action produced no outcome.
#[derive(Debug)]
pub enum Abandoned {
    /// The action failed. [`Fault::verdict`] says whether to retry it or to fail the run.
    Fault(Fault),
    /// The lease is lost, or the session has changed since it was read. The caller must hydrate again before
    /// it acts.
    Moved,
    /// The database did not answer.
    Store(wakeful_store::Error),
}

impl From<Fault> for Abandoned {
    fn from(fault: Fault) -> Self {
        Abandoned::Fault(fault)
    }
}

impl From<wakeful_store::Error> for Abandoned {
    fn from(error: wakeful_store::Error) -> Self {
        Abandoned::Store(error)
    }
}

/// Performs `action` for `session`. Dropping the future abandons the action half-way. The next claim finds in
/// the ledger which tool calls may have run, and in `generations` which model calls had begun.
///
/// # Errors
/// [`Abandoned`].
pub async fn perform(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    action: Action,
) -> Result<Outcome, Abandoned> {
    match action {
        Action::Begin => Ok(Outcome::Begun),
        // A replay follows its source: if the source wrote a summary here, so does the replay.
        Action::CallModel | Action::Compact if has_recorded_answers(session) => {
            match recorded::summary(ctx, lease, session, agent).await? {
                Some(outcome) => Ok(outcome),
                None => recorded::answer(ctx, lease, session, agent).await,
            }
        }
        Action::CallModel => generate::call_model(ctx, lease, session, agent).await,
        Action::Compact => compact::compact(ctx, lease, session, agent).await,
        Action::CallTools { calls } => tools::call_tools(ctx, lease, session, agent, calls).await,
        Action::Stop(stop) => Ok(Outcome::Stopped(stop)),
        Action::Pause => Ok(Outcome::Paused),
        // Never reached: the step job ends the job itself when nothing is left to do.
        Action::Rest => Ok(Outcome::Stopped(Stop::Finished)),
    }
}
