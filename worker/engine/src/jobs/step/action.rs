//! Hops 3 to 5: the next action of a session, from its plan to what was performed.

use super::ahead::results_of;
use super::end::ClaimEnd;
use super::files_gate::{self, Admitted};
use super::provider::{self, Routed, Way};
use super::round::{Ready, RoundResult};
use super::unused::{withdraw_intent, withdraw_starts};
use super::{Counts, held, tries};
use crate::ctx::Ctx;
use crate::perform::{Unperformed, perform};
use crate::replay;
use std::ops::ControlFlow;
use wakeful_store::Result;
use wakeful_store::queue::Job;
use wakeful_workflow::advance::Performed;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::context::compaction;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::plan::{Action, Stop, in_context, plan};
use wakeful_workflow::replay::has_recorded_replies;
use wakeful_workflow::session::Session;

/// Hops 3 to 5: plans the next action and performs it.
pub(super) async fn plan_and_perform(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    agent: &Agent,
    counts: &mut Counts,
    mut ready: Ready<'_>,
) -> Result<RoundResult> {
    let action = match next_action(ctx, job, session, agent, counts).await? {
        ControlFlow::Continue(action) => action,
        ControlFlow::Break(result) => return Ok(result),
    };
    let mut way = None;
    if matches!(action, Action::CallModel | Action::Compact) && !has_recorded_replies(session) {
        match choose_way(ctx, job, session, agent, counts).await? {
            ControlFlow::Continue(chosen) => way = Some(chosen),
            ControlFlow::Break(result) => return Ok(result),
        }
    }
    let configured = agent;
    let agent = way.as_ref().map_or(configured, |way| &*way.agent);
    let action = match ctx.configured_tools(session, agent) {
        Ok(tools) => {
            let window = ctx.config.context_window(&agent.model);
            in_context(action, session, agent, &tools, window)
        }
        // Without the tools the size of the context is unknown. The model call asks for them again and
        // reports this error.
        Err(_) => action,
    };
    if let Action::CallTools { calls } = &action
        && let Some(results) = results_of(calls, ready.results.take())
    {
        return Ok(RoundResult::Performed(results));
    }
    let probe = match files_gate::admit(ctx, job, session, &action, &mut counts.troubles).await? {
        Admitted::Go(probe) => probe,
        Admitted::Wait(end) => {
            withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
            return Ok(RoundResult::End(end));
        }
    };
    ready.call = ready.call.filter(|one| action == Action::CallModel && one.call.is_of(&agent.model));
    if ready.call.is_some() {
        counts.uncalled = None;
    } else {
        withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
    }
    let Some(performed) = perform_or_summarise(ctx, job, session, agent, action, ready).await? else {
        return Ok(RoundResult::Again);
    };
    Ok(match performed {
        Ok(performed) => {
            if let Some(way) = way {
                provider::performed(ctx, way, &performed, &mut counts.troubles).await;
            }
            files_gate::performed(ctx, probe, &mut counts.troubles).await;
            RoundResult::Performed(performed)
        }
        Err(Unperformed::Reread) => reread(ctx, job, session).await?,
        Err(Unperformed::Store(error)) => return Err(error),
        Err(Unperformed::Host(why)) => RoundResult::End(ClaimEnd::Host { why }),
        Err(Unperformed::SeedAway(why)) => {
            RoundResult::End(files_gate::clone_away(ctx, session, probe, &why).await)
        }
        Err(Unperformed::Fault(fault)) => {
            after_fault(ctx, job, session, (configured, way), fault, counts).await?
        }
    })
}

