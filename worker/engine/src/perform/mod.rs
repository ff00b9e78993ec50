//! Hops 4 and 5. [`perform`] is the only caller of models and tools: it takes an [`Action`] and returns
//! [`Performed`]. No transaction is open while a model or a tool works.
#![doc = include_str!("README.md")]

mod chunks;
mod compact;
mod cut;
mod generate;
mod intent;
mod recorded;
mod tools;
mod used;

pub use chunks::Chunks;
pub use cut::CutCalls;
pub(crate) use generate::prepare;
pub use generate::{CommittedCall, PreparedCall};
pub use tools::StartedCalls;
pub(crate) use tools::refusal;

use crate::ctx::Ctx;
use futures::FutureExt as _;
use std::panic::AssertUnwindSafe;
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::Performed;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::plan::{Action, Stop};
use wakeful_workflow::record::Reply;
use wakeful_workflow::replay::has_recorded_replies;
use wakeful_workflow::session::Session;

/// Why an action was not performed to its end.
#[derive(Debug)]
pub enum Unperformed {
    /// The action failed. [`Fault::verdict`] says whether to retry it or to fail the run.
    Fault(Fault),
    /// The lease is lost, or the session has changed since it was read. The caller must hydrate again before
    /// it acts.
    Reread,
    /// The database failed or did not respond.
    Store(wakeful_store::Error),
    /// The URL that the session's files begin with does not answer, and why.
    SeedAway(String),
    /// This host cannot keep the session's files or carry out a call, and why.
    Host(String),
}

impl From<Fault> for Unperformed {
    fn from(fault: Fault) -> Self {
        Unperformed::Fault(fault)
    }
}

impl From<wakeful_store::Error> for Unperformed {
    fn from(error: wakeful_store::Error) -> Self {
        Unperformed::Store(error)
    }
}

/// Makes a model call. A panic of the model's code is a fault that names the model: a program's own models are called here too.
async fn called(model: &str, replying: impl Future<Output = Result<Reply, Fault>>) -> Result<Reply, Fault> {
    AssertUnwindSafe(replying).catch_unwind().await.unwrap_or_else(|panic| {
        let said = tools::panic_text(&*panic);
        Err(Fault::Internal { message: format!("the code of model {model} panicked: {said}") })
    })
}

/// Performs `action` for `session`. `committed` is the model call of [`Action::CallModel`] if the commit before it
/// recorded its intent; other actions ignore it. `started` has the tool calls that the commit before it started. Dropping the future
/// abandons the action half-way. The next claim finds in the ledger which tool calls may have run, and in `generations` which model
/// calls had begun.
///
/// # Errors
/// [`Unperformed`].
pub async fn perform(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    action: Action,
    committed: Option<CommittedCall>,
    started: &StartedCalls,
) -> Result<Performed, Unperformed> {
    match action {
        Action::Begin => Ok(Performed::Begun),
        // A replay follows its source: if the source wrote a summary here, so does the replay.
        Action::CallModel | Action::Compact if has_recorded_replies(session) => {
            match recorded::summary(ctx, lease, session, agent).await? {
                Some(performed) => Ok(performed),
                None => recorded::reply(ctx, session, agent).await,
            }
        }
        Action::CallModel => generate::call_model(ctx, lease, session, agent, committed).await,
        Action::Compact => compact::compact(ctx, lease, session, agent).await,
        Action::CallTools { calls } => tools::call_tools(ctx, lease, session, agent, calls, started).await,
        Action::Stop(Stop::Cancelled) => {
            let cut = ctx.cut.tools_of(&session.session_id);
            Ok(match used::used(ctx, session, agent).await? {
                None if cut.is_empty() => Performed::Stopped(Stop::Cancelled),
                used => Performed::Cancelled { used, cut },
            })
        }
        Action::Stop(stop) => Ok(Performed::Stopped(stop)),
        Action::Pause => Ok(Performed::Paused),
        // Never reached: the step job ends the job itself when nothing is left to do.
        Action::Rest => Ok(Performed::Stopped(Stop::Finished)),
    }
}
