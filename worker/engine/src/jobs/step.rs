//! The step job: the eight hops, one after the other, and again for the next step while the lease is kept.

mod commit;
mod mutant;
mod span;
mod tries;

use crate::ctx::Ctx;
use crate::perform::{Interrupted, perform};
use crate::replay;
use crate::telemetry;
use crate::watchdog::UNYIELDING;
use apalis::prelude::{BoxDynError, Data};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{Instrument, Span, debug, warn};
use tries::Tries;
use wakeful_store::Error;
use wakeful_store::queue::{self, Job, Kind};
use wakeful_store::step::{Commit, Performance};
use wakeful_workflow::advance::{Compaction, CompactionEnd, Outcome};
use wakeful_workflow::agent::{Agent, Limits, Policy};
use wakeful_workflow::context::compaction;
use wakeful_workflow::fault::{Fault, Verdict};
use wakeful_workflow::plan::{Action, Stop, in_context, plan};
use wakeful_workflow::session::Session;

/// Claims after which a session that cannot be read is given up.
const UNREADABLE_ATTEMPTS: i64 = 5;

/// How a claim ends.
#[derive(Debug, PartialEq)]
enum End {
    /// The run closed or paused.
    Closed,
    /// Another worker has the session; whatever was in hand here is void.
    Stale,
    /// Given back: the slice is over and others wait, or the process drains.
    Released,
    /// To be tried again. `kind` is one word, for `error.type`.
    Retry { kind: &'static str, error: String, at_least: Option<Duration> },
}

/// Runs one claimed step job. Every end of it is accounted for here: apalis is only told that it is over.
///
/// # Errors
/// Never; the signature is apalis'.
pub async fn step(mut job: Job, ctx: Data<Arc<Ctx>>) -> Result<(), BoxDynError> {
    let ctx = Arc::clone(&ctx);
    let span = span::of_claim(&job);
    let lease = &mut job.lease;
    lease.trace_context = span.in_scope(|| telemetry::passed_on(lease.trace_context.as_deref()));
    async {
        let what = format!("a step of session {}", job.session_id.as_deref().unwrap_or_default());
        let work = ctx.watchdog.watch(job.lease.token, what, UNYIELDING, work(&ctx, &job));
        let work = AssertUnwindSafe(work).catch_unwind();
        let end = tokio::select! {
            end = work => end,
            () = job.lease.lost().cancelled() => Ok(End::Stale),
            () = ctx.shutdown.abort.cancelled() => Ok(release(&ctx, &job).await),
        };
        let end = end.unwrap_or_else(|_| End::Retry {
            kind: "panic",
            error: "internal error: the step panicked".to_owned(),
            at_least: None,
        });
        debug!(?end, "The claim is over");
        if let End::Retry { kind, error, at_least } = &end {
            telemetry::failed(&Span::current(), kind);
            retry(&ctx, &job, error, *at_least).await;
        }
    }
    .instrument(span)
    .await;
    Ok(())
}

async fn work(ctx: &Ctx, job: &Job) -> End {
    let Some(session_id) = job.session_id.as_deref() else {
        return End::Stale;
    };
    // A fault of the database is nobody's attempt: the step is looked at again under the same lease.
    let mut faults = 0;
    // Counted by the claim, and anew once it has made progress: a fault of the database after that finds them so.
    let mut counts = Counts { tries: Tries::of(job), attempt: job.attempt };
    loop {
        match claim(ctx, job, session_id, &mut counts).await {
            Ok(end) => return end,
            Err(error) if error.is_transient() && job.lease.is_live() => {
                faults += 1;
                warn!(%error, "The database failed the step; looking again");
                tokio::time::sleep(queue::delay(faults, None)).await;
            }
            // A job of no session: nothing is owed.
            Err(Error::NotFound { what: "session", ref id }) if id == session_id => {
                warn!(session.id = session_id, "A job whose session is not there is ended");
                return match ctx.store.end_job(&job.lease).await {
                    Ok(()) => End::Closed,
                    Err(error) => End::Retry { kind: "database", error: error.to_string(), at_least: None },
                };
            }
            Err(error @ Error::Corrupt { .. }) if counts.tries.stuck >= UNREADABLE_ATTEMPTS => {
                return give_up(ctx, job, session_id, &error).await;
            }
            Err(error) => return End::Retry { kind: "database", error: error.to_string(), at_least: None },
        }
    }
}

/// Ends the run of a session that no worker can read. Its agent, and so its own limit of attempts, is not known here.
async fn give_up(ctx: &Ctx, job: &Job, session_id: &str, error: &wakeful_store::Error) -> End {
    let reason = format!(
        "the session cannot be read: {error}. Remedy: mend the row that the error names, then retry the session"
    );
    match ctx.store.give_up(&job.lease, session_id, &reason).await {
        Ok(true) => {
            warn!(session.id = session_id, %error, "The run is failed: its session cannot be read");
            ctx.bus.notifier.session(session_id);
            ctx.bus.notifier.job();
            End::Closed
        }
        Ok(false) => End::Stale,
        Err(error) => End::Retry { kind: "database", error: error.to_string(), at_least: None },
    }
}

/// One claim: hydrate once, then step after step with the warm copy.
async fn claim(ctx: &Ctx, job: &Job, session_id: &str, counts: &mut Counts) -> wakeful_store::Result<End> {
    crate::failpoint("K3");
    let session = ctx.store.hydrate(session_id).await?;
    let span = span::of_run(ctx, &session);
    run(ctx, job, session, counts).instrument(span).await
}

/// What the claim counted: the tries of this step, and the how-manieth claim of it this is.
struct Counts {
    tries: Tries,
    attempt: i32,
}

/// The run, as far as this claim takes it.
async fn run(ctx: &Ctx, job: &Job, mut session: Session, counts: &mut Counts) -> wakeful_store::Result<End> {
    let mut steps = 0;
    let mut began = Instant::now();
    loop {
        let agent = ctx.agent_of(&session);
        let policy = agent.as_ref().map_or_else(|_| Policy::default(), Agent::policy);
        let outcome = match &agent {
            Ok(agent) => decide(ctx, job, &mut session, agent, counts.tries).await?,
            // Without its agent a run can only end: by the person who cancelled it, or by this fault.
            Err(error) => match plan(&session, &Limits::default()) {
                Action::Rest => {
                    ctx.store.end_job(&job.lease).await?;
                    return Ok(End::Closed);
                }
                Action::Stop(Stop::Cancelled) => Decided::Outcome(Outcome::Stopped(Stop::Cancelled)),
                Action::Stop(_)
                | Action::Begin
                | Action::CallModel
                | Action::Compact
                | Action::CallTools { .. }
                | Action::Pause => {
                    let fault = Fault::NotConfigured { message: error.to_string() };
                    Decided::Outcome(Outcome::Stopped(Stop::Failed(fault)))
                }
            },
        };
        let outcome = match outcome {
            Decided::Outcome(outcome) => outcome,
            Decided::End(end) => return Ok(end),
            Decided::Again => continue,
        };
        if let Outcome::Stopped(Stop::Failed(fault)) = &outcome {
            telemetry::failed(&Span::current(), fault.kind());
        }
        let no_summary = no_summary(&session, &outcome);
        let transition = mutant::advance(&session, outcome, policy);
        let performance = Performance { elapsed_s: began.elapsed().as_secs_f64(), attempt: counts.attempt };
        crate::failpoint(commit::failpoint_before(&transition));
        let commit = commit::commit(ctx, job, &session, &transition, performance).await?;
        crate::failpoint("K22");
        ctx.bus.notifier.session(session.session_id.as_str());
        if !transition.deliveries.is_empty() {
            ctx.bus.notifier.job();
        }
        match commit {
            Commit::Continued { wake_seq } => {
                let transition = transition.continuing();
                session.apply(&transition);
                // Before anything that may fail: what was committed is progress whatever comes next.
                if transition.step.is_some() || !transition.records.is_empty() {
                    counts.tries = Tries::default();
                }
                if transition.step.is_some() {
                    (counts.attempt, began) = (1, Instant::now());
                }
                if wake_seq != session.wake_seq {
                    ctx.store.refresh(&mut session).await?;
                }
                if let Some(end) = no_summary {
                    return Ok(end);
                }
                if transition.step.is_some() {
                    steps += 1;
                    if ctx.shutdown.draining.is_cancelled() || gives_way(ctx, job, steps).await? {
                        return Ok(release(ctx, job).await);
                    }
                }
            }
            Commit::Closed => {
                // A run of the same conversation may have been opened by this close.
                ctx.bus.notifier.job();
                return Ok(End::Closed);
            }
            Commit::Moved => {
                let read = ctx.store.hydrate(session.session_id.as_str()).await?;
                if read == session {
                    // Planned on again it would miss again, and pay for the model each time.
                    let error = "the commit missed a session that is as it was read".to_owned();
                    return Ok(End::Retry { kind: "moved", error, at_least: None });
                }
                // It may have been our own commit, whose answer was lost.
                if read.last_message_number > session.last_message_number {
                    counts.tries = Tries::default();
                }
                if read.last_step_number > session.last_step_number {
                    (counts.attempt, began) = (1, Instant::now());
                }
                session = read;
            }
            Commit::Stale => return Ok(End::Stale),
        }
    }
}

#[expect(
    clippy::large_enum_variant,
    reason = "there is one of them at a time, on its way from one line to the next"
)]
enum Decided {
    Outcome(Outcome),
    End(End),
    /// The session was read anew: plan again.
    Again,
}

