//! Pauses: a step that one holds up is given back, and waits without a slot.

use super::ClaimEnd;
use crate::ctx::Ctx;
use crate::model::provider_of;
use std::time::Duration;
use tracing::{info, warn};
use wakeful_store::queue::Job;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::pause::{Step, Subject};
use wakeful_workflow::plan::{Action, How};
use wakeful_workflow::session::Session;

/// A waiting job looks by itself after this time, in case that nothing lets it go.
const LOOK: Duration = Duration::from_secs(300);

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
    let step = Step {
        space_id: &session.space_id,
        agent: &session.agent,
        trigger_type: &session.trigger_type,
        conversation_id: session.conversation_id.as_str(),
        provider,
        tools: &tools,
    };
    let (subject, why) = ctx.pauses.holding(&step, &job.pause_passes)?;
    Some(ClaimEnd::Held { subject, why })
}

/// Gives the job back.
pub(super) async fn hold(ctx: &Ctx, job: &Job, subject: &Subject, why: &str) {
    match ctx.store.hold(&job.lease, subject, LOOK).await {
        Ok(goes_on) => {
            info!(session.id = job.session_id, why, "The step waits");
            if goes_on {
                ctx.bus.notifier.job_of(job.kind, &job.runner);
            }
        }
        Err(error) => {
            warn!(%error, "The job could not be given back; workers can claim it when its lease ends")
        }
    }
}
