//! The step job. It takes a claimed session through the hops of ARCHITECTURE.md: hydrate (2,
//! `hydrate_and_run`), plan and perform (3 to 5, `plan_and_perform`), advance (6) and commit (7, `commit`). `run_steps`
//! is the loop (8). Before the first step is complete it usually goes round three times, each with a commit:
//! begin, model call, tool calls. The last two are one if the tools are pure and fast and the process has other
//! jobs (`ahead`). It goes on until the run closes or pauses, or other jobs need the slot.

mod agent;
mod ahead;
mod commit;
mod end;
mod files_gate;
mod held;
mod next_call;
mod provider;
mod round;
mod span;
mod starts;
mod tries;
mod unused;

use crate::ctx::Ctx;
use crate::perform::{CommittedCall, StartedCalls, Unperformed, perform};
use crate::replay;
use crate::telemetry;
use crate::watchdog::UNYIELDING;
use agent::OwnAgent;
use ahead::{results_of, run_ahead};
use apalis::prelude::{BoxDynError, Data};
use end::{ClaimEnd, give_up, release, retry, slice_ends, with_failure_notice};
use files_gate::Admitted;
use futures::FutureExt;
use next_call::next_call;
use provider::{Routed, Troubles, retry_summary_later};
use round::{Ready, RoundResult};
use starts::start_calls;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;
use tracing::{Instrument, Span, debug, warn};
use tries::RetryCounts;
use unused::{withdraw_intent, withdraw_starts};
use wakeful_store::Error;
use wakeful_store::queue::{self, Job, Kind};
use wakeful_store::step::{Commit, Performance};
use wakeful_workflow::advance::{self, Performed};
use wakeful_workflow::agent::{Agent, AgentPolicy};
use wakeful_workflow::context::compaction;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::plan::{Action, Stop, in_context, plan};
use wakeful_workflow::replay::has_recorded_replies;
use wakeful_workflow::session::{Session, SessionStatus};

/// Runs one claimed step job and records in the job's row how the claim ended. apalis only learns that the
/// job is over.
///
/// # Errors
/// Never. apalis requires this signature.
pub async fn step(mut job: Job, ctx: Data<Arc<Ctx>>) -> Result<(), BoxDynError> {
    let ctx = Arc::clone(&ctx);
    let span = span::of_claim(&job);
    let lease = &mut job.lease;
    lease.trace_context = span.in_scope(|| telemetry::passed_on(lease.trace_context.as_deref()));
    async {
        let what = format!("a step of session {}", job.session_id.as_deref().unwrap_or_default());
        let work = ctx.watchdog.watch(job.lease.job_id, what, UNYIELDING, work(&ctx, &job));
        let work = AssertUnwindSafe(work).catch_unwind();
        let end = tokio::select! {
            end = work => end,
            () = job.lease.lost_to_others() => Ok(ClaimEnd::Stale),
            () = ctx.shutdown.abort.cancelled() => Ok(release(&ctx, &job).await),
        };
        if let Some(session_id) = job.session_id.as_deref() {
            ctx.workspaces.release(session_id, job.lease.token);
        }
        let end = end.unwrap_or_else(|_| ClaimEnd::Retry {
            kind: "panic",
            error: "internal error: the step panicked".to_owned(),
            at_least: None,
        });
        debug!(end = end.name(), "The claim is over");
        ctx.metrics.claim_ended(end.name());
        match &end {
            ClaimEnd::Closed | ClaimEnd::Stale | ClaimEnd::Released => {}
            ClaimEnd::Retry { kind, error, at_least } => {
                telemetry::failed(&Span::current(), kind);
                retry(&ctx, &job, error, *at_least).await;
            }
            ClaimEnd::Held { subject, why } => super::hold(&ctx, &job, subject, why).await,
            ClaimEnd::Left { agent } => held::leave(&ctx, &job, agent).await,
            ClaimEnd::WithoutKey { why } => held::wait_for_key(&ctx, &job, why).await,
            ClaimEnd::Host { why } => held::wait_for_host(&ctx, &job, why).await,
            ClaimEnd::SetBack { kind, back } => {
                telemetry::failed(&Span::current(), kind);
                provider::set_back(&ctx, &job, back).await;
            }
        }
    }
    .instrument(span)
    .await;
    Ok(())
}