/// Plans, and performs what was planned.
async fn decide(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    agent: &Agent,
    tries: Tries,
) -> wakeful_store::Result<Decided> {
    let action = mutant::plan(session, &agent.limits);
    if replay::feed(&ctx.store, &ctx.recordings, session, &action).await? {
        return Ok(Decided::Again);
    }
    if action == Action::Rest {
        ctx.store.end_job(&job.lease).await?;
        return Ok(Decided::End(End::Closed));
    }
    if let Some(fault) = tries.used_up(agent.limits.attempts, job.last_error.as_deref())
        && !matches!(action, Action::Stop(_))
    {
        return Ok(Decided::Outcome(Outcome::Stopped(Stop::Failed(fault))));
    }
    let mut action = match ctx.configured_tools(session, agent) {
        Ok(tools) => {
            let window = ctx.config.context_window(&agent.model);
            in_context(action, session, agent, &tools, window)
        }
        // Performing it meets the same fault.
        Err(_) => action,
    };
    let performed = loop {
        let asks_model = action == Action::CallModel;
        let performed = tokio::select! {
            performed = perform(ctx, &job.lease, session, agent, action) => performed,
            () = ctx.cancelled(session.session_id.as_str()) => {
                ctx.store.refresh(session).await?;
                return Ok(Decided::Again);
            }
        };
        match performed {
            // The estimate was too low. A summary once: there is none without an answer since the last one.
            Err(Interrupted::Fault(Fault::ContextOverflow { .. }))
                if asks_model && compaction::is_possible(session, &agent.context) =>
            {
                // The call that was refused is journalled with the summary.
                ctx.store.refresh(session).await?;
                action = Action::Compact;
            }
            performed => break performed,
        }
    };
    Ok(match performed {
        Ok(outcome) => Decided::Outcome(outcome),
        Err(Interrupted::Moved) => {
            // The heart may not have heard of it yet: planning on would go round until it does.
            if !job.lease.is_live() || !ctx.store.holds(&job.lease).await? {
                return Ok(Decided::End(End::Stale));
            }
            *session = ctx.store.hydrate(session.session_id.as_str()).await?;
            Decided::Again
        }
        Err(Interrupted::Store(error)) => return Err(error),
        Err(Interrupted::Fault(fault)) => {
            let stop = match fault.verdict() {
                Verdict::Fail { .. } => fault,
                Verdict::Retry { .. } if tries.ended_by_faults() >= agent.limits.attempts => {
                    Fault::Stuck { attempts: tries.stuck.max(1), last_error: fault.to_string() }
                }
                Verdict::Retry { after_ms } => {
                    return Ok(Decided::End(End::Retry {
                        kind: fault.kind(),
                        error: fault.to_string(),
                        at_least: after_ms.map(Duration::from_millis),
                    }));
                }
            };
            // The call that failed was begun after the session was read, and its end has to be journalled.
            ctx.store.refresh(session).await?;
            Decided::Outcome(Outcome::Stopped(Stop::Failed(stop)))
        }
    })
}

