//! The gate of a model at its provider: whether its calls may be made now. Pure; times are milliseconds of one clock.
//!
//! A gate is *open* in the healthy case. A few faults without a success between them *shut* it, for every worker of the
//! fleet. While it is shut, one call at a time is made as a *probe*. A probe that succeeds lets the waiting jobs through in
//! *waves* that double in size. The wave that takes the last waiting job opens the gate: new jobs come all the time, so a
//! moment without a waiting job may never come.
//!
//! Some requests fail by themselves: a provider answers everybody else, and refuses this one with HTTP 500 or never answers
//! it. Such a request must not keep the others waiting. Its faults are [its own](Trouble), and shut no gate.
#![deny(missing_docs)]

use crate::fault::Fault;

/// The id of a blob store's gate begins so, and is what people read of it.
pub const STORE: &str = "blob store ";

/// The id of the gate of a URL that sessions' files begin with (`clone` of an agent) begins so.
pub const CLONE: &str = "clone of ";

/// A fault counts together with an earlier one only within this time.
const TOGETHER_MS: i64 = 60_000;

/// The longest time that a provider's `Retry-After` keeps the gate shut without a probe.
const LONGEST_WAIT_MS: i64 = 3_600_000;

/// A shut gate for which no job waits is forgotten this long after its next probe was due, because no job makes the probe.
const FORGOTTEN_MS: i64 = 300_000;

/// A wave never has more jobs than 2 to the power of this.
const LARGEST_WAVE: i64 = 10;

/// Settings of the gates: `[gate]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatePolicy {
    /// Faults without a success between them that shut the gate.
    pub faults: i64,
    /// From a fault to the first probe. Doubles with each probe that fails.
    pub probe_ms: i64,
    /// The longest time between two probes.
    pub probe_max_ms: i64,
    /// From one wave to the next.
    pub wave_ms: i64,
    /// A call without a sign of an answer for so long is silent. Silent calls that hold half of a process's slots, and are at least
    /// `faults`, shut the gates of their models.
    pub silent_ms: i64,
}

impl Default for GatePolicy {
    fn default() -> Self {
        GatePolicy { faults: 3, probe_ms: 2_000, probe_max_ms: 30_000, wave_ms: 1_000, silent_ms: 30_000 }
    }
}

/// What the gate does with calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Every call may be made.
    Open,
    /// No call may be made but one probe, and that not before `probe_at_ms`.
    Shut {
        /// Since when the provider has been failing.
        since_ms: i64,
        /// When the next probe may be made.
        probe_at_ms: i64,
        /// How many probes have failed.
        probes: i64,
    },
    /// A probe succeeded. Jobs are let through in waves.
    Opening {
        /// Since when the provider had been failing.
        since_ms: i64,
        /// The number of the next wave, from 0. It has 2 to the power of this many jobs.
        wave: i64,
    },
}

/// A gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    /// What it does with calls.
    pub phase: Phase,
    /// Faults without a success between them, while it is open or opening.
    pub faults: i64,
    /// When the last fault was seen.
    pub last_fault_ms: Option<i64>,
    /// When the last success was recorded. Most are not: only those that follow a fault, and those of probes.
    pub answered_ms: Option<i64>,
}

impl Default for Gate {
    fn default() -> Self {
        Gate { phase: Phase::Open, faults: 0, last_fault_ms: None, answered_ms: None }
    }
}

/// Whose gate it is, in words. `subject` is a model with its provider, a blob store, or what files begin with.
pub fn whose(subject: &str) -> String {
    if subject.starts_with(STORE) || subject.starts_with(CLONE) {
        return subject.to_owned();
    }
    format!("model {subject}")
}

/// What one step has met at its provider so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    /// How many of its calls failed before this one.
    pub earlier: i64,
    /// The time since the first of them.
    pub for_ms: i64,
    /// The provider answered another call of this process in that time.
    pub others_answered: bool,
}

impl Trouble {
    /// Returns whether the fault is the request's own: it has failed as often as shuts a gate, and others were answered
    /// meanwhile. Fewer faults may be bad luck with a provider that fails now and then.
    fn is_own(self, gate: &Gate, now_ms: i64, policy: &GatePolicy) -> bool {
        let since_ms = now_ms.saturating_sub(self.for_ms);
        let others = self.others_answered || gate.answered_ms.is_some_and(|at| at > since_ms);
        self.earlier >= policy.faults && others
    }
}

/// What a worker saw of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A call met a fault that [counts](Fault::shuts_gate).
    Fault {
        /// The call was the probe.
        probe: bool,
        /// When the provider allows the next call, if it said so.
        retry_after_ms: Option<u64>,
        /// The provider limits the rate of calls, and answered another call lately. So it takes some calls now.
        answering: bool,
        /// What the step met before.
        trouble: Trouble,
    },
    /// The provider answered.
    Success {
        /// The call was the probe.
        probe: bool,
    },
}

impl Seen {
    /// What `fault` means for the gate, if the provider `answered_lately` or not. `None`: the fault is not the provider's.
    pub fn of(fault: &Fault, probe: bool, answered_lately: bool, trouble: Trouble) -> Option<Seen> {
        let answering = answered_lately && matches!(fault, Fault::RateLimited { .. });
        let retry_after_ms = fault.retry_after_ms();
        fault.shuts_gate().then_some(Seen::Fault { probe, retry_after_ms, answering, trouble })
    }
}

