//! What the waterfall draws of a journal.

use super::*;
use serde_json::{Value, json};

fn event(seq: i64, s: f64, kind: &str, step: Option<i64>, payload: Value) -> Event {
    let ts = DateTime::from_timestamp_millis(1_000_000 + (s * 1000.0) as i64).unwrap();
    let row = json!({"seq": seq, "ts": ts, "type": kind, "step_number": step, "payload": payload});
    serde_json::from_value(row).unwrap()
}

fn at(s: f64) -> String {
    DateTime::from_timestamp_millis(1_000_000 + (s * 1000.0) as i64).unwrap().to_rfc3339()
}

fn drawn(events: &[Event]) -> Vec<(String, &'static str, String, String)> {
    let rows = fall(events, &[], &[]).rows.into_iter();
    rows.map(|row| (row.name, row.class, row.began, row.took)).collect()
}

fn fall(events: &[Event], steps: &[Step], workers: &[Worker]) -> Waterfall {
    let now = DateTime::from_timestamp_millis(1_000_000 + 100_000).unwrap();
    Waterfall::of(&Known { events, steps, workers, now })
}

/// A step that a worker began and committed.
fn step(number: i64, attempt: i64, worker: &str, from: f64, to: f64) -> Step {
    let row = json!({"step_number": number, "finish_reason": "stop", "executed_local_tool_count": 0, "attempt": attempt,
        "worker_id": worker, "started_at": at(from), "committed_at": at(to)});
    serde_json::from_value(row).unwrap()
}

/// A worker that was heard of at `beat`, and is silent since.
fn silent(worker: &str, beat: f64) -> Worker {
    let row = json!({"worker_id": worker, "host": "h", "pid": 1, "version": "1", "concurrency": 1, "started_at": at(0.0),
        "beat_age_s": 100.0 - beat, "leases": 0, "alive": false, "state": "gone"});
    serde_json::from_value(row).unwrap()
}

/// A model call that was journalled at `to`. Without `tokens` its reply never came.
fn call(seq: i64, number: i64, attempt: i64, from: f64, to: f64, tokens: Option<i64>) -> Event {
    let payload = json!({"generation_id": seq.to_string(), "model": "m", "attempt": attempt, "prompt_tokens": tokens,
        "started_at": at(from)});
    event(seq, to, "LLM_CALLED", Some(number), payload)
}

fn resumed(seq: i64, number: i64, to: f64, strategy: &str) -> Event {
    let payload = json!({"generation_id": "9", "strategy": strategy, "replaces": "1", "prior_seq": 4});
    event(seq, to, "GEN_RESUMED", Some(number), payload)
}

fn row(name: &str, class: &'static str, began: &str, took: &str) -> (String, &'static str, String, String) {
    (name.to_owned(), class, began.to_owned(), took.to_owned())
}

