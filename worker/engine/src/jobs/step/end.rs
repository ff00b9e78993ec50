//! How a claim of a step job ends.

use super::provider::Back;
use crate::ctx::Ctx;
use crate::jobs::give_back;
use std::time::Duration;
use tracing::warn;
use wakeful_store::queue::{self, Job, Kind};
use wakeful_store::step::GivenUp;
use wakeful_workflow::advance::Transition;
use wakeful_workflow::pause::Subject;
use wakeful_workflow::session::{Session, SessionStatus};
use wakeful_workflow::told::Reason;

/// How a claim ends.
#[derive(Debug, PartialEq)]
pub(super) enum ClaimEnd {
    /// The job has ended: the run closed or paused, or there was nothing to do.
    Closed,
    /// This claim lost its lease. Another worker may hold the session, so nothing more is written here.
    Stale,
    /// The job was given back: other jobs wait at the end of its slice, or the process drains.
    Released,
    /// The job is tried again later, after `at_least` if the fault names a delay. `kind` is the span's
    /// `error.type`.
    Retry { kind: &'static str, error: String, at_least: Option<Duration> },
    /// A pause holds the job up.
    Held { subject: Subject, why: String },
    /// The data key of its texts cannot be had.
    WithoutKey { why: String },
    /// This host cannot keep the session's files. Another worker's host may.
    Host { why: String },
    /// This process lacks the agent, and leaves the job to those that have it.
    Left { agent: String },
    /// The job was not done because of its model's provider, or of a fault of the model call.
    SetBack { kind: &'static str, back: Box<Back> },
}

impl ClaimEnd {
    /// The database, or what it holds, did not let the job be done.
    pub(super) fn retry(error: &wakeful_store::Error) -> ClaimEnd {
        ClaimEnd::Retry { kind: "database", error: error.to_string(), at_least: None }
    }

    /// Whether the messages in memory are those of the last commit, and no other claim has made one since.
    pub(super) fn is_known(&self) -> bool {
        match self {
            ClaimEnd::Closed | ClaimEnd::Released | ClaimEnd::Held { .. } => true,
            ClaimEnd::Stale
            | ClaimEnd::Retry { .. }
            | ClaimEnd::WithoutKey { .. }
            | ClaimEnd::Host { .. }
            | ClaimEnd::Left { .. }
            | ClaimEnd::SetBack { .. } => false,
        }
    }

    /// For the log and the metrics. The errors of an encrypted conversation do not belong there.
    pub(super) fn name(&self) -> &'static str {
        match self {
            ClaimEnd::Closed => "closed",
            ClaimEnd::Stale => "stale",
            ClaimEnd::Released => "released",
            ClaimEnd::Retry { kind, .. } | ClaimEnd::SetBack { kind, .. } => kind,
            ClaimEnd::Held { .. } => "paused",
            ClaimEnd::WithoutKey { .. } => "no_key",
            ClaimEnd::Host { .. } => "no_host",
            ClaimEnd::Left { .. } => "no_agent",
        }
    }
}

/// Ends the run of a session that cannot be read (`failed`) or whose step the database fails again and again
/// (`needs_attention`).
pub(super) async fn give_up(
    ctx: &Ctx,
    job: &Job,
    session_id: &str,
    (status, reason): (SessionStatus, String),
) -> ClaimEnd {
    match ctx.store.give_up(&job.lease, session_id, status, &reason).await {
        Ok(GivenUp::Ended(status)) => {
            ctx.metrics.run_ended(status.as_str());
            let reason = ctx.store.in_log(Some(session_id), &reason);
            warn!(session.id = session_id, status = status.as_str(), reason, "Gave the run up");
            ctx.bus.notifier.session(session_id);
            ctx.bus.notifier.job_of(Kind::Step, &job.runner);
            ClaimEnd::Closed
        }
        Ok(GivenUp::NoRun) => ClaimEnd::Closed,
        Ok(GivenUp::Stale) => ClaimEnd::Stale,
        Err(error) => ClaimEnd::retry(&error),
    }
}

/// If this commit ends the run as failed, lets it tell the person, in the agent's words. A person is told once of a run, however
/// often an operator retries it.
pub(super) async fn with_failure_notice(
    ctx: &Ctx,
    session: &Session,
    transition: Transition,
) -> wakeful_store::Result<Transition> {
    let on_failed = ctx.config.agents.get(&session.agent).and_then(|agent| agent.on_failed.as_deref());
    if on_failed.is_none() || transition.status() != Some(SessionStatus::Failed) {
        return Ok(transition);
    }
    let (session_id, run_id) = (session.session_id.as_str(), transition.run_id.as_str());
    if ctx.store.was_told(session_id, run_id, Reason::Failed).await? {
        return Ok(transition);
    }
    Ok(transition.telling(session, on_failed))
}

/// Returns whether the job's slice (`queue.slice_steps`) ends after `steps` steps of this claim, so that it is to be given
/// back if other step jobs wait.
pub(super) fn slice_ends(ctx: &Ctx, job: &Job, steps: u32) -> bool {
    steps.is_multiple_of(ctx.config.queue.slice_steps) && !job.has_room_beside()
}

/// Gives the job back. Any worker may claim it at once.
pub(super) async fn release(ctx: &Ctx, job: &Job) -> ClaimEnd {
    let drains = ctx.shutdown.draining.is_cancelled();
    if drains {
        give_back(ctx, job, || ctx.store.hand_over(&job.lease)).await;
    } else {
        give_back(ctx, job, || ctx.store.release(&job.lease)).await;
        ctx.bus.notifier.job_of(Kind::Step, &job.runner);
    }
    ClaimEnd::Released
}

/// Gives the job back until a delay is over, which grows with the job's claims without progress.
pub(super) async fn retry(ctx: &Ctx, job: &Job, error: &str, at_least: Option<Duration>) {
    let delay = queue::delay(job.stuck, at_least);
    warn!(
        session.id = job.session_id,
        error,
        delay_ms = delay.as_millis() as u64,
        "The step failed; trying again later"
    );
    give_back(ctx, job, || ctx.store.retry_later(&job.lease, delay, error)).await;
}
