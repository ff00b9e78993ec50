use super::*;

const POLICY: GatePolicy =
    GatePolicy { faults: 3, probe_ms: 100, probe_max_ms: 400, wave_ms: 10, silent_ms: 30_000 };

const SILENT: Duration = Duration::from_secs(30);

/// Calls of models `x`, `y` and so on, as many of each as `of` says, all of which began now.
fn calls(of: &[(&str, usize)]) -> (Calls, Instant) {
    let (mut calls, now) = (Calls::default(), Instant::now());
    for (model, many) in of {
        for _ in 0..*many {
            calls.begin(Arc::from(*model), None, now);
        }
    }
    (calls, now)
}

/// The models that are silent with 8 slots.
fn silent(calls: &Calls, now: Instant) -> Vec<String> {
    calls.silences(8, &POLICY, now).iter().map(|silence| silence.gate_id.to_string()).collect()
}

#[test]
fn a_model_is_silent_when_its_old_calls_hold_half_of_the_slots() {
    let (mut held, began) = calls(&[("x", 3)]);
    assert!(silent(&held, began + SILENT).is_empty(), "three of eight");
    held.begin(Arc::from("x"), None, began);
    assert!(silent(&held, began + SILENT - Duration::from_millis(1)).is_empty(), "they are young");
    assert_eq!(silent(&held, began + SILENT), ["x"]);
    let reason = held.silences(8, &POLICY, began + SILENT).pop().unwrap().reason();
    assert_eq!(reason, "4 calls of one worker have had no answer yet, the oldest for 30 s");
}

#[test]
fn a_model_that_has_few_of_the_calls_is_left_alone_unless_the_half_needs_it() {
    let (held, began) = calls(&[("slow", 3), ("hangs", 5)]);
    assert_eq!(silent(&held, began + SILENT), ["hangs"], "without it three are left");
    let (held, began) = calls(&[("a", 2), ("b", 2), ("c", 2)]);
    assert_eq!(silent(&held, began + SILENT), ["a", "b"], "no model has half, and together they do");
    let (held, began) = calls(&[("a", 2)]);
    assert!(held.silences(2, &POLICY, began + SILENT).is_empty(), "two calls prove nothing");
}

#[test]
fn a_model_that_answers_one_call_is_at_work() {
    let (mut held, began) = calls(&[("x", 8)]);
    held.heard(&Arc::from("x"), Some(1), began + Duration::from_secs(5));
    assert!(silent(&held, began + SILENT).is_empty());
    // The answer goes on.
    held.heard(&Arc::from("x"), None, began + SILENT);
    assert!(silent(&held, began + SILENT + Duration::from_secs(29)).is_empty());
    assert_eq!(silent(&held, began + 2 * SILENT), ["x"], "and then it stops");
}

#[test]
fn a_call_without_a_slot_holds_none() {
    let (mut held, began) = calls(&[("x", 8)]);
    let later = began + SILENT;
    held.free_slots(&POLICY, later, |_| false);
    assert_eq!(silent(&held, later), ["x"], "its gate is open");
    held.free_slots(&POLICY, later, |gate_id| gate_id == "x");
    assert!(silent(&held, later).is_empty(), "so the gate is not shut again for the same calls");
    held.begin(Arc::from("y"), None, began);
    assert!(silent(&held, later).is_empty(), "nor that of a slow model");
}

#[test]
fn a_sign_opens_a_gate_that_silence_shut_and_no_other() {
    let (mut held, began) = calls(&[("x", 8)]);
    let x: Arc<str> = Arc::from("x");
    held.heard(&x, Some(1), began);
    assert!(held.take_spoken().is_empty(), "the gate was open, or shut by faults");
    held.shut(Arc::clone(&x));
    held.heard(&x, Some(2), began);
    assert_eq!(held.take_spoken(), [Arc::clone(&x)]);
    held.speaks(Arc::clone(&x));
    assert_eq!(held.take_spoken(), [Arc::clone(&x)], "it could not be written the first time");
    held.heard(&x, Some(3), began);
    held.forget("x");
    held.heard(&x, Some(4), began);
    assert!(held.take_spoken().is_empty(), "the provider asked for a pause since");
}

#[test]
fn the_next_look_is_when_the_next_call_becomes_silent() {
    let (mut held, began) = calls(&[]);
    assert_eq!(held.next_look(&POLICY, began), SILENT);
    held.begin(Arc::from("x"), None, began);
    held.begin(Arc::from("x"), None, began + Duration::from_secs(10));
    let now = began + Duration::from_secs(12);
    assert_eq!(held.next_look(&POLICY, now), Duration::from_millis(18_001));
    assert_eq!(held.next_look(&POLICY, began + Duration::from_secs(31)), Duration::from_millis(9_001));
}
