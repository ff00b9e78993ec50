//! Steps that are given back and wait without a slot: those that a pause holds up, those whose agent this process lacks, those of
//! texts whose data key cannot be had, and those whose files this host cannot keep.

use super::unused::withdraw_intent;
use super::{ClaimEnd, Counts, RoundResult};
use crate::ctx::Ctx;
use crate::jobs::{LOOK, give_back};
use crate::model::provider_of;
use crate::pauses::step_of;
use tracing::{info, warn};
use wakeful_config::AgentError;
use wakeful_store::queue::{self, Job};
use wakeful_workflow::advance::Performed;
use wakeful_workflow::agent::{Agent, Limits};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::plan::{Action, How, Stop, plan};
use wakeful_workflow::session::Session;

/// The key store is asked again after the delay of so many attempts: about two seconds.
const KEY_ATTEMPTS: i32 = 3;

/// The same for a host that cannot keep a session's files or carry out a call.
const HOST_ATTEMPTS: i32 = 3;

/// Returns the end of the claim if a pause holds up what the step does next. A run that ends is never held up, and neither is a
/// replay.
pub(super) fn by_a_pause(
    ctx: &Ctx,
    job: &Job,
    session: &Session,
    agent: &Agent,
    action: &Action,
) -> Option<ClaimEnd> {
    if ctx.pauses.none() || !job.runner.is_empty() {
        return None;
    }
    let (provider, tools): (Option<&str>, Vec<&str>) = match action {
        Action::Begin => (None, Vec::new()),
        Action::CallModel | Action::Compact => (Some(provider_of(&agent.model)), Vec::new()),
        Action::CallTools { calls } => {
            let run = calls.iter().filter(|planned| planned.how == How::Run);
            (None, run.map(|planned| planned.call.name.as_str()).collect())
        }
        Action::Stop(_) | Action::Rest | Action::Pause => return None,
    };
    let (subject, why) = ctx.pauses.holding(&step_of(session, provider, &tools), &job.pause_passes)?;
    Some(ClaimEnd::Held { subject, why })
}

/// Gives the job back until the key store is asked again. It does not count as an attempt, however often.
pub(super) async fn wait_for_key(ctx: &Ctx, job: &Job, why: &str) {
    warn!(session.id = job.session_id, why, "The step waits for its data key");
    let delay = queue::delay(KEY_ATTEMPTS, None);
    give_back(ctx, job, || ctx.store.postpone(&job.lease, delay, why)).await;
}

/// Gives the job back, and any worker may take it next: another host may keep the files or carry out the call, and this one may be
/// able to by then. It does not count as an attempt, however often: neither the model nor its user can do anything about it.
pub(super) async fn wait_for_host(ctx: &Ctx, job: &Job, why: &str) {
    warn!(session.id = job.session_id, why, "The step waits for a host that can carry it out");
    let why = format!("worker {}: {why}", ctx.identity.worker_id);
    let delay = queue::delay(HOST_ATTEMPTS, None);
    give_back(ctx, job, || ctx.store.postpone(&job.lease, delay, &why)).await;
}

/// What a worker does with a session whose agent it lacks: another worker may have a newer configuration, or an older one. A
/// replay has no other worker, so its run fails. A run that is cancelled ends anywhere.
pub(super) async fn without_agent(
    ctx: &Ctx,
    job: &Job,
    session: &Session,
    error: &AgentError,
    counts: &mut Counts,
) -> wakeful_store::Result<RoundResult> {
    match plan(session, &Limits::default()) {
        Action::Rest => {
            ctx.store.end_job(&job.lease).await?;
            Ok(RoundResult::End(ClaimEnd::Closed))
        }
        Action::Stop(Stop::Cancelled) => Ok(RoundResult::Performed(Performed::Stopped(Stop::Cancelled))),
        Action::Stop(_)
        | Action::Begin
        | Action::CallModel
        | Action::Compact
        | Action::CallTools { .. }
        | Action::Pause
            if job.runner.is_empty() =>
        {
            withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
            Ok(RoundResult::End(ClaimEnd::Left { agent: session.agent.clone() }))
        }
        Action::Stop(_)
        | Action::Begin
        | Action::CallModel
        | Action::Compact
        | Action::CallTools { .. }
        | Action::Pause => {
            let fault = Fault::NotConfigured { message: error.to_string() };
            Ok(RoundResult::Performed(Performed::Stopped(Stop::Failed(fault))))
        }
    }
}

/// Gives the job back to the workers that have its agent.
pub(super) async fn leave(ctx: &Ctx, job: &Job, agent: &str) {
    if give_back(ctx, job, || ctx.store.leave(&job.lease, agent, LOOK)).await.is_some() {
        info!(
            session.id = job.session_id,
            agent, "This process lacks the agent; the step waits for one that has it"
        );
    }
}
