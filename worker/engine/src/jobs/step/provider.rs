//! Which model a step calls, and what follows when its provider fails.
//!
//! A fault that is an outage of the provider uses up no attempt. It uses up the time of `limits.outage_s`, which begins with
//! the first fault and stands on the job's row. While the provider's gate is not open, the job waits without a slot.

use super::{ClaimEnd, Counts};
use crate::ctx::Ctx;
use crate::gates::{Admission, Probe};
use crate::jobs::{LOOK, give_back};
use crate::model::provider_of;
use std::borrow::Cow;
use std::time::{Duration, Instant};
use tracing::warn;
use wakeful_store::Result;
use wakeful_store::error::bounded;
use wakeful_store::gate::SetBack;
use wakeful_store::queue::{self, Job, ProviderOutage};
use wakeful_workflow::advance::{Compaction, CompactionEnd, Performed};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::context::compaction;
use wakeful_workflow::event::Event;
use wakeful_workflow::fallback;
use wakeful_workflow::fault::{Fault, Verdict};
use wakeful_workflow::gate::{Seen, Trouble};
use wakeful_workflow::id::RunId;
use wakeful_workflow::session::Session;

/// A job that was to wait for a gate which is open by now looks again after this time. The process may still know an older
/// state of the gate.
const AGAIN: Duration = Duration::from_millis(100);

/// The outage that holds up the step, and the pass for its provider's gate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Troubles {
    outage: ProviderOutage,
    claimed: Instant,
    pass: Option<i64>,
}

impl Troubles {
    pub(super) fn of(job: &Job) -> Troubles {
        Troubles { outage: job.outage, claimed: Instant::now(), pass: job.gate_pass }
    }

    /// The step made progress.
    pub(super) fn over(&mut self) {
        self.outage = ProviderOutage::default();
    }

    pub(super) fn pass(&self) -> Option<i64> {
        self.pass
    }

    /// A gate has opened for this job.
    pub(super) fn let_through(&mut self, opening: Option<i64>) {
        self.pass = opening.or(self.pass);
    }

    /// What the step met at the provider before the fault of its present call.
    fn trouble(&self, ctx: &Ctx, gate_id: &str) -> Trouble {
        let lasted = self.lasted();
        Trouble {
            earlier: self.outage.faults,
            for_ms: i64::try_from(lasted.as_millis()).unwrap_or(i64::MAX),
            others_answered: ctx.gates.answered_within(gate_id, lasted),
        }
    }

    fn lasted(&self) -> Duration {
        self.outage.lasted.map_or(Duration::ZERO, |before| before + self.claimed.elapsed())
    }
}

/// The model that the step calls: the agent's own, or the first of `fallback` that may be called.
pub(super) struct Way<'a> {
    /// The agent with that model.
    pub(super) agent: Cow<'a, Agent>,
    probe: Option<Probe<'a>>,
}

pub(super) enum Routed<'a> {
    Call(Box<Way<'a>>),
    Wait(ClaimEnd),
    Fail(Fault),
}

/// Where a failed call or a shut gate leads.
#[derive(Debug, PartialEq)]
pub(super) struct Back {
    error: String,
    /// The error for the log, without the words of a provider.
    in_log: String,
    gate: Option<(String, Duration)>,
    delay: Duration,
    failed: Option<(Option<RunId>, Event)>,
    outage: bool,
}

impl Back {
    /// The job waits at a gate, and no attempt is used up.
    pub(super) fn at(gate_id: String, look: Duration, error: String) -> Back {
        let gate = Some((gate_id, queue::jittered(look)));
        Back { in_log: error.clone(), error, gate, delay: AGAIN, failed: None, outage: true }
    }
}

/// The agent's models: its own, and those that may be called instead.
fn models(agent: &Agent) -> Vec<&str> {
    std::iter::once(&agent.model).chain(&agent.fallback).map(String::as_str).collect()
}

