//! The step job. It takes a claimed session through the hops of ARCHITECTURE.md: hydrate (2, `hydrate_and_run`), plan and
//! perform (3 to 5, `plan_and_perform` in `action.rs`), advance (6) and commit (7, `commit`). `run_steps` is the loop (8), and
//! `Claim` has what it carries from round to round. Before the first step is complete it usually goes round three times,
//! each with a commit: begin, model call, tool calls. The last two are one if the tools are pure and fast and the process
//! has other jobs (`ahead`). It goes on until the run closes or pauses, or other jobs need the slot.

mod action;
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
use crate::perform::{CommittedCall, PreparedCall, StartedCalls};
use crate::telemetry;
use crate::watchdog::UNYIELDING;
use action::plan_and_perform;
use agent::OwnAgent;
use ahead::run_ahead;
use apalis::prelude::{BoxDynError, Data};
use end::{ClaimEnd, give_up, release, retry, slice_ends, with_failure_notice};
use futures::FutureExt;
use next_call::next_call;
use provider::{Troubles, retry_summary_later};
use round::{Ready, RoundResult};
use starts::start_calls;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;
use tracing::{Instrument, Span, debug, warn};
use tries::RetryCounts;
use unused::{withdraw_intent, withdraw_starts};
use wakeful_config::AgentError;
use wakeful_store::Error;
use wakeful_store::queue::{self, Job, Kind};
use wakeful_store::step::{Commit, Performance};
use wakeful_workflow::advance::{self, Performed, Transition};
use wakeful_workflow::agent::{Agent, AgentPolicy};
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::plan::Stop;
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
    let began = Instant::now();
    let mut own_agent = OwnAgent::of(ctx, session);
    let mut claim = Claim {
        ctx,
        job,
        session,
        counts,
        steps: 0,
        began,
        committed: None,
        started: StartedCalls::default(),
        results: None,
    };
    loop {
        let agent = own_agent.now(ctx, claim.session);
        let performed = match claim.perform(agent).await? {
            RoundResult::Performed(performed) => performed,
            RoundResult::End(end) => return Ok(end),
            RoundResult::Again => continue,
        };
        if let Some(end) = claim.commit(agent, performed).await? {
            return Ok(end);
        }
    }
}

/// A claim that goes from round to round.
struct Claim<'a> {
    ctx: &'a Ctx,
    job: &'a Job,
    session: &'a mut Session,
    counts: &'a mut Counts,
    /// How many steps it has completed, and when the present one began.
    steps: u32,
    began: Instant,
    /// The model call whose intent the latest commit recorded.
    committed: Option<CommittedCall>,
    /// The tool calls that it started, or the results of those that ended before it.
    started: StartedCalls,
    results: Option<Performed>,
}