/// Works on the job's session until the claim ends, and decides what each error of the store means for it.
async fn work(ctx: &Ctx, job: &Job) -> ClaimEnd {
    let Some(session_id) = job.session_id.as_deref() else {
        return ClaimEnd::Stale;
    };
    // A transient database fault does not count as an attempt: this loop tries the step again under the same
    // lease.
    let mut faults = 0;
    // `run_steps` resets these when a step makes progress. They live outside the loop so that a database fault
    // after the reset does not bring the old counts back.
    let mut counts = Counts {
        tries: RetryCounts::of(job),
        troubles: Troubles::of(job),
        attempt: job.attempt,
        uncalled: None,
    };
    loop {
        match hydrate_and_run(ctx, job, session_id, &mut counts).await {
            Ok(end) => return end,
            // The key store failed and not the database, so this is not a database fault. It is no attempt either.
            Err(error @ Error::Keys { .. }) => {
                if let Err(error) =
                    withdraw_intent(ctx, job, &SessionId::from(session_id), &mut counts.uncalled).await
                {
                    warn!(%error, "The intent of a model call could not be withdrawn");
                }
                return ClaimEnd::WithoutKey { why: error.to_string() };
            }
            Err(error @ Error::BlobStore { .. }) => return files_gate::store_away(ctx, &error).await,
            Err(error) if error.is_transient() && job.lease.is_live() => {
                faults += 1;
                warn!(%error, "A database fault interrupted the step; trying again");
                if let Some(noted) = tries::note(ctx, job, &error).await {
                    let end = (SessionStatus::NeedsAttention, tries::refused(&error, noted));
                    return give_up(ctx, job, session_id, end).await;
                }
                tokio::time::sleep(queue::delay(faults, None)).await;
            }
            // The job's session does not exist, so there is nothing to do.
            Err(Error::NotFound { what: "session", ref id }) if id == session_id => {
                warn!(session.id = session_id, "Ended a job whose session does not exist");
                return match ctx.store.end_job(&job.lease).await {
                    Ok(()) => ClaimEnd::Closed,
                    Err(error) => ClaimEnd::retry(&error),
                };
            }
            Err(error @ Error::Corrupt { .. }) => {
                if counts.tries.stuck >= tries::UNREADABLE_ATTEMPTS {
                    let end = (SessionStatus::Failed, tries::unreadable(&error));
                    return give_up(ctx, job, session_id, end).await;
                }
                return ClaimEnd::retry(&error);
            }
            Err(error) => {
                if let Some(noted) = tries::note(ctx, job, &error).await {
                    let end = (SessionStatus::NeedsAttention, tries::refused(&error, noted));
                    return give_up(ctx, job, session_id, end).await;
                }
                return ClaimEnd::retry(&error);
            }
        }
    }
}

/// Hop 2: reads the session once, unless it came with the job because a message to this process has just made it. [`run_steps`]
/// then takes step after step with this copy in memory. The copy is kept for the next claim if it is what was committed last.
async fn hydrate_and_run(
    ctx: &Ctx,
    job: &Job,
    session_id: &str,
    counts: &mut Counts,
) -> wakeful_store::Result<ClaimEnd> {
    wakeful_store::failpoint!("K3");
    withdraw_intent(ctx, job, &SessionId::from(session_id), &mut counts.uncalled).await?;
    // A replay runs its session once.
    let once = !job.runner.is_empty();
    let mut hydrated = match job.take_session() {
        Some(session) => session.into(),
        None if once => ctx.store.hydrate_to_keep(session_id).await?,
        None => ctx.warm.hydrate(&ctx.store, session_id).await?,
    };
    counts.tries.warn_of_deaths(&hydrated.session);
    let span = span::of_run(ctx, &hydrated.session);
    let end = run_steps(ctx, job, &mut hydrated.session, counts).instrument(span).await?;
    if end.is_known() && !once {
        ctx.warm.keep(hydrated);
    }
    Ok(end)
}