/// Chooses the model of the step's next call. Asks the database only while a gate is shut.
pub(super) async fn route<'a>(
    ctx: &'a Ctx,
    job: &Job,
    session: &Session,
    agent: &'a Agent,
    troubles: &Troubles,
) -> Result<Routed<'a>> {
    let mut reason = None;
    let models = models(agent);
    // After as many faults as shut a gate, it is the next model's turn.
    for index in fallback::order(models.len(), troubles.outage.faults, ctx.gates.policy.faults) {
        let model = models[index];
        // A pause of the agent's own provider holds the whole step, before this.
        if index > 0 && ctx.pauses.forbids(job, session, model) {
            continue;
        }
        let admission = match ctx.plugins.models.gate_of(model) {
            Some(gate_id) => ctx.gates.admit(&ctx.store, &gate_id, &job.lease, troubles.pass).await?,
            None => Admission::Free,
        };
        let probe = match admission {
            Admission::Free => None,
            Admission::Probe(probe) => Some(probe),
            Admission::Wait(error) => {
                reason.get_or_insert((model, error));
                continue;
            }
        };
        let agent = match index {
            0 => Cow::Borrowed(agent),
            _ => Cow::Owned(Agent { model: model.to_owned(), ..agent.clone() }),
        };
        return Ok(Routed::Call(Box::new(Way { agent, probe })));
    }
    let (model, error) = reason.unwrap_or((&agent.model, None));
    let error = job.last_error.clone().or(error).unwrap_or_else(|| "the provider fails".to_owned());
    if let Some(fault) = used_up(agent, model, troubles, &error) {
        return Ok(Routed::Fail(fault));
    }
    let gate = ctx.plugins.models.gate_of(model).map(|gate| (gate.to_string(), look(ctx, agent, troubles)));
    let back = Back { in_log: error.clone(), error, gate, delay: AGAIN, failed: None, outage: true };
    Ok(Routed::Wait(ClaimEnd::SetBack { kind: "waits", back: Box::new(back) }))
}

/// The fault that ends the run if the outage has lasted for the agent's `limits.outage_s`.
fn used_up(agent: &Agent, model: &str, troubles: &Troubles, error: &str) -> Option<Fault> {
    let (lasted, limit) = (troubles.lasted(), Duration::from_millis(agent.limits.outage_ms));
    (lasted >= limit && (troubles.outage.lasted.is_some() || limit.is_zero())).then(|| Fault::ProviderDown {
        provider: provider_of(model).to_owned(),
        for_s: lasted.as_secs(),
        attempts: troubles.outage.faults,
        last_error: error.to_owned(),
    })
}

/// How long a job sleeps at a gate before it looks by itself: never beyond its budget, and less if another model may be called
/// before that.
fn look(ctx: &Ctx, agent: &Agent, troubles: &Troubles) -> Duration {
    let longest = longest(ctx, agent, troubles, !agent.fallback.is_empty());
    if agent.fallback.is_empty() { queue::jittered(LOOK).min(longest) } else { longest }
}

/// How long a step sleeps in an outage at most, whatever pause the provider asks for: to the end of its budget, and less if another
/// model may be called before that.
fn longest(ctx: &Ctx, agent: &Agent, troubles: &Troubles, others: bool) -> Duration {
    let left = Duration::from_millis(agent.limits.outage_ms).saturating_sub(troubles.lasted());
    let left = left + Duration::from_millis(10);
    if !others {
        return left;
    }
    queue::jittered(Duration::from_millis(ctx.gates.policy.probe_max_ms.unsigned_abs())).min(left)
}

/// Tells the gate what the call showed of the provider. A summary that failed is not an answer by itself.
pub(super) async fn performed(ctx: &Ctx, way: Way<'_>, performed: &Performed, troubles: &mut Troubles) {
    let fault = match performed {
        Performed::Compacted(Compaction { end: CompactionEnd::Failed(fault), .. }) => fault,
        _ => return answered(ctx, way, troubles).await,
    };
    let Some(gate_id) = ctx.plugins.models.gate_of(&way.agent.model) else { return };
    let lately = ctx.gates.answered_lately(&gate_id);
    match Seen::of(fault, way.probe.is_some(), lately, troubles.trouble(ctx, &gate_id)) {
        Some(seen) => {
            if let Err(error) =
                ctx.gates.saw_fault(&ctx.store, &gate_id, seen, fault, &bounded(&fault.to_string())).await
            {
                warn!(%error, "A provider's fault was not recorded at its gate; the next one is");
            }
        }
        None if fault.is_answer() => answered(ctx, way, troubles).await,
        None => {}
    }
}

