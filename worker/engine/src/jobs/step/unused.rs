//! Takes back what a commit began for the next round if that round does not use it: the intent of a model call, and
//! starts of tool calls.

use crate::ctx::Ctx;
use crate::perform::StartedCalls;
use wakeful_store::Result;
use wakeful_store::queue::Job;
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::session::Session;

/// Deletes the intent of a model call that is not made after all. Otherwise the session would be read with an
/// interrupted call, and the next reply would journal a GEN_RESUMED and count an attempt that never was.
pub(super) async fn withdraw_intent(
    ctx: &Ctx,
    job: &Job,
    session_id: &SessionId,
    uncalled: &mut Option<GenerationId>,
) -> Result<()> {
    if let Some(generation_id) = uncalled {
        ctx.store.withdraw_generation(&job.lease, session_id, generation_id).await?;
        *uncalled = None;
    }
    Ok(())
}

/// Takes back the starts of calls that do not run after all: a cancelled run would report them as uncertain.
pub(super) async fn withdraw_starts(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    started: &StartedCalls,
) -> Result<()> {
    let unused = started.take_unused();
    if !unused.is_empty() {
        ctx.store.withdraw_starts(&job.lease, &session.session_id, &unused).await?;
        ctx.store.refresh(session).await?;
    }
    Ok(())
}