/// Retry counters of this step, the attempt number, and the intent that a commit may have recorded for a model
/// call that was not made yet.
struct Counts {
    tries: RetryCounts,
    troubles: Troubles,
    attempt: i32,
    uncalled: Option<GenerationId>,
}

/// Hops 3 to 8: takes the run from step to step until this claim ends. Each round of the loop makes at most
/// one commit. After a crash, the next claim hydrates the latest commit; the ledger and the table
/// `generations` tell it which calls had begun.
async fn run_steps(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    counts: &mut Counts,
) -> wakeful_store::Result<ClaimEnd> {
    let mut steps: u32 = 0;
    let mut began = Instant::now();
    let mut own_agent = OwnAgent::of(ctx, session);
    // The model call whose intent the latest commit recorded.
    let mut committed = None;
    // The tool calls that it started, or the results of those that ended before it.
    let mut started = StartedCalls::default();
    let mut results = None;
    loop {
        let agent = own_agent.now(ctx, session);
        let policy = agent.as_ref().map_or_else(|_| AgentPolicy::default(), Agent::policy);
        let result = match &agent {
            Ok(agent) => {
                let started = std::mem::take(&mut started);
                let ready = Ready { call: committed.take(), started: &started, results: results.take() };
                // Hops 3 to 5.
                let result = plan_and_perform(ctx, job, session, agent, counts, ready).await;
                if !matches!(result, Ok(RoundResult::Performed(_) | RoundResult::Again)) {
                    withdraw_starts(ctx, job, session, &started).await?;
                }
                result?
            }
            // This process does not have the agent.
            Err(error) => held::without_agent(ctx, job, session, error, counts).await?,
        };
        let performed = match result {
            RoundResult::Performed(performed) => performed,
            RoundResult::End(end) => return Ok(end),
            RoundResult::Again => continue,
        };
        if let Performed::Stopped(Stop::Failed(fault)) = &performed {
            telemetry::failed(&Span::current(), fault.kind());
        }
        let ends_claim = retry_summary_later(ctx, agent.as_ref().ok(), &counts.troubles, session, &performed);
        // Hop 6.
        let mut transition =
            with_failure_notice(ctx, session, advance::advance(session, performed, policy)).await?;
        // Give the commit what it can write for the next round too: the starts of calls, the results of fast pure tools, and the
        // intent of the next model call.
        if let Ok(agent) = &agent {
            started = start_calls(ctx, &job.lease, session, agent, &mut transition);
        }
        let mut written = None;
        if let Ok(agent) = &agent
            && counts.tries.no_worker_died()
        {
            let elapsed_s = began.elapsed().as_secs_f64();
            let performance = Performance { elapsed_s, attempt: counts.attempt, intent: None };
            let ahead = run_ahead(ctx, job, session, agent, transition, performance).await?;
            (transition, written, results) = (ahead.transition, ahead.written, ahead.results);
        }
        let progress = transition.is_progress();
        let may_yield = transition.step.is_some() && slice_ends(ctx, job, steps + 1);
        // If a model call follows, prepare it now: the commit then records its intent too.
        let prepared = match &agent {
            Ok(agent) if ends_claim.is_none() && !may_yield => {
                let tries = if progress { RetryCounts::default() } else { counts.tries };
                let may_try =
                    tries.used_up(agent.limits.attempts, job.last_error.as_deref(), || None).is_none();
                next_call(ctx, session, &transition, agent, may_try).await
            }
            Ok(_) | Err(_) => None,
        };
        counts.uncalled = prepared.as_ref().map(|call| call.generation_id.clone());
        let performance = Performance {
            elapsed_s: began.elapsed().as_secs_f64(),
            attempt: counts.attempt,
            intent: prepared.as_ref().map(|call| call.intent(session)),
        };
        // Hop 7.
        let commit = match written {
            Some(commit) => commit,
            None => commit::commit(ctx, job, session, &transition, performance).await?,
        };
        if !transition.deliveries.is_empty() {
            ctx.bus.notifier.job(Kind::Deliver);
        }
        // Hop 8.
        match commit {
            Commit::Continued { wake_seq, started_at } => {
                let transition = transition.continuing();
                session.apply(&transition);
                // Reset the counters before the next statement that can fail: the commit is progress,
                // whatever follows.
                if progress {
                    counts.tries = RetryCounts::default();
                    counts.troubles.over();
                    job.made_progress();
                }
                if transition.step.is_some() {
                    (counts.attempt, began) = (1, Instant::now());
                }
                if wake_seq != session.wake_seq {
                    // The request may lack what arrived, so the prepared call is not made.
                    withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
                    ctx.store.refresh(session).await?;
                    if session.cancel_requested {
                        // These calls do not run, and the model is to be told so.
                        withdraw_starts(ctx, job, session, &started).await?;
                    }
                } else if let (Some(call), Some(started_at)) = (prepared, started_at) {
                    committed = Some(CommittedCall { call, started_at });
                }
                if let Some(end) = ends_claim {
                    return Ok(end);
                }
                if transition.step.is_some() {
                    steps += 1;
                    let yields = may_yield && ctx.store.others_wait(job).await?;
                    if yields || ctx.shutdown.draining.is_cancelled() {
                        withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
                        return Ok(release(ctx, job).await);
                    }
                }
            }
            Commit::Closed { opened } => {
                session.records.extend(transition.records);
                if opened {
                    ctx.bus.notifier.job_of(Kind::Step, &job.runner);
                }
                return Ok(ClaimEnd::Closed);
            }
            Commit::Moved => {
                // The commit may have gone through although its answer was lost, and may have recorded the intent.
                withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
                let mut read = ctx.store.hydrate(session.session_id.as_str()).await?;
                read.leave_out_like(session);
                // The row of the call that led to the refused commit now counts as an interrupted call. That does not change the
                // session, so leave it out of the comparison.
                let interrupted = std::mem::replace(&mut read.interrupted, session.interrupted.clone());
                let is_unchanged = read == *session;
                read.interrupted = interrupted;
                if is_unchanged {
                    // The session is unchanged, so another try would be refused too, after one more paid
                    // model call.
                    let error = "the commit was refused although the session has not changed".to_owned();
                    return Ok(ClaimEnd::Retry { kind: "moved", error, at_least: None });
                }
                // Our own commit may have moved the session, if the connection broke before its result
                // arrived. So new records and new steps count as progress.
                if read.last_message_number > session.last_message_number {
                    counts.tries = RetryCounts::default();
                    counts.troubles.over();
                }
                if read.last_step_number > session.last_step_number {
                    (counts.attempt, began) = (1, Instant::now());
                }
                *session = read;
                (started, results) = (StartedCalls::default(), None);
            }
            Commit::Stale => return Ok(ClaimEnd::Stale),
        }
    }
}

