use super::*;
use proptest::prelude::*;

const POLICY: GatePolicy =
    GatePolicy { faults: 3, probe_ms: 100, probe_max_ms: 400, wave_ms: 10, silent_ms: 100 };

const fn failed(probe: bool, retry_after_ms: Option<u64>, answering: bool) -> Seen {
    let trouble = Trouble { earlier: 0, for_ms: 0, others_answered: false };
    Seen::Fault { probe, retry_after_ms, answering, trouble }
}

/// The fault of a step whose calls failed so often before, for so long.
fn again(probe: bool, earlier: i64, for_ms: i64, others_answered: bool) -> Seen {
    let trouble = Trouble { earlier, for_ms, others_answered };
    Seen::Fault { probe, retry_after_ms: None, answering: false, trouble }
}

fn fault() -> Seen {
    failed(false, None, false)
}

fn asked(retry_after_ms: u64) -> Seen {
    failed(false, Some(retry_after_ms), false)
}

/// HTTP 429 with a `Retry-After`, while other calls are answered.
fn limited(retry_after_ms: u64) -> Seen {
    failed(false, Some(retry_after_ms), true)
}

const PROBE_FAILED: Seen = failed(true, None, false);
const PROBE_ANSWERED: Seen = Seen::Success { probe: true };
const ANSWERED: Seen = Seen::Success { probe: false };

/// The phase after these events, each at its time.
fn phase(events: &[(i64, Seen)]) -> Phase {
    let seen = |gate: Gate, (at, seen): &(i64, Seen)| gate.after(*seen, *at, &POLICY);
    events.iter().fold(Gate::default(), seen).phase
}

fn shut(since_ms: i64, probe_at_ms: i64, probes: i64) -> Phase {
    Phase::Shut { since_ms, probe_at_ms, probes }
}

#[test]
fn what_is_seen_moves_the_gate() {
    let down = [(0, fault()), (1, fault()), (2, fault())];
    let after = |more: &[(i64, Seen)]| phase(&[&down, more].concat());
    let opening = Phase::Opening { since_ms: 2, wave: 0 };
    let table = [
        ("nothing was seen", phase(&[]), Phase::Open),
        ("two faults", phase(&down[..2]), Phase::Open),
        ("three faults", phase(&down), shut(2, 102, 0)),
        ("a success between them", phase(&[down[0], down[1], (1, ANSWERED), down[2]]), Phase::Open),
        ("an hour between them", phase(&[down[0], down[1], (3_600_000, fault())]), Phase::Open),
        ("the provider asks for a pause", phase(&[(5, asked(70))]), shut(5, 75, 0)),
        ("it limits one call and answers others", phase(&[(5, limited(700))]), Phase::Open),
        (
            "it limits every call",
            phase(&[(5, limited(700)), (6, limited(700)), (7, limited(700))]),
            shut(7, 707, 0),
        ),
        ("for a day", phase(&[(0, asked(86_400_000))]), shut(0, LONGEST_WAIT_MS, 0)),
        ("a call from before fails", after(&[(50, fault())]), shut(2, 102, 0)),
        ("a call from before asks for a pause", after(&[(50, asked(300))]), shut(2, 350, 0)),
        ("a call from before succeeds", after(&[(50, ANSWERED)]), shut(2, 102, 0)),
        ("a probe fails", after(&[(110, PROBE_FAILED)]), shut(2, 310, 1)),
        ("a second one", after(&[(110, PROBE_FAILED), (310, PROBE_FAILED)]), shut(2, 710, 2)),
        (
            "a third one: the pause grows no more",
            after(&[(0, PROBE_FAILED), (0, PROBE_FAILED), (0, PROBE_FAILED)]),
            shut(2, 400, 3),
        ),
        ("a probe succeeds", after(&[(110, PROBE_ANSWERED)]), opening),
        ("others too", after(&[(110, PROBE_ANSWERED), (111, ANSWERED)]), opening),
        ("one fault while it opens", after(&[(110, PROBE_ANSWERED), (120, fault())]), opening),
        (
            "faults with a success between them",
            after(&[
                (110, PROBE_ANSWERED),
                (120, fault()),
                (121, fault()),
                (122, ANSWERED),
                (123, fault()),
                (124, fault()),
            ]),
            opening,
        ),
        (
            "three faults while it opens",
            after(&[(110, PROBE_ANSWERED), (120, fault()), (120, fault()), (120, fault())]),
            shut(2, 220, 0),
        ),
    ];
    for (what, is, expected) in table {
        assert_eq!(is, expected, "{what}");
    }
}

#[test]
fn a_request_that_fails_by_itself_shuts_no_gate() {
    let own = |at: i64| (at, again(false, 3, 50, true));
    assert_eq!(phase(&[own(1), own(2), own(3), own(4)]), Phase::Open, "others were answered meanwhile");
    let alone = |at: i64| (at, again(false, 3, 50, false));
    assert_eq!(phase(&[alone(1), alone(2), alone(3)]), shut(3, 103, 0), "nobody was answered");
    let few = |at: i64| (at, again(false, 2, 50, true));
    assert_eq!(phase(&[few(1), few(2), few(3)]), shut(3, 103, 0), "it may be bad luck");
    // Another process saw the answer, and wrote it to the gate.
    let down = [alone(1), alone(2), alone(3), (200, PROBE_ANSWERED)];
    let after = |more: &[(i64, Seen)]| phase(&[&down, more].concat());
    let opening = Phase::Opening { since_ms: 3, wave: 0 };
    let later = |at: i64, since: i64| (at, again(false, 9, at - since, false));
    assert_eq!(after(&[later(300, 100), later(301, 100), later(302, 100)]), opening);
    assert_eq!(
        after(&[later(300, 250), later(301, 250), later(302, 250)]),
        shut(3, 402, 0),
        "answered before it"
    );
    // Its probe says nothing about the provider, so the next one comes no later than this one did.
    let shut_again = [(300, fault()), (301, fault()), (302, fault()), (410, again(true, 9, 400, false))];
    assert_eq!(after(&shut_again), shut(3, 510, 0));
}