impl Gate {
    /// Returns the gate after `seen` at `now_ms`.
    pub fn after(self, seen: Seen, now_ms: i64, policy: &GatePolicy) -> Gate {
        match seen {
            Seen::Success { probe } => Gate { answered_ms: Some(now_ms), ..self.after_success(probe) },
            Seen::Fault { probe, trouble, .. } if trouble.is_own(&self, now_ms, policy) => {
                self.after_own_fault(probe, now_ms, policy)
            }
            Seen::Fault { probe, retry_after_ms, answering, .. } => {
                let asked =
                    retry_after_ms.map(|ms| i64::try_from(ms).unwrap_or(i64::MAX).min(LONGEST_WAIT_MS));
                self.after_fault((probe, answering), asked, now_ms, policy)
            }
        }
    }

    fn after_success(self, probe: bool) -> Gate {
        match self.phase {
            Phase::Open => Gate { faults: 0, ..self },
            // A call that began before the gate shut says nothing about the next one.
            Phase::Shut { since_ms, .. } if probe => {
                Gate { phase: Phase::Opening { since_ms, wave: 0 }, faults: 0, ..self }
            }
            Phase::Shut { .. } => self,
            Phase::Opening { .. } => Gate { faults: 0, ..self },
        }
    }

    /// A fault of one request says nothing about the next one. If it was the probe, another job's turn is soon.
    fn after_own_fault(self, probe: bool, now_ms: i64, policy: &GatePolicy) -> Gate {
        match self.phase {
            Phase::Shut { since_ms, probes, .. } if probe => {
                let probe_at_ms = now_ms + pause_ms(probes, policy);
                Gate { phase: Phase::Shut { since_ms, probe_at_ms, probes }, ..self }
            }
            Phase::Open | Phase::Shut { .. } | Phase::Opening { .. } => self,
        }
    }

    fn after_fault(
        self,
        (probe, answering): (bool, bool),
        asked_ms: Option<i64>,
        now_ms: i64,
        policy: &GatePolicy,
    ) -> Gate {
        let shut = |since_ms: i64, probes: i64| Phase::Shut {
            since_ms,
            probe_at_ms: now_ms + pause_ms(probes, policy).max(asked_ms.unwrap_or(0)),
            probes,
        };
        let recent = self.last_fault_ms.is_some_and(|last| now_ms - last <= TOGETHER_MS);
        let faults = if recent { self.faults + 1 } else { 1 };
        let after = Gate { last_fault_ms: Some(now_ms), faults, ..self };
        let phase = match self.phase {
            // The provider says itself that it takes no calls now: no need to count. One that limits the rate and answers
            // other calls would be idle for the whole pause, so that fault is counted.
            Phase::Open if asked_ms.is_some() && !answering => {
                Phase::Shut { since_ms: now_ms, probe_at_ms: now_ms + asked_ms.unwrap_or(0), probes: 0 }
            }
            Phase::Open if faults >= policy.faults => shut(now_ms, 0),
            Phase::Open => Phase::Open,
            Phase::Shut { since_ms, probes, .. } if probe => shut(since_ms, probes + 1),
            // A call that began before the gate shut. Only its wish for a pause counts.
            Phase::Shut { since_ms, probe_at_ms, probes } => Phase::Shut {
                since_ms,
                probe_at_ms: asked_ms.map_or(probe_at_ms, |asked| probe_at_ms.max(now_ms + asked)),
                probes,
            },
            // A busy provider has some faults at any time. They do not shut a gate that opens any more than an open one.
            Phase::Opening { since_ms, .. } if faults >= policy.faults => shut(since_ms, 0),
            Phase::Opening { .. } => self.phase,
        };
        Gate { phase, ..after }
    }

    /// Returns how many of the `waiting` jobs to let through now, and the gate after that. A gate that is shut lets one
    /// through, which makes the probe. One at which no job waits any more is forgotten: the sessions that waited were cancelled, or its
    /// credential was replaced. Otherwise people would go on reading that the provider fails.
    pub fn wave(self, waiting: i64, now_ms: i64) -> (i64, Gate) {
        match self.phase {
            Phase::Open => (waiting, self),
            Phase::Shut { probe_at_ms, .. } if waiting == 0 && now_ms - probe_at_ms > FORGOTTEN_MS => {
                (0, Gate { phase: Phase::Open, faults: 0, ..self })
            }
            Phase::Shut { .. } => (waiting.min(1), self),
            Phase::Opening { since_ms, wave } => {
                let size = 1_i64 << wave.clamp(0, LARGEST_WAVE);
                let phase =
                    if size >= waiting { Phase::Open } else { Phase::Opening { since_ms, wave: wave + 1 } };
                (size.min(waiting), Gate { phase, ..self })
            }
        }
    }

    /// Returns whether every call may be made.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }
}

/// The time from a fault to the next probe, after `probes` probes that failed.
fn pause_ms(probes: i64, policy: &GatePolicy) -> i64 {
    let doubled = policy.probe_ms.saturating_mul(1 << probes.clamp(0, 20));
    doubled.min(policy.probe_max_ms.max(policy.probe_ms))
}

#[cfg(test)]
mod tests;