/// How the claim ends after a summary that failed: the provider is given time, unless none is asked for any more.
fn no_summary(session: &Session, outcome: &Outcome) -> Option<End> {
    let Outcome::Compacted(Compaction { end: CompactionEnd::Failed(fault), .. }) = outcome else {
        return None;
    };
    match fault.verdict() {
        Verdict::Retry { after_ms } if session.compaction_failures + 1 < compaction::FAILURES => {
            Some(End::Retry {
                kind: fault.kind(),
                error: format!("no summary of the context: {fault}"),
                at_least: after_ms.map(Duration::from_millis),
            })
        }
        Verdict::Retry { .. } | Verdict::Fail { .. } => None,
    }
}

/// Whether the lease is to be given up after so many steps of this claim.
async fn gives_way(ctx: &Ctx, job: &Job, steps: u32) -> wakeful_store::Result<bool> {
    Ok(steps.is_multiple_of(ctx.config.queue.slice_steps)
        && ctx.store.others_wait(Kind::Step, &job.runner).await?)
}

async fn release(ctx: &Ctx, job: &Job) -> End {
    if let Err(error) = ctx.store.release(&job.lease).await {
        warn!(%error, "A job was not released; it is free when its lease ends");
    }
    ctx.bus.notifier.job();
    End::Released
}

async fn retry(ctx: &Ctx, job: &Job, error: &str, at_least: Option<Duration>) {
    let delay = queue::delay(job.stuck, at_least);
    warn!(
        session.id = job.session_id,
        error,
        delay_ms = delay.as_millis() as u64,
        "The step failed; trying again later"
    );
    if let Err(error) = ctx.store.retry_later(&job.lease, delay, error).await {
        warn!(%error, "The job was not given back; it is free when its lease ends");
    }
}