#[test]
fn a_fault_is_the_providers_or_an_answer_or_says_nothing_of_it() {
    let message = || "no".to_owned();
    let limited = Fault::RateLimited { retry_after_ms: Some(7) };
    let overloaded = Fault::Overloaded { status: 503, message: message(), retry_after_ms: Some(7) };
    let counted = |answering| Some(failed(true, Some(7), answering));
    let seen = |fault: &Fault, lately| Seen::of(fault, true, lately, Trouble::default());
    assert_eq!(seen(&limited, true), counted(true));
    assert_eq!(seen(&limited, false), counted(false));
    assert_eq!(seen(&overloaded, true), counted(false), "only a limit of the rate lets other calls pass");
    for fault in [limited, overloaded, Fault::StreamCut, Fault::Stalled { after_ms: 1 }] {
        assert!(fault.shuts_gate() && !fault.is_answer(), "{fault:?}");
    }
    for fault in [Fault::EmptyReply, Fault::Refused { status: 400, message: message() }] {
        assert!(seen(&fault, false).is_none() && fault.is_answer(), "{fault:?}");
    }
    for fault in [Fault::Internal { message: message() }, Fault::NotConfigured { message: message() }] {
        assert!(seen(&fault, false).is_none() && !fault.is_answer(), "{fault:?}");
    }
}

#[test]
fn waves_double_and_end_with_an_open_gate() {
    let mut gate = Gate { phase: Phase::Opening { since_ms: 0, wave: 0 }, ..Gate::default() };
    let (mut waiting, mut waves) = (20, Vec::new());
    while !gate.is_open() {
        let (through, next) = gate.wave(waiting, 0);
        (waiting, gate) = (waiting - through, next);
        waves.push(through);
    }
    assert_eq!(waves, [1, 2, 4, 8, 5], "the wave that takes the last ones opens the gate");
    let down = Gate { phase: shut(0, 10, 0), last_fault_ms: Some(0), ..Gate::default() };
    assert_eq!(down.wave(20, 11), (1, down));
    assert_eq!(down.wave(0, 11), (0, down));
    let Phase::Shut { probe_at_ms, .. } = down.phase else { panic!("{down:?}") };
    let later = probe_at_ms + FORGOTTEN_MS + 1;
    assert!(down.wave(0, later).1.is_open() && !down.wave(1, later).1.is_open());
    assert!(!down.wave(0, later - 1).1.is_open(), "somebody may come for the probe");
}

#[test]
fn under_steady_traffic_a_gate_opens_soon() {
    for arrive in [1, 10, 500] {
        let mut gate = Gate { phase: Phase::Opening { since_ms: 0, wave: 0 }, ..Gate::default() };
        let (mut waiting, mut waves) = (1_000, 0);
        while !gate.is_open() {
            let (through, next) = gate.wave(waiting, 0);
            (waiting, gate, waves) = (waiting - through + arrive, next, waves + 1);
            assert!(waves < 20, "{arrive} new jobs each wave: {waiting} wait");
        }
    }
}

fn seen() -> impl Strategy<Value = Seen> {
    let fault = (any::<bool>(), proptest::option::of(0..10_000_000_u64), any::<bool>())
        .prop_map(|(probe, retry_after_ms, answering)| failed(probe, retry_after_ms, answering));
    prop_oneof![fault, any::<bool>().prop_map(|probe| Seen::Success { probe })]
}

proptest! {
    #[test]
    fn whatever_is_seen_a_gate_opens_after_one_probe_that_succeeds(
        events in proptest::collection::vec((0..5_000_i64, seen()), 0..40),
        waiting in 0..5_000_i64,
    ) {
        let mut now = 0;
        let mut gate = Gate::default();
        for (later, event) in events {
            now += later;
            let before = gate;
            gate = gate.after(event, now, &POLICY);
            if let (Phase::Shut { since_ms, .. }, Phase::Shut { since_ms: still, .. }) = (before.phase, gate.phase) {
                prop_assert_eq!(since_ms, still, "one outage has one beginning");
            }
            if let Phase::Shut { probe_at_ms, .. } = gate.phase {
                prop_assert!(probe_at_ms <= now + LONGEST_WAIT_MS, "a shut gate always has a next probe");
            }
            if matches!(event, Seen::Success { .. }) {
                prop_assert!(!before.is_open() || gate.is_open(), "a success shuts no gate");
            } else {
                prop_assert!(before.is_open() || !gate.is_open(), "a fault opens no gate");
            }
        }
        gate = gate.after(PROBE_ANSWERED, now, &POLICY);
        let mut left = waiting;
        for _ in 0..20 {
            let (through, next) = gate.wave(left, now);
            prop_assert!((0..=left).contains(&through));
            (left, gate) = (left - through, next);
        }
        prop_assert!(gate.is_open() && left == 0, "{:?} {}", gate, left);
    }
}
