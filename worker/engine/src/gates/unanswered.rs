//! Model calls that have had no sign of an answer.
//!
//! A model that hangs would take slot after slot of a process until its calls are given up, and the jobs of all other models would
//! wait. So once calls that have been silent for [`GatePolicy::silent_ms`] hold half of the slots, the gates of their models shut,
//! and the calls wait on without their slots. Nothing is cancelled: a slow answer is paid for once. The first sign of an answer
//! opens the gate as a probe does.
//!
//! A sign is a part of an answer. A server that sends comments to keep the connection alive gives none, because what it asks may
//! hang behind it.

use super::Gates;
use crate::model::Deltas;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use wakeful_store::queue::Lease;
use wakeful_workflow::gate::GatePolicy;
use wakeful_workflow::record::Usage;

/// How often a call that is being answered says so.
const NOTED_EVERY: Duration = Duration::from_secs(1);

/// The calls of this process that have had no sign of an answer.
#[derive(Debug, Default)]
pub(super) struct Calls {
    next: u64,
    calls: HashMap<u64, Call>,
    /// When a model gave a sign last, by gate.
    heard: HashMap<Arc<str>, Instant>,
    /// Gates that this process shut for their silence.
    silent: HashSet<Arc<str>>,
    /// Those of them whose model has given a sign since.
    spoke: HashSet<Arc<str>>,
}

#[derive(Debug)]
struct Call {
    gate_id: Arc<str>,
    began: Instant,
    /// `None` in tests.
    lease: Option<Lease>,
    /// Its job has left its slot.
    is_slotless: bool,
}

/// A model that answers nothing.
#[derive(Debug)]
pub(super) struct Silence {
    pub gate_id: Arc<str>,
    pub calls: usize,
    pub longest: Duration,
}

impl Silence {
    /// What people read of it.
    pub fn reason(&self) -> String {
        let Silence { calls, longest, .. } = self;
        format!("{calls} calls of one worker have had no answer yet, the oldest for {} s", longest.as_secs())
    }
}

impl Calls {
    fn begin(&mut self, gate_id: Arc<str>, lease: Option<Lease>, now: Instant) -> u64 {
        self.next += 1;
        self.calls.insert(self.next, Call { gate_id, began: now, lease, is_slotless: false });
        self.next
    }

    /// A call gave a sign. `number` is that of a call that had given none.
    fn heard(&mut self, gate_id: &Arc<str>, number: Option<u64>, now: Instant) {
        if number.is_some_and(|number| self.calls.remove(&number).is_some()) && self.silent.contains(gate_id)
        {
            self.spoke.insert(Arc::clone(gate_id));
        }
        self.heard.insert(Arc::clone(gate_id), now);
    }

    /// Returns the models that hold too many of the `slots`: those with the most silent calls, until the calls of the others hold
    /// less than half. A model that has given a sign within [`GatePolicy::silent_ms`] is at work. Fewer calls than
    /// [`GatePolicy::faults`] prove nothing.
    pub fn silences(&self, slots: usize, policy: &GatePolicy, now: Instant) -> Vec<Silence> {
        let limit = limit(policy);
        let lately = |at: &Instant| now.duration_since(*at) < limit;
        let mut found: HashMap<&Arc<str>, (usize, Duration)> = HashMap::new();
        for call in self.calls.values().filter(|call| !call.is_slotless && !lately(&call.began)) {
            if self.heard.get(&call.gate_id).is_some_and(lately) {
                continue;
            }
            let (calls, longest) = found.entry(&call.gate_id).or_default();
            (*calls, *longest) = (*calls + 1, now.duration_since(call.began).max(*longest));
        }
        let mut rest: usize = found.values().map(|(calls, _)| calls).sum();
        let too_many = slots.div_ceil(2).max(usize::try_from(policy.faults).unwrap_or(usize::MAX));
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort_by(|(one_id, (one, _)), (other_id, (other, _))| (other, one_id).cmp(&(one, other_id)));
        let mut silences = Vec::new();
        if rest < too_many {
            return silences;
        }
        for (gate_id, (calls, longest)) in found {
            if rest * 2 < slots {
                break;
            }
            rest -= calls;
            silences.push(Silence { gate_id: Arc::clone(gate_id), calls, longest });
        }
        silences
    }

    /// This process shut the gate for its silence.
    pub fn shut(&mut self, gate_id: Arc<str>) {
        self.silent.insert(gate_id);
    }

    /// A fault came to the gate. From now on the gate is shut for that, and a sign does not open it.
    pub fn forget(&mut self, gate_id: &str) {
        self.silent.remove(gate_id);
        self.spoke.remove(gate_id);
    }

    /// Takes the gates whose models have given a sign since they were shut.
    pub fn take_spoken(&mut self) -> Vec<Arc<str>> {
        self.spoke.drain().collect()
    }

    /// Puts back what [`Calls::take_spoken`] took.
    pub fn speaks(&mut self, gate_id: Arc<str>) {
        self.spoke.insert(gate_id);
    }

    /// Takes the slots from the silent calls at gates that are shut. This process or another one may have shut them.
    pub fn free_slots(&mut self, policy: &GatePolicy, now: Instant, is_shut: impl Fn(&str) -> bool) {
        self.silent.retain(|gate_id| is_shut(gate_id));
        let limit = limit(policy);
        for call in self.calls.values_mut() {
            if !call.is_slotless && now.duration_since(call.began) >= limit && is_shut(&call.gate_id) {
                call.is_slotless = true;
                if let Some(lease) = &call.lease {
                    lease.leave_slot();
                }
            }
        }
    }

    /// How long until the next call becomes silent. One that begins later does not become silent sooner than `silent_ms` from now.
    pub fn next_look(&self, policy: &GatePolicy, now: Instant) -> Duration {
        let limit = limit(policy);
        let left = self.calls.values().filter_map(|call| limit.checked_sub(now.duration_since(call.began)));
        left.min().map_or(limit, |left| left + Duration::from_millis(1))
    }
}

fn limit(policy: &GatePolicy) -> Duration {
    Duration::from_millis(policy.silent_ms.unsigned_abs())
}

/// A model call that is in flight until this is dropped. As [`Deltas`] it notes that the model has begun to answer, and keeps none
/// of the text.
#[derive(Debug)]
pub struct Unanswered<'a> {
    gates: &'a Gates,
    /// `None`: the model has no gate.
    gate_id: Option<Arc<str>>,
    /// Until the first sign of an answer.
    number: Option<u64>,
    noted: Option<Instant>,
}

impl Gates {
    /// A call of the model with this gate begins. `None`: the model has no gate.
    pub fn begin_call(&self, gate_id: Option<Arc<str>>, lease: &Lease) -> Unanswered<'_> {
        let begin =
            |id: &Arc<str>| self.known().calls.begin(Arc::clone(id), Some(lease.clone()), Instant::now());
        Unanswered { gates: self, number: gate_id.as_ref().map(begin), gate_id, noted: None }
    }
}

impl Deltas for Unanswered<'_> {
    fn began(&mut self) {
        let Some(gate_id) = &self.gate_id else { return };
        let now = Instant::now();
        if self.noted.is_none_or(|at| now.duration_since(at) >= NOTED_EVERY) {
            self.noted = Some(now);
            self.gates.known().calls.heard(gate_id, self.number.take(), now);
        }
    }

    fn text(&mut self, _delta: &str) {
        self.began();
    }

    fn not_text(&mut self) {
        self.began();
    }

    fn usage(&mut self, _so_far: Usage) {
        self.began();
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.gates.known().calls.calls.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests;
