//! The gates of the models, as this process knows them.
//!
//! The gates themselves are rows that all workers share ([`wakeful_store::gate`]). A process asks its own copy before each
//! model call, so a healthy step costs no statement. The copy changes by what the process sees itself, by notifications,
//! and by looks: twice a minute, and more often while a gate is not open.

mod unanswered;

pub use unanswered::Unanswered;

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use unanswered::Calls;
use wakeful_store::gate::GateView;
use wakeful_store::queue::Lease;
use wakeful_store::{Result, Store};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::gate::{CLONE, GatePolicy, Phase, STORE, Seen, Trouble};

/// How often to look while every gate is open.
const EVERY: Duration = Duration::from_secs(30);

/// A worker that makes a probe and dies holds it for at most this long.
const HOLD: Duration = Duration::from_secs(10);

/// A provider that answered within this time takes some calls, even if it refuses one for its rate.
const LATELY: Duration = Duration::from_secs(5);

/// The gates as this process knows them.
#[derive(Debug)]
pub struct Gates {
    pub policy: GatePolicy,
    hold: Duration,
    /// The slots of this process.
    slots: usize,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The gates that are not open.
    closed: HashMap<String, (GateView, Instant)>,
    /// When a provider answered this process last.
    answered: HashMap<String, Instant>,
    /// Gates, open or opening, at which this process saw a fault and no success since.
    faulty: HashSet<String>,
    /// The probes that this process makes: gate and job, and since when.
    probes: HashMap<(String, i64), Instant>,
    calls: Calls,
}

/// Whether a job may call its model.
#[derive(Debug)]
pub enum Admission<'a> {
    Free,
    /// It may, as the only one.
    Probe(Probe<'a>),
    /// The gate is not open. The reason is the last fault.
    Wait(Option<String>),
}

/// The right to make a probe. It is renewed until this is dropped, but not for longer than the longest time between two probes:
/// a call that hangs, or writes for minutes, does not hold up the others. Its end is still that of a probe.
#[derive(Debug)]
pub struct Probe<'a> {
    gates: &'a Gates,
    key: (String, i64),
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        self.gates.known().probes.remove(&self.key);
    }
}