#[test]
fn a_step_waits_calls_and_runs_its_tools() {
    let events = [
        event(1, 0.0, "state_transition", None, json!({"from_state": "created", "to_state": "queued"})),
        event(2, 1.0, "state_transition", Some(1), json!({"from_state": "queued", "to_state": "running"})),
        call(3, 1, 1, 1.0, 3.0, Some(7)),
        event(4, 3.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c1", "name": "reserve"})),
        event(5, 4.5, "TOOL_RESULT", Some(1), json!({"call_id": "c1", "ok": false, "text": "no table"})),
        event(6, 5.0, "invocation_result", Some(1), json!({"ok": true, "status": "completed"})),
    ];
    let expected = [
        row("in the queue", "wait", "+0 ms", "1.0 s"),
        row("model", "model", "+1.0 s", "2.0 s"),
        row("reserve", "bad", "+3.0 s", "1.5 s"),
        row("completed", "mark", "+5.0 s", ""),
    ];
    assert_eq!(drawn(&events), expected);
}

#[test]
fn a_call_that_waits_for_approval_is_a_wait_for_a_person_and_not_the_tools_work() {
    let mut events = vec![
        call(1, 1, 1, 0.0, 1.0, Some(7)),
        event(2, 1.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c1", "name": "charge"})),
        event(
            3,
            1.0,
            "state_transition",
            Some(1),
            json!({"from_state": "running", "to_state": "needs_attention"}),
        ),
    ];
    assert_eq!(drawn(&events)[1], row("charge", "person", "+1.0 s", "1 min 39 s"));
    let resolved = json!({"effect": "c1", "resolution": "approved", "by": "ann"});
    events.push(event(4, 41.0, "EFFECT_RESOLVED", None, resolved));
    events.push(event(
        5,
        43.0,
        "TOOL_RESULT",
        Some(2),
        json!({"call_id": "c1", "ok": true, "text": "charged"}),
    ));
    let fall = fall(&events, &[], &[]);
    assert_eq!(
        names(&fall),
        [
            ("model", "+0 ms", "1.0 s"),
            ("charge waits for approval", "+1.0 s", "40.0 s"),
            ("charge", "+41.0 s", "2.0 s")
        ]
    );
    assert_eq!((fall.rows[1].class, fall.rows[1].about.as_str()), ("person", "approved by ann"));
    assert!(fall.shortened, "a person's night is no work");
}

#[test]
fn a_call_that_a_person_found_to_have_happened_did_not_fail() {
    let needs = json!({"from_state": "running", "to_state": "needs_attention"});
    let events = [
        call(1, 1, 1, 0.0, 1.0, Some(7)),
        event(2, 1.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c1", "name": "charge"})),
        event(3, 3.0, "TOOL_FAILED_UNCERTAIN", Some(1), json!({"call_id": "c1"})),
        event(4, 3.0, "state_transition", Some(1), needs),
        event(
            5,
            53.0,
            "EFFECT_RESOLVED",
            None,
            json!({"effect": "c1", "resolution": "happened", "by": "ann"}),
        ),
        event(6, 54.0, "TOOL_RESULT", Some(2), json!({"call_id": "c1", "ok": true, "text": "charged"})),
    ];
    let fall = fall(&events, &[], &[]);
    let expected = [
        ("model", "+0 ms", "1.0 s"),
        ("charge", "+1.0 s", "2.0 s"),
        ("did charge happen?", "+3.0 s", "50.0 s"),
    ];
    assert_eq!(names(&fall), expected);
    let shown: Vec<_> = fall.rows.iter().map(|row| (row.class, row.about.as_str())).collect();
    assert_eq!(
        shown[1..],
        [("lost", "its end is unknown: it may have run"), ("person", "happened, says ann")]
    );
}

#[test]
fn a_call_of_which_the_model_was_told_asks_nobody_and_a_persons_wait_is_no_failure() {
    let needs = json!({"from_state": "running", "to_state": "needs_attention"});
    let told = json!({"call_id": "c1", "ok": false, "text": "OUTCOME UNKNOWN"});
    let mut events = vec![
        call(1, 1, 1, 0.0, 1.0, Some(7)),
        event(2, 1.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c1", "name": "charge"})),
        event(3, 3.0, "TOOL_FAILED_UNCERTAIN", Some(1), json!({"call_id": "c1"})),
        event(4, 3.0, "TOOL_RESULT", Some(1), told.clone()),
        event(5, 9.0, "state_transition", Some(2), needs),
    ];
    assert_eq!(names(&fall(&events, &[], &[])), [("model", "+0 ms", "1.0 s"), ("charge", "+1.0 s", "2.0 s")]);
    // A retry lets the model be told after a person had been asked.
    events.swap(3, 4);
    let fall = fall(&events, &[], &[]);
    assert_eq!((fall.rows[2].name.as_str(), fall.rows[2].class), ("did charge happen?", "person"));
}

/// Step 1 was committed at 2 s by `a`, which began step 2 at once and died. `b` took it up at 20 s.
fn crash() -> Vec<Event> {
    vec![
        call(1, 1, 1, 0.0, 1.0, Some(5)),
        event(2, 1.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c", "name": "look"})),
        event(3, 2.0, "TOOL_RESULT", Some(1), json!({"call_id": "c", "ok": true, "text": "seen"})),
        event(4, 5.0, "GEN_SENT", None, json!({"channel": "email"})),
        call(5, 2, 1, 2.0, 23.0, None),
        resumed(6, 2, 23.0, "replace"),
        call(7, 2, 2, 20.0, 23.0, Some(9)),
    ]
}

fn names(fall: &Waterfall) -> Vec<(&str, &str, &str)> {
    fall.rows.iter().map(|row| (row.name.as_str(), row.began.as_str(), row.took.as_str())).collect()
}

#[test]
fn a_call_that_died_with_its_worker_ends_where_that_was_last_heard_of() {
    let steps = [step(1, 1, "a", 0.0, 2.0), step(2, 2, "b", 20.0, 23.0)];
    let fall = fall(&crash(), &steps, &[silent("a", 6.5)]);
    let expected = [
        ("model", "+0 ms", "1.0 s"),
        ("look", "+1.0 s", "1.0 s"),
        ("delivered", "+5.0 s", ""),
        ("model", "+2.0 s", "4.5 s"),
        ("no worker", "+6.5 s", "13.5 s"),
        ("model, attempt 2", "+20.0 s", "3.0 s"),
    ];
    assert_eq!(names(&fall), expected);
    assert_eq!(fall.rows[3].about, "m, lost with its worker, which was last heard of here");
    assert_eq!(fall.rows[4].about, "a died; b went on. Kept: 1 step, 1 tool result");
    assert!(fall.survived && fall.shortened);
}

#[test]
fn without_a_sign_of_life_it_is_not_known_how_long_a_lost_call_took() {
    let steps = [step(1, 1, "a", 0.0, 2.0), step(2, 2, "b", 20.0, 23.0)];
    for (known, died) in [(&steps[..], "a died; b went on. Kept"), (&[], "its worker died. Kept")] {
        let fall = fall(&crash(), known, &[]);
        assert_eq!(names(&fall)[3..5], [("model", "+2.0 s", "not known"), ("no worker", "+2.0 s", "18.0 s")]);
        assert!(fall.rows[4].about.starts_with(died), "{}", fall.rows[4].about);
    }
}

#[test]
fn a_worker_that_lives_has_only_lost_hold_of_the_session() {
    let steps = [step(1, 1, "a", 0.0, 2.0), step(2, 2, "b", 20.0, 23.0)];
    let fall = fall(&crash(), &steps, &[silent("a", 99.0)]);
    assert_eq!(names(&fall)[3..], [("model", "+2.0 s", "18.0 s"), ("model, attempt 2", "+20.0 s", "3.0 s")]);
    assert!(fall.rows[3].about.contains("a lost hold of the session; b went on"), "{}", fall.rows[3].about);
    assert!(!fall.survived);
}

#[test]
fn what_a_worker_gave_back_waits_in_the_queue() {
    let events = [call(1, 1, 1, 0.0, 1.0, Some(5)), call(2, 2, 1, 5.0, 6.0, Some(9))];
    let drawn = |attempt: i64| {
        let fall = fall(&events, &[step(1, 1, "a", 0.0, 1.0), step(2, attempt, "b", 5.0, 6.0)], &[]);
        assert_eq!(fall.survived, attempt > 1);
        let row = &fall.rows[1];
        (row.name.clone(), row.took.clone(), row.about.clone())
    };
    let own = |name: &str, about: &str| (name.to_owned(), "4.0 s".to_owned(), about.to_owned());
    assert_eq!(drawn(1), own("in the queue", "a gave it back; b went on"));
    // A claim that counts was never given back.
    assert_eq!(drawn(2), own("no worker", "a died; b went on. Kept: 1 step, 0 tool results"));
}

#[test]
fn a_call_takes_no_longer_than_its_step() {
    // The commit of the step before wrote the call down, and took 30 ms more.
    let events = [call(1, 1, 1, 1.0, 1.668, Some(5))];
    let fall = fall(&events, &[step(1, 1, "a", 1.032, 1.668)], &[]);
    assert_eq!(names(&fall), [("model", "+0 ms", "636 ms")]);
}

#[test]
fn a_failed_attempt_is_followed_by_its_back_off() {
    let events = [
        event(
            1,
            2.0,
            "ATTEMPT_FAILED",
            Some(1),
            json!({"model": "m", "fault": "overloaded", "reason": "529",
            "attempt": 1, "retry_in_ms": 3000}),
        ),
        call(2, 1, 1, 0.0, 9.0, None),
        call(3, 1, 2, 5.0, 9.0, Some(9)),
    ];
    let expected = [
        row("model", "bad", "+0 ms", "2.0 s"),
        row("back-off", "rest", "+2.0 s", "3.0 s"),
        row("model, attempt 2", "model", "+5.0 s", "4.0 s"),
    ];
    assert_eq!(drawn(&events), expected);
}

#[test]
fn a_crash_says_whether_the_text_was_kept() {
    let about = |strategy: &str| {
        let events =
            [call(1, 1, 1, 0.0, 9.0, None), resumed(2, 1, 9.0, strategy), call(3, 1, 2, 4.0, 9.0, Some(9))];
        fall(&events, &[], &[]).rows[1].about.clone()
    };
    let kept = "its worker died. Kept: 0 steps, 0 tool results";
    assert_eq!(about("resume"), format!("{kept}, and the text that it had written"));
    assert_eq!(about("replace"), kept);
}

#[test]
fn a_wait_of_hours_leaves_room_for_the_work() {
    let events = [
        event(1, 0.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c1", "name": "ask_user"})),
        event(2, 90.0, "TOOL_RESULT", Some(1), json!({"call_id": "c1", "ok": true, "text": "green"})),
        call(3, 2, 1, 90.0, 92.0, Some(9)),
    ];
    let drawn = fall(&events, &[], &[]);
    assert!(drawn.shortened);
    assert_eq!(drawn.rows[0].took, "1 min 30 s");
    assert!(drawn.rows[1].width.parse::<f64>().unwrap() > 700.0, "{:?}", drawn.rows);
}

#[test]
fn nothing_is_drawn_of_an_empty_journal() {
    assert!(fall(&[], &[], &[]).rows.is_empty());
}