/// Hops 3 to 5: plans the next action and performs it.
async fn plan_and_perform(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    agent: &Agent,
    counts: &mut Counts,
    ready: Ready<'_>,
) -> wakeful_store::Result<RoundResult> {
    if session.lacks_messages(agent.context.strategy) {
        *session = ctx.store.hydrate(session.session_id.as_str()).await?;
    }
    let tries = counts.tries;
    let action = plan(session, &agent.limits);
    if replay::send_due_input(&ctx.store, &ctx.recordings, session, &action).await? {
        return Ok(RoundResult::Again);
    }
    if action == Action::Rest {
        ctx.store.end_job(&job.lease).await?;
        return Ok(RoundResult::End(ClaimEnd::Closed));
    }
    if let Some(fault) =
        tries.used_up(agent.limits.attempts, job.last_error.as_deref(), || tries::doing(session))
        && !matches!(action, Action::Stop(_))
    {
        return Ok(RoundResult::Performed(Performed::Stopped(Stop::Failed(fault))));
    }
    if let Some(end) = held::by_a_pause(ctx, job, session, agent, &action) {
        withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
        return Ok(RoundResult::End(end));
    }
    let mut way = None;
    if matches!(action, Action::CallModel | Action::Compact) && !has_recorded_replies(session) {
        match provider::route(ctx, job, session, agent, &counts.troubles).await? {
            Routed::Call(chosen) => way = Some(*chosen),
            Routed::Wait(end) => {
                withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
                return Ok(RoundResult::End(end));
            }
            Routed::Fail(fault) => {
                withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
                ctx.store.refresh(session).await?;
                return Ok(RoundResult::Performed(Performed::Stopped(Stop::Failed(fault))));
            }
        }
    }
    let configured = agent;
    let agent = way.as_ref().map_or(configured, |way| &*way.agent);
    let mut action = match ctx.configured_tools(session, agent) {
        Ok(tools) => {
            let window = ctx.config.context_window(&agent.model);
            in_context(action, session, agent, &tools, window)
        }
        // Without the tools the size of the context is unknown. The model call asks for them again and
        // reports this error.
        Err(_) => action,
    };
    if let Action::CallTools { calls } = &action
        && let Some(results) = results_of(calls, ready.results)
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
    let mut committed = ready.call.filter(|one| action == Action::CallModel && one.call.is_of(&agent.model));
    if committed.is_some() {
        counts.uncalled = None;
    } else {
        withdraw_intent(ctx, job, &session.session_id, &mut counts.uncalled).await?;
    }
    let performed = loop {
        let asks_model = action == Action::CallModel;
        let performed = tokio::select! {
            performed = perform(ctx, &job.lease, session, agent, action, committed.take(), ready.started) => performed,
            () = ctx.cancelled(session.session_id.as_str()) => {
                ctx.store.refresh(session).await?;
                withdraw_starts(ctx, job, session, ready.started).await?;
                return Ok(RoundResult::Again);
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
            performed => break performed,
        }
    };
    Ok(match performed {
        Ok(performed) => {
            if let Some(way) = way {
                provider::performed(ctx, way, &performed, &mut counts.troubles).await;
            }
            files_gate::performed(ctx, probe, &mut counts.troubles).await;
            RoundResult::Performed(performed)
        }
        Err(Unperformed::Reread) => {
            // The lease may be lost before the heartbeat notices. Ask the database now: otherwise this would
            // plan and be interrupted again and again until the next heartbeat.
            if !job.lease.is_live() || !ctx.store.holds(&job.lease).await? {
                return Ok(RoundResult::End(ClaimEnd::Stale));
            }
            *session = ctx.store.hydrate_tail(session.session_id.as_str()).await?.session;
            RoundResult::Again
        }
        Err(Unperformed::Store(error)) => return Err(error),
        Err(Unperformed::Host(why)) => RoundResult::End(ClaimEnd::Host { why }),
        Err(Unperformed::SeedAway(why)) => {
            RoundResult::End(files_gate::clone_away(ctx, session, probe, &why).await)
        }
        Err(Unperformed::Fault(fault)) => {
            let stop =
                match provider::after_fault(ctx, job, session, (configured, way), fault, counts).await? {
                    Ok(end) => return Ok(RoundResult::End(end)),
                    Err(fault) => fault,
                };
            // The failed call began after the session was read. Read it now: the closing commit journals its
            // end.
            ctx.store.refresh(session).await?;
            RoundResult::Performed(Performed::Stopped(Stop::Failed(stop)))
        }
    })
}
