//! Model calls that have had no sign of an answer.
//!
//! A model that hangs would take slot after slot of a process until its calls are given up, and the jobs of all other models would
//! wait. So once calls that have been silent for [`GatePolicy::silent_ms`] hold half of the slots, the gates of their models shut,
//! and the calls wait on without their slots. Nothing is cancelled: a slow answer is paid for once. The first sign of an answer
//! opens the gate as a probe does.

use super::Gates;
use crate::model::Deltas;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use wakeful_store::queue::Lease;
use wakeful_workflow::gate::GatePolicy;
use wakeful_workflow::record::Usage;

/// The calls of this process that have had no sign of an answer.
#[derive(Debug, Default)]
pub(super) struct Calls {
    next: u64,
    calls: HashMap<u64, Call>,
    /// When a model gave a sign last, by gate.
    heard: HashMap<Arc<str>, Instant>,
    /// Gates that are not open, at which this process saw silence.
    silent: HashSet<Arc<str>>,
    /// Those of them whose model has given a sign since.
    spoke: HashSet<Arc<str>>,
}

#[derive(Debug)]
struct Call {
    gate_id: Arc<str>,
    began: Instant,
    lease: Lease,
}

/// A model that answers nothing.
#[derive(Debug, PartialEq)]
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
    fn begin(&mut self, gate_id: Arc<str>, lease: &Lease) -> u64 {
        self.next += 1;
        self.calls.insert(self.next, Call { gate_id, began: Instant::now(), lease: lease.clone() });
        self.next
    }

    fn heard(&mut self, number: u64) {
        let Some(call) = self.calls.remove(&number) else { return };
        if self.silent.contains(&call.gate_id) {
            self.spoke.insert(Arc::clone(&call.gate_id));
        }
        self.heard.insert(call.gate_id, Instant::now());
    }

    /// Returns the models that hold too many of the `slots` with silent calls, and remembers them. Such a model was called as often
    /// as shuts a gate, and gave no sign meanwhile.
    pub fn silences(&mut self, slots: usize, policy: &GatePolicy) -> Vec<Silence> {
        let limit = limit(policy);
        let mut found: HashMap<&Arc<str>, (usize, Duration)> = HashMap::new();
        for call in self.calls.values() {
            let silent = call.began.elapsed();
            if silent < limit || self.heard.get(&call.gate_id).is_some_and(|at| at.elapsed() < limit) {
                continue;
            }
            let (calls, longest) = found.entry(&call.gate_id).or_default();
            (*calls, *longest) = (*calls + 1, silent.max(*longest));
        }
        let all: usize = found.values().map(|(calls, _)| calls).sum();
        if all * 2 < slots {
            return Vec::new();
        }
        let many = usize::try_from(policy.faults).unwrap_or(usize::MAX);
        let silences: Vec<Silence> = found
            .into_iter()
            .filter(|(_, (calls, _))| *calls >= many)
            .map(|(gate_id, (calls, longest))| Silence { gate_id: Arc::clone(gate_id), calls, longest })
            .collect();
        self.silent.extend(silences.iter().map(|silence| Arc::clone(&silence.gate_id)));
        silences
    }

    /// Takes the slots from the silent calls at silent gates. `is_open`: such a gate is silent no more.
    pub fn free_slots(&mut self, policy: &GatePolicy, is_open: impl Fn(&str) -> bool) {
        self.silent.retain(|gate_id| !is_open(gate_id));
        let limit = limit(policy);
        for call in self.calls.values() {
            if self.silent.contains(&call.gate_id) && call.began.elapsed() >= limit {
                call.lease.leave_slot();
            }
        }
    }

    /// Takes the gates whose models have given a sign after a silence.
    pub fn take_spoken(&mut self) -> Vec<Arc<str>> {
        let spoke: Vec<_> = self.spoke.drain().collect();
        for gate_id in &spoke {
            self.silent.remove(gate_id);
        }
        spoke
    }

    /// How long until the next call becomes silent. A call that begins later does not become silent before `silent_ms` either.
    pub fn next_look(&self, policy: &GatePolicy) -> Duration {
        let limit = limit(policy);
        let left = self.calls.values().filter_map(|call| limit.checked_sub(call.began.elapsed()));
        left.min().map_or(limit, |left| left + Duration::from_millis(1))
    }
}

fn limit(policy: &GatePolicy) -> Duration {
    Duration::from_millis(policy.silent_ms.unsigned_abs())
}

/// A call that has had no sign of an answer, until the model gives one or this is dropped. It hears the model's text itself, for
/// callers that need the reply only.
#[derive(Debug)]
pub struct Unanswered<'a> {
    gates: &'a Gates,
    number: Option<u64>,
}

impl Gates {
    /// A call of the model with this gate begins. `None`: the model has no gate.
    pub fn begin_call(&self, gate_id: Option<Arc<str>>, lease: &Lease) -> Unanswered<'_> {
        let number = gate_id.map(|gate_id| self.known().calls.begin(gate_id, lease));
        Unanswered { gates: self, number }
    }
}

impl Deltas for Unanswered<'_> {
    fn began(&mut self) {
        if let Some(number) = self.number.take() {
            self.gates.known().calls.heard(number);
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