/// Hop 3: plans the next action. Breaks if the round ends without one: a replay's message was sent, nothing is left to do, no try is
/// left, or a pause holds the step up.
async fn next_action(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    agent: &Agent,
    counts: &mut Counts,
) -> Result<ControlFlow<RoundResult, Action>> {
    if session.lacks_messages(agent.context.strategy) {
        *session = ctx.store.hydrate(session.session_id.as_str()).await?;
    }
    let tries = counts.tries;
    let action = plan(session, &agent.limits);
    if replay::send_due_input(&ctx.store, &ctx.recordings, session, &action).await? {
        return Ok(ControlFlow::Break(RoundResult::Again));
    }
    if action == Action::Rest {
        ctx.store.end_job(&job.lease).await?;
        return Ok(ControlFlow::Break(RoundResult::End(ClaimEnd::Closed)));
    }
    if let Some(fault) =
        tries.used_up(agent.limits.attempts, job.last_error.as_deref(), || tries::doing(session))
        && !matches!(action, Action::Stop(_))
    {
        return Ok(ControlFlow::Break(RoundResult::Performed(Performed::Stopped(Stop::Failed(fault)))));
    }
    if let Some(end) = held::by_a_pause(ctx, job, session, agent, &action) {
        withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
        return Ok(ControlFlow::Break(RoundResult::End(end)));
    }
    Ok(ControlFlow::Continue(action))
}

/// Chooses the model to call. Breaks if none may be called now.
async fn choose_way<'a>(
    ctx: &'a Ctx,
    job: &Job,
    session: &mut Session,
    agent: &'a Agent,
    counts: &mut Counts,
) -> Result<ControlFlow<RoundResult, Way<'a>>> {
    match provider::route(ctx, job, session, agent, &counts.troubles).await? {
        Routed::Call(chosen) => Ok(ControlFlow::Continue(*chosen)),
        Routed::Wait(end) => {
            withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
            Ok(ControlFlow::Break(RoundResult::End(end)))
        }
        Routed::Fail(fault) => {
            withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
            ctx.store.refresh(session).await?;
            Ok(ControlFlow::Break(RoundResult::Performed(Performed::Stopped(Stop::Failed(fault)))))
        }
    }
}

/// Hops 4 and 5. If the provider finds the context too long, summarises it instead. `None`: the run was cancelled meanwhile.
async fn perform_or_summarise(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    agent: &Agent,
    mut action: Action,
    ready: Ready<'_>,
) -> Result<Option<std::result::Result<Performed, Unperformed>>> {
    let Ready { call: mut committed, started, results: _ } = ready;
    loop {
        let asks_model = action == Action::CallModel;
        let performed = tokio::select! {
            performed = perform(ctx, &job.lease, session, agent, action, committed.take(), started) => performed,
            () = ctx.cancelled(session.session_id.as_str()) => {
                ctx.store.refresh(session).await?;
                withdraw_starts(ctx, job, session, started).await?;
                return Ok(None);
            }
        };
        match performed {
            // The provider found the context too long: our estimate was too low. Summarise, then call again.
            // This cannot loop, because `is_possible` requires a reply of the model since the last summary.
            Err(Unperformed::Fault(Fault::ContextOverflow { .. }))
                if asks_model && compaction::is_possible(session, &agent.context) =>
            {
                // Read the refused call from the database: the summary's commit journals its end.
                ctx.store.refresh(session).await?;
                action = Action::Compact;
            }
            performed => return Ok(Some(performed)),
        }
    }
}

/// Reads the session again, unless the lease is lost.
async fn reread(ctx: &Ctx, job: &Job, session: &mut Session) -> Result<RoundResult> {
    // The lease may be lost before the heartbeat notices. Ask the database now: otherwise this would
    // plan and be interrupted again and again until the next heartbeat.
    if !job.lease.is_live() || !ctx.store.holds(&job.lease).await? {
        return Ok(RoundResult::End(ClaimEnd::Stale));
    }
    *session = ctx.store.hydrate_tail(session.session_id.as_str()).await?.session;
    Ok(RoundResult::Again)
}

/// Decides what follows from a fault: the end of the claim, or that of the run.
async fn after_fault(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    (configured, way): (&Agent, Option<Way<'_>>),
    fault: Fault,
    counts: &mut Counts,
) -> Result<RoundResult> {
    let stop = match provider::after_fault(ctx, job, session, (configured, way), fault, counts).await? {
        Ok(end) => return Ok(RoundResult::End(end)),
        Err(fault) => fault,
    };
    // The failed call began after the session was read. Read it now: the closing commit journals its
    // end.
    ctx.store.refresh(session).await?;
    Ok(RoundResult::Performed(Performed::Stopped(Stop::Failed(stop))))
}