/// Tells the gate that the provider answered.
async fn answered(ctx: &Ctx, way: Way<'_>, troubles: &mut Troubles) {
    let Some(gate_id) = ctx.plugins.models.gate_of(&way.agent.model) else { return };
    match ctx.gates.saw_success(&ctx.store, &gate_id, way.probe.is_some()).await {
        Ok(opening) => troubles.pass = opening.or(troubles.pass),
        Err(error) => warn!(%error, "A provider's answer was not recorded at its gate; the next one is"),
    }
}

/// Decides what follows from a fault of the call that went this `way`: an end of the claim, or the fault that ends the run.
pub(super) async fn after_fault(
    ctx: &Ctx,
    job: &Job,
    session: &Session,
    (configured, way): (&Agent, Option<Way<'_>>),
    fault: Fault,
    counts: &mut Counts,
) -> Result<std::result::Result<ClaimEnd, Fault>> {
    let model = way.as_ref().map_or(&configured.model, |way| &way.agent.model).clone();
    let gate_id = ctx.plugins.models.gate_of(&model).filter(|_| way.is_some());
    let probes = way.as_ref().is_some_and(|way| way.probe.is_some());
    // It becomes a part of the journal, and a provider of another program may say anything.
    let text = bounded(&fault.to_string());
    // A probe's stream that was cut proves that the provider is still failing, so it costs no attempt.
    let outage = fault.is_outage() || (probes && fault.shuts_gate());
    let mut open = true;
    let seen = gate_id.as_deref().and_then(|gate_id| {
        let lately = ctx.gates.answered_lately(gate_id);
        Seen::of(&fault, probes, lately, counts.troubles.trouble(ctx, gate_id))
    });
    match (&gate_id, seen) {
        (Some(gate_id), Some(seen)) => {
            open = ctx.gates.saw_fault(&ctx.store, gate_id, seen, &fault, &text).await?;
        }
        // The provider answered, if only with a refusal. A fault of this process says nothing about it: another job probes.
        (Some(_), None) if probes && fault.is_answer() => {
            if let Some(way) = way {
                answered(ctx, way, &mut counts.troubles).await;
            }
        }
        (_, _) => {}
    }
    let Verdict::Retry { after_ms } = fault.verdict() else { return Ok(Err(fault)) };
    let (troubles, limit) = (&counts.troubles, configured.limits.attempts);
    let tries = counts.tries.ended_by_faults();
    let faults = troubles.outage.faults + 1;
    if outage {
        let troubles = Troubles { outage: ProviderOutage { faults, ..troubles.outage }, ..*troubles };
        if let Some(fault) = used_up(configured, &model, &troubles, &text) {
            return Ok(Err(fault));
        }
    } else if tries >= limit {
        return Ok(Err(Fault::Stuck { attempts: counts.tries.stuck.max(1), last_error: text }));
    }
    let models = models(configured);
    let passes = |index: usize| {
        let gate = ctx.plugins.models.gate_of(models[index]);
        gate.is_none_or(|gate| ctx.gates.lets_through(&gate, troubles.pass))
            && (index == 0 || !ctx.pauses.forbids(job, session, models[index]))
    };
    let failed = models.iter().position(|one| *one == model).unwrap_or(0);
    let each = ctx.gates.policy.faults;
    let others = (0..models.len()).any(|index| index != failed && passes(index));
    let after = after_ms.map(Duration::from_millis);
    let delay = if !outage {
        queue::delay(job.stuck, after)
    } else if fallback::at_once(models.len(), failed, faults, each, passes) {
        Duration::ZERO
    } else {
        // A step that fails while the gate is open waits no longer than a probe would.
        let probe_max = Duration::from_millis(ctx.gates.policy.probe_max_ms.unsigned_abs());
        let pause = queue::delay(i32::try_from(faults).unwrap_or(i32::MAX), None).min(probe_max);
        pause.max(after.unwrap_or_default()).min(longest(ctx, configured, troubles, others))
    };
    let gate = gate_id.filter(|_| outage && !open && !others);
    let gate = gate.map(|gate| (gate.to_string(), look(ctx, configured, troubles)));
    let event = Event::AttemptFailed {
        model,
        fault: fault.kind().to_owned(),
        reason: text.clone(),
        attempt: if outage { faults } else { tries },
        attempts: (!outage).then_some(limit),
        retry_in_ms: gate.is_none().then(|| i64::try_from(delay.as_millis()).unwrap_or(i64::MAX)),
    };
    let run_id = session.run.as_ref().map(|run| run.run_id.clone());
    let back =
        Back { error: text, in_log: fault.in_log(), gate, delay, failed: Some((run_id, event)), outage };
    Ok(Ok(ClaimEnd::SetBack { kind: fault.kind(), back: Box::new(back) }))
}

/// If `performed` is a failed summary and the run will ask for the summary again, returns a retry with a delay,
/// so that the provider has time to recover. Returns `None` if the run goes on in this claim: no summary
/// failed, a retry cannot help, or [`compaction::FAILURES`] summaries have failed.
pub(super) fn retry_summary_later(
    ctx: &Ctx,
    agent: Option<&Agent>,
    troubles: &Troubles,
    session: &Session,
    performed: &Performed,
) -> Option<ClaimEnd> {
    let Performed::Compacted(Compaction { end: CompactionEnd::Failed(fault), .. }) = performed else {
        return None;
    };
    match fault.verdict() {
        Verdict::Retry { after_ms } if session.compaction_failures + 1 < compaction::FAILURES => {
            let most = agent
                .map_or(Duration::MAX, |agent| longest(ctx, agent, troubles, !agent.fallback.is_empty()));
            Some(ClaimEnd::Retry {
                kind: fault.kind(),
                // The log has it too. The journal says what the provider said.
                error: format!("no summary of the context: {}", fault.in_log()),
                at_least: after_ms.map(|ms| Duration::from_millis(ms).min(most)),
            })
        }
        Verdict::Retry { .. } | Verdict::Fail { .. } => None,
    }
}

/// Gives the job back.
pub(super) async fn set_back(ctx: &Ctx, job: &Job, back: &Back) {
    let Some(session_id) = job.session_id.as_deref() else { return };
    if let Some((_, event)) = &back.failed {
        let (kind, model) = match event {
            Event::AttemptFailed { fault, model, .. } => (Some(fault.as_str()), Some(model.as_str())),
            _ => (None, None),
        };
        let gate = back.gate.as_ref().map(|(gate, _)| gate.as_str());
        let delay_ms = gate.is_none().then(|| i64::try_from(back.delay.as_millis()).unwrap_or(i64::MAX));
        let error = ctx.store.in_log(Some(session_id), &back.in_log);
        warn!(
            session.id = session_id,
            error, kind, model, delay_ms, gate, "The step failed; trying again later"
        );
    }
    let session_id = session_id.into();
    let set_back = SetBack {
        error: &back.error,
        gate: back.gate.as_ref().map(|(gate, look)| (gate.as_str(), *look)),
        delay: back.delay,
        failed: back.failed.as_ref().map(|(run_id, event)| (&session_id, run_id.as_ref(), event)),
        outage: back.outage,
    };
    let Some(cancelled) = give_back(ctx, job, || ctx.store.set_back(&job.lease, &set_back)).await else {
        return;
    };
    ctx.bus.notifier.session(session_id.as_str());
    if back.delay.is_zero() || cancelled {
        ctx.bus.notifier.job_of(job.kind, &job.runner);
    }
}
