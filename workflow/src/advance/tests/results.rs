//! Tests of tool results: state, checkpoints, questions, and uncertain calls.

use super::*;

#[test]
fn results_complete_the_step_that_their_turn_began() {
    let calls = vec![
        row("a", Effect::Pure, CallStatus::Invoked),
        row("b", Effect::Guarded, CallStatus::Invoked),
        row("c", Effect::Pure, CallStatus::Invoked),
    ];
    let results =
        advance(&turn(calls), called(vec![("a", done()), ("b", done()), ("c", CallEnd::Abandoned)]), TELL);
    assert_eq!((numbers(&results), results.next.clone()), (vec![4, 5, 6], Next::NextStep));
    assert_eq!(names(&results.events), ["TOOL_RESULT", "TOOL_RESULT", "TOOL_RESULT"]);
    assert_eq!(
        closed(&results),
        [
            ("a", CallStatus::Done, Some(4)),
            ("b", CallStatus::Done, Some(5)),
            ("c", CallStatus::Abandoned, Some(6))
        ]
    );
    let step = results.step.unwrap();
    assert_eq!((step.from_message_number, step.to_message_number), (1, 6));
    assert_eq!((step.usage, step.finish_reason), (USAGE, FinishReason::ToolCalls));
    assert_eq!(step.executed_local_tool_count, 2);
}

#[test]
fn a_tool_result_becomes_state_and_a_delivery_in_its_own_commit() {
    let details = json!({"type": "sentEmail", "to": ["a@b.c"], "subject": "Hi", "body": "long"});
    let sent = CallOutcome { details: Some(details.clone()), ..outcome("queued") };
    let mut session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    let results = advance(&session, called(vec![("a", CallEnd::Settled(CallStatus::Done, sent))]), TELL);
    assert_eq!(names(&results.events), ["context_update", "TOOL_RESULT"]);
    assert_eq!(results.state_updates[0].key, "email/a");
    assert_eq!(
        results.deliveries,
        [NewDelivery { source_key: "a".into(), channel: "email".into(), content: details }]
    );
    session.apply(&results);
    assert_eq!(session.state["email/a"]["subject"], "Hi");
    assert_eq!(session.state, derive::fold(State::new(), &session.records));
}

#[test]
fn a_checkpoint_is_written_every_so_many_steps() {
    for (last_step_number, wanted) in [(STEPS_PER_CHECKPOINT - 1, true), (STEPS_PER_CHECKPOINT, false)] {
        let mut session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
        session.last_step_number = last_step_number;
        let results = advance(&session, called(vec![("a", done())]), TELL);
        assert_eq!(!results.blobs.is_empty(), wanted);
        assert_eq!(names(&results.events).contains(&"checkpoint".to_owned()), wanted);
    }
}

/// A call that wrote a mail with a subject of `subject_bytes` bytes.
fn mailed(subject_bytes: usize) -> (Session, Performed) {
    let details =
        json!({"type": "sentEmail", "to": ["a@b.c"], "subject": "x".repeat(subject_bytes), "body": ""});
    let sent = CallOutcome { details: Some(details), ..outcome("queued") };
    let session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    (session, called(vec![("a", CallEnd::Settled(CallStatus::Done, sent))]))
}

#[test]
fn a_large_value_is_journalled_by_pointer() {
    let small = "{\"subject\":\"\",\"to\":[\"a@b.c\"]}".len();
    for (subject, by_pointer) in [(INLINE_VALUE_BYTES - small, false), (INLINE_VALUE_BYTES - small + 1, true)]
    {
        let (session, outcome) = mailed(subject);
        let results = advance(&session, outcome, TELL);
        let payload = results.events[0].to_row().1;
        assert_eq!(payload["value"].is_null(), by_pointer, "{payload}");
        assert_eq!(results.blobs.len(), usize::from(by_pointer));
        if let Some(blob) = results.blobs.first() {
            assert_eq!(payload["value_sha256"], blob.sha256);
            assert_eq!(payload["bytes"], blob.bytes.len());
            assert_eq!(serde_json::from_slice::<Value>(&blob.bytes).unwrap(), results.state_updates[0].value);
        }
    }
}

#[test]
fn at_the_level_of_checkpoints_a_commit_that_changes_the_state_writes_one_and_no_update() {
    let (session, outcome) = mailed(1);
    let results = advance(&session, outcome, SNAPSHOTS);
    assert_eq!(names(&results.events), ["TOOL_RESULT", "checkpoint"]);
    assert_eq!(results.events[1].to_row().1["lifecycle_state"], "running");
    let mut after = session;
    after.apply(&results);
    assert_eq!(results.blobs, [Blob::of_state(&after.state)]);

    let unchanged = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    let results = advance(&unchanged, called(vec![("a", done())]), SNAPSHOTS);
    assert_eq!(names(&results.events), ["TOOL_RESULT"]);
}

