//! Tests of how a run ends: cancelled, failed, completed, or continued because a message arrived.

use super::*;

#[test]
fn a_cancelled_run_closes_each_call_with_what_is_known_of_it() {
    let mut session = turn(vec![
        row("invoked", Effect::Guarded, CallStatus::Invoked),
        row("started", Effect::Idempotent, CallStatus::Started),
        row("uncertain", Effect::Guarded, CallStatus::Uncertain),
        row("waiting", Effect::Pure, CallStatus::Waiting),
        settled("done", CallStatus::Done),
    ]);
    session.inbox = vec![message(6, "stop")];
    session.cancel_reason = Some("the guest left".to_owned());
    let cancelled = advance(&session, Performed::Stopped(Stop::Cancelled), TELL);
    assert_eq!(
        closed(&cancelled),
        [
            ("invoked", CallStatus::Abandoned, Some(4)),
            ("started", CallStatus::Uncertain, Some(5)),
            ("uncertain", CallStatus::Uncertain, Some(6)),
            ("waiting", CallStatus::Abandoned, Some(7)),
            ("done", CallStatus::Done, Some(8)),
        ]
    );
    let told = |at: usize| cancelled.records[at].tool_results().next().unwrap().content.as_str();
    assert!(told(0).starts_with("This call was not carried out"), "{}", told(0));
    assert_eq!(told(3), "The question was asked; the run was stopped before an answer came.");
    assert_eq!((roles(&cancelled)[5], &cancelled.inbox_drained), (Role::User, &vec![6]));
    let unknown = Event::ToolFailedUncertain { call_id: "started".into(), name: "tool".into(), reason: None };
    assert_eq!(cancelled.events.iter().filter(|event| **event == unknown).count(), 1);
    assert!(cancelled.generation_over);
    let closing = closing(&cancelled);
    assert_eq!((closing.status, closing.error.as_deref()), (SessionStatus::Cancelled, Some("cancelled")));
    let Event::StateTransition { reason, .. } = &closing.events[0] else { panic!("{:?}", closing.events) };
    assert_eq!(reason.as_deref(), Some("cancelled: the guest left"));
    session.apply(&cancelled);
    assert!(session.open_turn().is_none() && session.calls.is_empty());
}