impl Gates {
    /// `lease` is the length of a job's lease: a probe is not held for longer. `slots`: how many jobs this process works on at a time.
    pub fn new(policy: GatePolicy, lease: Duration, slots: usize) -> Gates {
        Gates { policy, hold: lease.min(HOLD), slots, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether every job may pass.
    pub fn is_open(&self, gate_id: &str) -> bool {
        !self.known().closed.contains_key(gate_id)
    }

    /// Returns whether a job with this pass may call its model, without a probe.
    pub fn lets_through(&self, gate_id: &str, pass: Option<i64>) -> bool {
        self.known().closed.get(gate_id).is_none_or(|(view, _)| match view.gate.phase {
            Phase::Open => true,
            Phase::Opening { .. } => pass == Some(view.opening),
            Phase::Shut { .. } => false,
        })
    }

    /// Returns whether the job of `lease` may call its model now. `pass` is the opening at which it was let through.
    ///
    /// # Errors
    /// When the database cannot be asked for the probe.
    pub async fn admit(
        &self,
        store: &Store,
        gate_id: &str,
        lease: &Lease,
        pass: Option<i64>,
    ) -> Result<Admission<'_>> {
        let error = {
            let known = self.known();
            let Some((view, read)) = known.closed.get(gate_id) else { return Ok(Admission::Free) };
            let error = view.last_error.clone();
            let now_ms = view.now_ms + i64::try_from(read.elapsed().as_millis()).unwrap_or(i64::MAX);
            match view.gate.phase {
                Phase::Open => return Ok(Admission::Free),
                Phase::Opening { .. } if pass == Some(view.opening) => return Ok(Admission::Free),
                Phase::Shut { probe_at_ms, .. } if now_ms >= probe_at_ms => error,
                Phase::Opening { .. } | Phase::Shut { .. } => return Ok(Admission::Wait(error)),
            }
        };
        if !store.take_probe(gate_id, lease, self.hold).await? {
            return Ok(Admission::Wait(error));
        }
        let key = (gate_id.to_owned(), lease.job_id);
        self.known().probes.insert(key.clone(), Instant::now());
        info!(gate = gate_id, "Calls the provider to see whether it is back");
        Ok(Admission::Probe(Probe { gates: self, key }))
    }

    /// Returns whether the provider answered a call of this process lately.
    pub fn answered_lately(&self, gate_id: &str) -> bool {
        self.answered_within(gate_id, LATELY)
    }

    /// Returns whether the provider answered a call of this process within this time.
    pub fn answered_within(&self, gate_id: &str, time: Duration) -> bool {
        self.known().answered.get(gate_id).is_some_and(|at| at.elapsed() <= time)
    }

    /// Records a fault of the provider, whose text is `error`. Returns whether its gate is open after that.
    ///
    /// # Errors
    /// When the database cannot record it.
    pub async fn saw_fault(
        &self,
        store: &Store,
        gate_id: &str,
        seen: Seen,
        fault: &Fault,
        error: &str,
    ) -> Result<bool> {
        let in_log = fault.in_log();
        self.saw(store, gate_id, seen, (error, in_log.as_str()), &self.policy).await
    }

    /// Shuts a gate at once, because one look is enough: a blob store is away, or the URL that files begin with, or a model answers
    /// no call. `probe`: the look was a probe of a gate that is shut already.
    ///
    /// # Errors
    /// When the database cannot record it.
    pub async fn saw_away(&self, store: &Store, gate_id: &str, probe: bool, error: &str) -> Result<bool> {
        let seen = Seen::Fault { probe, retry_after_ms: None, answering: false, trouble: Trouble::default() };
        self.saw(store, gate_id, seen, (error, error), &GatePolicy { faults: 1, ..self.policy }).await
    }

    async fn saw(
        &self,
        store: &Store,
        gate_id: &str,
        seen: Seen,
        // As the gate keeps it, and as the log has it.
        (error, in_log): (&str, &str),
        policy: &GatePolicy,
    ) -> Result<bool> {
        let was_open = self.is_open(gate_id);
        let view = store.gate_saw(gate_id, subject(gate_id), seen, Some(error), policy).await?;
        self.known().calls.forget(gate_id);
        let is_open = view.gate.is_open();
        if !matches!(view.gate.phase, Phase::Shut { .. }) {
            self.known().faulty.insert(gate_id.to_owned());
        }
        if was_open && !is_open {
            let error = store.in_log(None, in_log);
            warn!(gate = gate_id, error, "The provider fails: its calls wait until a probe succeeds");
        }
        self.learn(view);
        Ok(is_open)
    }

    /// Records that the provider answered. Returns the opening that lets the job of a probe go on. Without a probe, and
    /// without an earlier fault, it writes nothing.
    ///
    /// # Errors
    /// When the database cannot record it.
    pub async fn saw_success(&self, store: &Store, gate_id: &str, probe: bool) -> Result<Option<i64>> {
        {
            let mut known = self.known();
            if let Some(at) = known.answered.get_mut(gate_id) {
                *at = Instant::now();
            } else {
                known.answered.insert(gate_id.to_owned(), Instant::now());
            }
            if !known.faulty.remove(gate_id) && !probe {
                return Ok(None);
            }
        }
        let seen = Seen::Success { probe };
        let written = store.gate_saw(gate_id, subject(gate_id), seen, None, &self.policy).await;
        // The next success has to be written then.
        let view = written.inspect_err(|_| {
            self.known().faulty.insert(gate_id.to_owned());
        })?;
        let opening = view.opening;
        if probe {
            info!(gate = gate_id, "The provider is back: its waiting calls go on");
        }
        self.learn(view);
        Ok(probe.then_some(opening))
    }

    fn learn(&self, view: GateView) {
        let mut known = self.known();
        if known.closed.get(&view.gate_id).is_some_and(|(newer, _)| newer.now_ms > view.now_ms) {
            return;
        }
        if view.gate.is_open() {
            known.closed.remove(&view.gate_id);
        } else {
            known.closed.insert(view.gate_id.clone(), (view, Instant::now()));
        }
    }

    /// Reads the gates.
    ///
    /// # Errors
    /// When the database cannot be read: what is known stays.
    pub async fn look(&self, store: &Store) -> Result<()> {
        let began = Instant::now();
        let views = store.gates().await?;
        let still: HashSet<String> = views.iter().map(|view| view.gate_id.clone()).collect();
        // What was learned during the statement is newer than its answer.
        self.known().closed.retain(|id, (_, read)| still.contains(id) || *read > began);
        for view in views {
            self.learn(view);
        }
        Ok(())
    }

    /// Renews this process's probes, and lets the jobs through whose turn it is. Returns whether it woke one.
    ///
    /// # Errors
    /// When the database cannot do it. The next time does.
    pub(crate) async fn tend(&self, store: &Store) -> Result<bool> {
        let longest = Duration::from_millis(self.policy.probe_max_ms.unsigned_abs()).max(self.hold);
        let (closed, probes): (Vec<String>, Vec<(String, i64)>) = {
            let known = self.known();
            let young = known.probes.iter().filter(|(_, began)| began.elapsed() < longest);
            (known.closed.keys().cloned().collect(), young.map(|(key, _)| key.clone()).collect())
        };
        self.watch_silence(store).await?;
        for (gate_id, job_id) in probes {
            store.keep_probe(&gate_id, job_id, self.hold).await?;
        }
        let mut woken = 0;
        for gate_id in closed {
            woken += store.tend_gate(&gate_id, self.hold, &self.policy).await?;
        }
        Ok(woken > 0)
    }

    /// Shuts the gates of models that answer no call, and opens those of models that have answered again: see [`unanswered`].
    async fn watch_silence(&self, store: &Store) -> Result<()> {
        // A process with few connections cannot fill its slots.
        let slots = store.most_jobs().map_or(self.slots, |most| most.min(self.slots));
        let silences = self.known().calls.silences(slots, &self.policy, Instant::now());
        for silence in silences {
            if self.is_open(&silence.gate_id) {
                self.saw_away(store, &silence.gate_id, false, &silence.reason()).await?;
                self.known().calls.shut(silence.gate_id);
            }
        }
        let spoken = self.known().calls.take_spoken();
        for gate_id in spoken {
            if let Err(error) = self.saw_success(store, &gate_id, true).await {
                self.known().calls.speaks(gate_id);
                return Err(error);
            }
        }
        let Known { calls, closed, .. } = &mut *self.known();
        let is_shut = |gate_id: &str| {
            closed.get(gate_id).is_some_and(|(view, _)| matches!(view.gate.phase, Phase::Shut { .. }))
        };
        calls.free_slots(&self.policy, Instant::now(), is_shut);
        Ok(())
    }

    /// Returns whether every gate is open.
    pub(crate) fn all_open(&self) -> bool {
        self.known().closed.is_empty()
    }

    /// How long the timer may sleep: until the next wave or probe, or to renew a probe in time.
    pub(crate) fn pause(&self) -> Duration {
        if self.all_open() {
            return EVERY.min(self.known().calls.next_look(&self.policy, Instant::now()));
        }
        Duration::from_millis(self.policy.wave_ms.unsigned_abs()).min(self.hold / 3)
    }
}

/// The model in a gate's id, or the blob store, or what files begin with.
fn subject(gate_id: &str) -> &str {
    if gate_id.starts_with(STORE) || gate_id.starts_with(CLONE) {
        return gate_id;
    }
    gate_id.rsplit_once('@').map_or(gate_id, |(model, _)| model)
}
