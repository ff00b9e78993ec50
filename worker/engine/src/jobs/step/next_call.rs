//! The model call that follows a commit. It is planned and prepared before the commit, which then records its intent too.

use crate::ctx::Ctx;
use crate::perform::{PreparedCall, prepare};
use wakeful_workflow::advance::{Next, Transition};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::plan::{Action, in_context, plan};
use wakeful_workflow::session::Session;

/// Prepares the model call that follows `transition` in this claim. The commit of `transition` then records its
/// intent, which saves one statement for each model call. `None`: something else may follow, or the
/// call cannot be prepared; the next plan finds out. Reads nothing from the database, and leaves `session` as
/// it was. `may_try`: the step has tries left after the commit.
pub(super) async fn next_call(
    ctx: &Ctx,
    session: &mut Session,
    transition: &Transition,
    agent: &Agent,
    may_try: bool,
) -> Option<PreparedCall> {
    let goes_on = match transition.next {
        // The calls that it opened have ended.
        Next::NextStep => true,
        Next::SameStep => transition.calls_opened.is_empty(),
        Next::Close(_) => false,
    };
    // A replay may have to send itself a message first. An interrupted call may have to be resumed, from its
    // text in the database.
    let simple =
        session.policy.replay.is_none() && (session.interrupted.is_empty() || transition.generation_over);
    // While the provider's gate is not open, another model may be called, or none.
    let free = ctx.plugins.models.gate_of(&agent.model).is_none_or(|gate| ctx.gates.is_open(&gate));
    if !goes_on || !simple || !may_try || !free || ctx.shutdown.draining.is_cancelled() {
        return None;
    }
    let before = session.apply_tentatively(transition);
    let call = if calls_model(ctx, session, agent) { prepare(ctx, session, agent).await.ok() } else { None };
    session.undo(before, transition);
    call
}

fn calls_model(ctx: &Ctx, session: &Session, agent: &Agent) -> bool {
    let action = plan(session, &agent.limits);
    if action != Action::CallModel {
        return false;
    }
    let Ok(tools) = ctx.configured_tools(session, agent) else { return false };
    let window = ctx.config.context_window(&agent.model);
    in_context(action, session, agent, &tools, window) == Action::CallModel
}