impl Claim<'_> {
    /// Hops 3 to 5.
    async fn perform(&mut self, agent: &Result<Agent, AgentError>) -> wakeful_store::Result<RoundResult> {
        let (ctx, job) = (self.ctx, self.job);
        let agent = match agent {
            Ok(agent) => agent,
            // This process does not have the agent.
            Err(error) => return held::without_agent(ctx, job, self.session, error, self.counts).await,
        };
        let started = std::mem::take(&mut self.started);
        let ready = Ready { call: self.committed.take(), started: &started, results: self.results.take() };
        let result = plan_and_perform(ctx, job, self.session, agent, self.counts, ready).await;
        if !matches!(result, Ok(RoundResult::Performed(_) | RoundResult::Again)) {
            withdraw_starts(ctx, job, self.session, &started).await?;
        }
        result
    }

    /// Hops 6 to 8. `None`: the claim goes on with the next round.
    async fn commit(
        &mut self,
        agent: &Result<Agent, AgentError>,
        performed: Performed,
    ) -> wakeful_store::Result<Option<ClaimEnd>> {
        let (ctx, job) = (self.ctx, self.job);
        if let Performed::Stopped(Stop::Failed(fault)) = &performed {
            telemetry::failed(&Span::current(), fault.kind());
        }
        let troubles = &self.counts.troubles;
        let ends_claim = retry_summary_later(ctx, agent.as_ref().ok(), troubles, self.session, &performed);
        let (transition, written) = self.advance(agent, performed).await?;
        let may_yield = transition.step.is_some() && slice_ends(ctx, job, self.steps + 1);
        // If a model call follows, prepare it now: the commit then records its intent too.
        let prepared = match agent {
            Ok(agent) if ends_claim.is_none() && !may_yield => self.prepare_next(agent, &transition).await,
            Ok(_) | Err(_) => None,
        };
        self.counts.uncalled = prepared.as_ref().map(|call| call.generation_id.clone());
        let session = &*self.session;
        let performance = Performance {
            elapsed_s: self.began.elapsed().as_secs_f64(),
            attempt: self.counts.attempt,
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
                let ends_step = self.apply(transition);
                let call =
                    prepared.zip(started_at).map(|(call, started_at)| CommittedCall { call, started_at });
                self.see_arrivals(wake_seq, call).await?;
                if ends_claim.is_some() || !ends_step {
                    return Ok(ends_claim);
                }
                self.give_way(may_yield).await
            }
            Commit::Closed { opened } => {
                self.session.records.extend(transition.records);
                if opened {
                    ctx.bus.notifier.job_of(Kind::Step, &job.runner);
                }
                Ok(Some(ClaimEnd::Closed))
            }
            Commit::Moved => self.read_again().await,
            Commit::Stale => Ok(Some(ClaimEnd::Stale)),
        }
    }

    /// Hop 6. The transition has what its commit can write for the next round too: the starts of calls, and the results of fast pure
    /// tools. The commit's answer comes with it if such a tool took so long that the reply was committed beside it.
    async fn advance(
        &mut self,
        agent: &Result<Agent, AgentError>,
        performed: Performed,
    ) -> wakeful_store::Result<(Transition, Option<Commit>)> {
        let (ctx, job) = (self.ctx, self.job);
        let policy = agent.as_ref().map_or_else(|_| AgentPolicy::default(), Agent::policy);
        let transition = advance::advance(self.session, performed, policy);
        let mut transition = with_failure_notice(ctx, self.session, transition).await?;
        let Ok(agent) = agent else { return Ok((transition, None)) };
        self.started = start_calls(ctx, &job.lease, self.session, agent, &mut transition);
        if !self.counts.tries.no_worker_died() {
            return Ok((transition, None));
        }
        let elapsed_s = self.began.elapsed().as_secs_f64();
        let performance = Performance { elapsed_s, attempt: self.counts.attempt, intent: None };
        let ahead = run_ahead(ctx, job, self.session, agent, transition, performance).await?;
        self.results = ahead.results;
        Ok((ahead.transition, ahead.written))
    }

    /// Prepares the model call that follows the commit of `transition`. `None`: none does, as far as is known now.
    async fn prepare_next(&mut self, agent: &Agent, transition: &Transition) -> Option<PreparedCall> {
        let tries = if transition.is_progress() { RetryCounts::default() } else { self.counts.tries };
        let last_error = self.job.last_error.as_deref();
        let may_try = tries.used_up(agent.limits.attempts, last_error, || None).is_none();
        next_call(self.ctx, self.session, transition, agent, may_try).await
    }

    /// Goes on from a commit that continues the run. Returns whether it ended a step.
    fn apply(&mut self, transition: Transition) -> bool {
        let progress = transition.is_progress();
        let transition = transition.continuing();
        self.session.apply(&transition);
        // Reset the counters before the next statement that can fail: the commit is progress,
        // whatever follows.
        if progress {
            self.counts.tries = RetryCounts::default();
            self.counts.troubles.over();
            self.job.made_progress();
        }
        if transition.step.is_some() {
            (self.counts.attempt, self.began) = (1, Instant::now());
        }
        transition.step.is_some()
    }

    /// Reads what has arrived since the session was read: the database has `wake_seq`. If nothing has, `call` may be made, whose intent
    /// the commit recorded.
    async fn see_arrivals(
        &mut self,
        wake_seq: i64,
        call: Option<CommittedCall>,
    ) -> wakeful_store::Result<()> {
        let (ctx, job) = (self.ctx, self.job);
        if wake_seq != self.session.wake_seq {
            // The request may lack what arrived, so the prepared call is not made.
            withdraw_intent(ctx, job, &self.session.session_id, &mut self.counts.uncalled).await?;
            ctx.store.refresh(self.session).await?;
            if self.session.cancel_requested {
                // These calls do not run, and the model is to be told so.
                withdraw_starts(ctx, job, self.session, &self.started).await?;
            }
        } else if call.is_some() {
            self.committed = call;
        }
        Ok(())
    }

    /// After a step: gives the job back if the process drains, or if other jobs wait and the slice has ended (`may_yield`).
    async fn give_way(&mut self, may_yield: bool) -> wakeful_store::Result<Option<ClaimEnd>> {
        let (ctx, job) = (self.ctx, self.job);
        self.steps += 1;
        let yields = may_yield && ctx.store.others_wait(job).await?;
        if yields || ctx.shutdown.draining.is_cancelled() {
            withdraw_intent(ctx, job, &self.session.session_id, &mut self.counts.uncalled).await?;
            return Ok(Some(release(ctx, job).await));
        }
        Ok(None)
    }

    /// Reads the session again, because something else has changed it.
    async fn read_again(&mut self) -> wakeful_store::Result<Option<ClaimEnd>> {
        let (ctx, job) = (self.ctx, self.job);
        // The commit may have gone through although its answer was lost, and may have recorded the intent.
        withdraw_intent(ctx, job, &self.session.session_id, &mut self.counts.uncalled).await?;
        let mut read = ctx.store.hydrate(self.session.session_id.as_str()).await?;
        read.leave_out_like(self.session);
        // The row of the call that led to the refused commit now counts as an interrupted call. That does not change the
        // session, so leave it out of the comparison.
        let interrupted = std::mem::replace(&mut read.interrupted, self.session.interrupted.clone());
        let is_unchanged = read == *self.session;
        read.interrupted = interrupted;
        if is_unchanged {
            // The session is unchanged, so another try would be refused too, after one more paid
            // model call.
            let error = "the commit was refused although the session has not changed".to_owned();
            return Ok(Some(ClaimEnd::Retry { kind: "moved", error, at_least: None }));
        }
        // Our own commit may have moved the session, if the connection broke before its result
        // arrived. So new records and new steps count as progress.
        if read.last_message_number > self.session.last_message_number {
            self.counts.tries = RetryCounts::default();
            self.counts.troubles.over();
        }
        if read.last_step_number > self.session.last_step_number {
            (self.counts.attempt, self.began) = (1, Instant::now());
        }
        *self.session = read;
        (self.started, self.results) = (StartedCalls::default(), None);
        Ok(None)
    }
}