#[test]
fn a_cancel_says_of_a_call_only_what_its_worker_knows() {
    let session = turn(vec![
        row("cut", Effect::Guarded, CallStatus::Started),
        row("of a dead worker", Effect::Guarded, CallStatus::Started),
        row("uncertain before", Effect::Guarded, CallStatus::Uncertain),
    ]);
    let cut = vec!["cut".into(), "uncertain before".into()];
    let cancelled = advance(&session, Performed::Cancelled { used: None, cut }, TELL);
    let told: Vec<String> = cancelled
        .records
        .iter()
        .flat_map(Record::tool_results)
        .map(|result| result.content.split(" It may").next().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(
        told,
        [
            "OUTCOME UNKNOWN. The run was cancelled while the call ran.",
            "OUTCOME UNKNOWN. The call was started and the worker stopped before it reported back.",
            "OUTCOME UNKNOWN. The call was started, and how it ended is not known.",
        ]
    );
    let reasons: Vec<Option<&str>> = cancelled
        .events
        .iter()
        .filter_map(|event| match event {
            Event::ToolFailedUncertain { reason, .. } => Some(reason.as_deref()),
            _ => None,
        })
        .collect();
    assert_eq!(reasons, [Some("The run was cancelled while the call ran."), None]);
}

#[test]
fn what_a_cancelled_turn_cost_is_counted_once() {
    let mut session = turn(vec![row("q", Effect::Pure, CallStatus::Waiting)]);
    let cancelled = advance(&session, Performed::Stopped(Stop::Cancelled), TELL);
    let step = cancelled.step.clone().unwrap();
    assert_eq!((step.usage, step.executed_local_tool_count), (USAGE, 0));
    assert_eq!(cancelled.continuing().next, Next::NextStep);
    // The step of a paused turn is committed with the pause.
    session.last_step_number = 1;
    session.to_message_number = 3;
    assert_eq!(advance(&session, Performed::Stopped(Stop::Cancelled), TELL).step, None);
}

#[test]
fn a_failed_run_keeps_its_open_calls_and_takes_the_messages_that_wait() {
    let calls = vec![row("a", Effect::Guarded, CallStatus::Started)];
    let mut session = with_inbox(turn(calls), &[message(1, "hi")]);
    let fault = Fault::StepLimit { limit: 3 };
    let failed = advance(&session, Performed::Stopped(Stop::Failed(fault)), TELL);
    assert_eq!(closed(&failed), [("a", CallStatus::Uncertain, None)], "nobody is left to settle it");
    assert!(names(&failed.events).contains(&"TOOL_FAILED_UNCERTAIN".to_owned()) && failed.step.is_none());
    let woken = failed.clone().continuing();
    assert_eq!(closed(&woken), [], "it goes on, and its next plan finds the call");
    assert!(!names(&woken.events).contains(&"TOOL_FAILED_UNCERTAIN".to_owned()));
    assert!(failed.generation_over, "no call is in flight in a run that is over");
    assert_eq!((roles(&failed), &failed.inbox_drained), (vec![Role::User], &vec![1]));
    let error = closing(&failed).error.clone().unwrap();
    assert!(error.contains("limit of 3 steps") && error.contains("Remedy: "), "{error}");
    session.apply(&failed);
    let listed = vec![row("a", Effect::Guarded, CallStatus::Uncertain)];
    assert_eq!((session.calls, session.status), (listed, SessionStatus::Failed));
}

/// A session whose model has made this many turns of one malformed call. All but the newest have their result.
fn malformed(turns: i64) -> Session {
    let mut session = turn(vec![row(&format!("c{turns}"), Effect::Pure, CallStatus::Invoked)]);
    session.records.pop();
    for number in 1..=turns {
        let id = format!("c{number}");
        let call = ToolCall { malformed: Some("{\"half\":".to_owned()), ..tool_call(&id) };
        let at = session.records.last().unwrap().message_number + 1;
        session.records.push(assistant(at, RUN, vec![Block::ToolCall(call)]));
        if number < turns {
            session.records.push(example::result(at + 1, &id));
        }
    }
    session.last_message_number = session.records.last().unwrap().message_number;
    session
}

#[test]
fn a_model_that_makes_only_malformed_calls_fails_its_run_at_the_fifth() {
    let refused = |session: &Session| {
        let call = session.open_turn().unwrap().without_result[0].clone();
        let end = CallEnd::Settled(CallStatus::Failed, outcome("no JSON"));
        advance(session, Performed::Called(vec![EndedCall { call, ending: end }]), TELL)
    };
    assert_eq!(refused(&malformed(4)).next, Next::NextStep);
    let mut session = malformed(5);
    let failed = refused(&session);
    let close = closing(&failed);
    assert_eq!(close.status, SessionStatus::Failed);
    assert_eq!(close.failure.as_ref().unwrap().kind, "malformed_calls");
    let error = close.error.as_deref().unwrap();
    assert!(error.contains("5 turns in a row") && error.contains("Remedy: "), "{error}");
    assert!(failed.step.is_some() && roles(&failed) == [Role::Tool], "a retry asks the model once more");

    let heard = with_inbox(session.clone(), &[message(7, "Well?")]);
    assert_eq!(refused(&heard).next, Next::NextStep, "a person says something new");
    // Of two calls in a turn, one is sound.
    let sound = |record: &&mut Record| record.tool_calls().any(|call| call.call_id.as_str() == "c2");
    let record = session.records.iter_mut().find(sound).unwrap();
    let both = record.content.iter().cloned().chain([Block::ToolCall(tool_call("sound"))]);
    record.content = both.collect::<Vec<_>>().into();
    assert_eq!(refused(&session).next, Next::NextStep, "three in a row");
}

#[test]
fn every_fault_that_ends_a_run_names_its_remedy() {
    let message = || "m".to_owned();
    let faults = [
        Fault::ContextOverflow { message: message() },
        Fault::Unauthorized { message: message() },
        Fault::UnknownModel { message: message() },
        Fault::Refused { status: 400, message: message() },
        Fault::NotConfigured { message: message() },
        Fault::StepLimit { limit: 1 },
        Fault::TokenLimit { limit: 1 },
        Fault::MalformedCalls { turns: 5 },
        Fault::Stuck { attempts: 5, last_error: message() },
    ];
    for fault in faults {
        let failed = advance(&session(), Performed::Stopped(Stop::Failed(fault.clone())), TELL);
        assert!(closing(&failed).error.as_deref().unwrap().contains("Remedy: "), "{}", fault.kind());
    }
}

#[test]
fn a_run_that_owes_nothing_is_completed_without_a_step() {
    let finished = advance(&turn(vec![]), Performed::Stopped(Stop::Finished), TELL);
    assert_eq!((closing(&finished).status, &finished.step), (SessionStatus::Completed, &None));
    let checkpoint = closing(&finished).events.last().unwrap().to_row().1;
    assert_eq!((&checkpoint["step_number"], &checkpoint["to_message_number"]), (&json!(0), &json!(1)));
}

#[test]
fn a_closing_outcome_that_goes_on_keeps_everything_but_the_close() {
    let session = session();
    let replied = advance(&session, reply_of(vec![text("Hi.")]), TELL);
    let going_on = replied.clone().continuing();
    assert_eq!(going_on.next, Next::NextStep);
    assert_eq!(Transition { next: replied.next.clone(), ..going_on.clone() }, replied);
    assert_eq!(going_on.status(), None);
    assert_eq!(going_on.clone().continuing(), going_on);
}

#[test]
fn a_step_of_a_later_run_begins_where_the_earlier_one_ended() {
    let mut session = session();
    session.records = vec![user(2, "hello"), assistant(3, EARLIER_RUN, vec![text("Hi.")]), user(9, "again")];
    (session.last_message_number, session.to_message_number, session.last_step_number) = (9, 3, 1);
    session.run = Some(Run { run_id: RUN.into(), steps: 0, tokens: 0 });
    let replied = advance(&session, reply_of(vec![text("Yes.")]), TELL);
    let step = replied.step.unwrap();
    assert_eq!((step.from_message_number, step.to_message_number), (3, 10));
    assert_eq!((replied.step_number, replied.run_id.as_str()), (2, RUN));
}

#[test]
fn the_state_has_one_hash_whatever_order_it_was_made_in() {
    let state = |keys: [&str; 3]| keys.iter().map(|key| ((*key).to_owned(), json!(1))).collect::<State>();
    let (one, other) = (state(["a", "b", "c"]), state(["c", "a", "b"]));
    assert_eq!(Blob::of_state(&one), Blob::of_state(&other));
    assert_eq!(Blob::of_state(&one).bytes, br#"{"a":1,"b":1,"c":1}"#);
}