#[test]
fn at_the_level_of_checkpoints_a_close_that_goes_on_keeps_what_it_did_to_the_state() {
    let details = json!({"type": "fileWritten", "path": "p", "bytes": 1, "sha256": "00"});
    let wrote = CallOutcome { details: Some(details), ..outcome("written") };
    let calls = ["a", "q"].map(|id| row(id, Effect::Pure, CallStatus::Invoked)).to_vec();
    let outcome =
        called(vec![("a", CallEnd::Settled(CallStatus::Done, wrote)), ("q", CallEnd::Asked("?".into()))]);
    let asked = advance(&turn(calls), outcome, SNAPSHOTS);
    assert_eq!(names(&asked.events), ["TOOL_RESULT"]);
    assert_eq!(names(&closing(&asked).events), ["state_transition", "invocation_result", "checkpoint"]);
    let going_on = asked.continuing();
    assert_eq!(names(&going_on.events), ["TOOL_RESULT", "checkpoint"]);
    assert_eq!(going_on.events[1].to_row().1["lifecycle_state"], "running");
    assert_eq!(going_on.blobs.len(), 1);
}

#[test]
fn one_question_is_asked_at_a_time() {
    let question = || CallEnd::Asked("Which?".to_owned());
    let calls = ["a", "q", "r"].map(|id| row(id, Effect::Pure, CallStatus::Invoked)).to_vec();
    let mut session = turn(calls);
    let asked = advance(&session, called(vec![("a", done()), ("q", question()), ("r", question())]), TELL);
    assert_eq!(
        closed(&asked),
        [
            ("a", CallStatus::Done, Some(4)),
            ("q", CallStatus::Waiting, None),
            ("r", CallStatus::Failed, Some(5))
        ]
    );
    assert_eq!(closing(&asked).status, SessionStatus::WaitingInput);
    assert_eq!(asked.step.as_ref().map(|step| step.to_message_number), Some(5));

    // The answer has already arrived, so the run continues with the next step.
    let asked = asked.continuing();
    assert_eq!(asked.next, Next::NextStep);
    session.apply(&asked);
    assert_eq!(session.status, SessionStatus::Running);
    let answer = called(vec![("q", CallEnd::Answered { inbox_id: 4, text: "blue".into() })]);
    let answered = advance(&session, answer, TELL);
    assert_eq!((&answered.next, &answered.step), (&Next::SameStep, &None), "its step was committed");
    assert_eq!((answered.step_number, answered.inbox_drained), (2, vec![4]));
    assert_eq!(answered.records[0].text(), "blue");
}

#[test]
fn a_question_that_nobody_answered_pauses_the_run() {
    let paused = advance(&turn(vec![row("q", Effect::Pure, CallStatus::Waiting)]), Performed::Paused, TELL);
    assert_eq!((closing(&paused).status, paused.step.clone()), (SessionStatus::WaitingInput, None));
    assert!(paused.records.is_empty());
}

#[test]
fn the_model_is_told_of_an_unknown_outcome_and_goes_on() {
    for known in [false, true] {
        let session = turn(vec![row("a", Effect::Guarded, CallStatus::Started)]);
        let told = advance(&session, called(vec![("a", CallEnd::Uncertain { known, why: None })]), TELL);
        assert!(told.records[0].text().starts_with("OUTCOME UNKNOWN"));
        assert_eq!(closed(&told), [("a", CallStatus::Uncertain, Some(4))]);
        assert_eq!(told.next, Next::NextStep);
        let journalled = names(&told.events).contains(&"TOOL_FAILED_UNCERTAIN".to_owned());
        assert_eq!(journalled, !known, "it is journalled once");
    }
}

#[test]
fn a_person_is_asked_first_where_the_policy_says_so_and_a_retry_tells_the_model() {
    let mut session = turn(vec![
        row("a", Effect::Guarded, CallStatus::Started),
        row("b", Effect::Pure, CallStatus::Invoked),
    ]);
    let unknown = CallEnd::Uncertain { known: false, why: None };
    let stopped = advance(&session, called(vec![("a", unknown), ("b", done())]), ASK);
    assert_eq!(closed(&stopped), [("a", CallStatus::Uncertain, None), ("b", CallStatus::Done, Some(4))]);
    let closing = closing(&stopped);
    assert_eq!((closing.status, &stopped.step), (SessionStatus::NeedsAttention, &None));
    assert!(closing.error.as_deref().unwrap().contains("wakeful session resolve"));

    session.apply(&stopped);
    assert_eq!(session.calls, [row("a", Effect::Guarded, CallStatus::Uncertain)]);
    session.status = SessionStatus::Running;
    let told = advance(&session, called(vec![("a", CallEnd::Uncertain { known: true, why: None })]), ASK);
    assert_eq!((closed(&told)[0].2, &told.next), (Some(5), &Next::NextStep));
    let step = told.step.unwrap();
    assert_eq!(step.usage, USAGE, "the turn is counted when it is complete");
    assert_eq!(step.executed_local_tool_count, 2, "and so is what ran before the pause");
}

#[test]
fn nothing_is_asked_beside_a_call_that_waits_for_an_operator() {
    let mut session = turn(vec![
        row("q", Effect::Pure, CallStatus::Invoked),
        row("a", Effect::Guarded, CallStatus::Started),
    ]);
    let unknown = CallEnd::Uncertain { known: false, why: None };
    let ended = vec![("q", CallEnd::Asked("Which one?".into())), ("a", unknown)];
    let stopped = advance(&session, called(ended), ASK);
    // Nobody would be sent the question, and the next message would be taken for its answer.
    assert_eq!(closed(&stopped), [("q", CallStatus::Failed, Some(4)), ("a", CallStatus::Uncertain, None)]);
    assert_eq!(closing(&stopped).status, SessionStatus::NeedsAttention);
    session.apply(&stopped);
    assert_eq!(session.calls, [row("a", Effect::Guarded, CallStatus::Uncertain)]);
}

#[test]
fn a_run_pauses_for_an_approval_when_its_other_calls_have_results_and_asks_nothing_else() {
    let mut session = turn(vec![
        row("a", Effect::Guarded, CallStatus::Unapproved),
        row("b", Effect::Pure, CallStatus::Invoked),
        row("q", Effect::Pure, CallStatus::Invoked),
    ]);
    let others = vec![("b", done()), ("q", CallEnd::Asked("Which one?".into()))];
    let paused = advance(&session, called(others), TELL);
    assert_eq!(closed(&paused), [("b", CallStatus::Done, Some(4)), ("q", CallStatus::Failed, Some(5))]);
    let end = closing(&paused);
    assert_eq!((end.status, &paused.step), (SessionStatus::NeedsAttention, &None));
    assert!(end.error.as_deref().unwrap().contains("wakeful session approve"));

    session.apply(&paused);
    session.status = SessionStatus::Running;
    let again = advance(&session, Performed::Paused, TELL);
    assert_eq!(closing(&again).status, SessionStatus::NeedsAttention, "a retry is no approval");
    session.calls[0].status = CallStatus::Invoked;
    let ran = advance(&session, called(vec![("a", done())]), TELL);
    let step = ran.step.unwrap();
    assert_eq!((step.usage, step.executed_local_tool_count), (USAGE, 3), "the turn is counted once, whole");
}

#[test]
fn a_held_call_is_recorded_so_and_not_started() {
    let session = session();
    let mut reply = advance(&session, asks(&["a", "b"]), TELL);
    reply.hold_calls(|call| call.call_id.as_str() == "a");
    reply.start_calls(|_| Some(CallStart { nonce: "n".into(), timeout_s: 5 }));
    let statuses: Vec<CallStatus> = reply.calls_opened.iter().map(OpenedCall::status).collect();
    assert_eq!(statuses, [CallStatus::Unapproved, CallStatus::Started]);
    let mut after = session.clone();
    after.apply(&reply);
    assert!(after.awaits_approval());
}

#[test]
fn a_run_that_was_to_fail_and_goes_on_for_a_message_has_not_said_that_it_failed() {
    let session = Session { interrupted: vec![example::interrupted("gen_1", 1, 3)], ..session() };
    let failed = advance(&session, Performed::Stopped(Stop::Failed(Fault::EmptyReply)), TELL);
    assert!(names(&failed.events).contains(&"GEN_FAILED".to_owned()));
    let woken = failed.continuing();
    assert_eq!((woken.next, names(&woken.events)), (Next::SameStep, vec![]));
    assert!(!woken.generation_over, "the next plan finds the call that was interrupted");
}

#[test]
fn a_person_who_could_not_be_asked_yet_is_asked_by_the_next_plan() {
    let session = turn(vec![
        row("a", Effect::Guarded, CallStatus::Started),
        row("b", Effect::Pure, CallStatus::Invoked),
    ]);
    let unknown = CallEnd::Uncertain { known: false, why: None };
    let woken = advance(&session, called(vec![("a", unknown), ("b", done())]), ASK).continuing();
    assert_eq!(closed(&woken), [("b", CallStatus::Done, Some(4))]);
    assert_eq!((names(&woken.events), woken.next), (vec!["TOOL_RESULT".to_owned()], Next::SameStep));
}
