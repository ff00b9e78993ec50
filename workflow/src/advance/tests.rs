//! What each outcome writes.

use super::*;
use crate::agent::{JournalLevel, OnUncertain};
use crate::derive;
use crate::derive::Outgoing;
use crate::event::Event;
use crate::example::{
    self, EARLIER_RUN, RUN, USAGE, assistant, message, outcome, row, session, settled, tool_call, turn, user,
};
use crate::fault::Fault;
use crate::record::{Block, FinishReason, Role, ToolCall};
use crate::session::{CallStatus, State};
use crate::session::{InboxMessage, Interrupted, Run};
use crate::wire;
use serde_json::{Value, json};

const TELL: Policy = Policy { on_uncertain: OnUncertain::TellModel, journal: JournalLevel::Full };
const ASK: Policy = Policy { on_uncertain: OnUncertain::NeedsAttention, ..TELL };
const SNAPSHOTS: Policy = Policy { journal: JournalLevel::Checkpoint, ..TELL };

fn text(text: &str) -> Block {
    Block::Text { text: text.to_owned() }
}

fn reply_of(content: Vec<Block>) -> Outcome {
    let finish_reason = FinishReason::Stop;
    Outcome::Replied(Generated {
        generation_id: "gen_2".into(),
        attempt: 2,
        model: "scripted/m".into(),
        request_sha256: "00".into(),
        started_at: "2026-01-01T00:00:02+00:00".into(),
        repairs: 1,
        resumes: None,
        prefill_bytes: None,
        context_strategy: context::Strategy::Full,
        rebase: None,
        reply: Reply { content, finish_reason, usage: USAGE },
        effects: BTreeMap::from([("tool".to_owned(), Effect::Idempotent)]),
    })
}

fn asks(ids: &[&str]) -> Outcome {
    reply_of(ids.iter().map(|id| Block::ToolCall(tool_call(id))).collect())
}

fn called(endings: Vec<(&str, Ending)>) -> Outcome {
    let one = |(id, ending)| Performed { call: tool_call(id), ending };
    Outcome::Called(endings.into_iter().map(one).collect())
}

fn done() -> Ending {
    Ending::Settled(CallStatus::Done, outcome("done"))
}

fn names(events: &[Event]) -> Vec<String> {
    events.iter().map(|event| event.to_row().0).collect()
}

fn closing(transition: &Transition) -> &Closing {
    match &transition.next {
        Next::Close(closing) => closing,
        other => panic!("it goes on: {other:?}"),
    }
}

fn numbers(transition: &Transition) -> Vec<i64> {
    transition.records.iter().map(|record| record.message_number).collect()
}

fn roles(transition: &Transition) -> Vec<Role> {
    transition.records.iter().map(|record| record.role).collect()
}

/// The id, status and result's number of each ledger row that changes.
fn closed(transition: &Transition) -> Vec<(&str, CallStatus, Option<i64>)> {
    let row = |call: &'_ ClosedCall| (call.status, call.message_number);
    transition.calls_closed.iter().map(|call| (call.call_id.as_str(), row(call).0, row(call).1)).collect()
}

fn with_inbox(session: Session, inbox: &[InboxMessage]) -> Session {
    Session { inbox: inbox.to_vec(), ..session }
}

#[test]
fn a_run_begins_with_a_journal_entry_and_nothing_else() {
    let session = Session { status: SessionStatus::Queued, ..session() };
    let begun = advance(&session, Outcome::Begun, TELL);
    assert_eq!(names(&begun.events), ["state_transition"]);
    assert_eq!((begun.status(), &begun.next), (Some(SessionStatus::Running), &Next::SameStep));
    assert!(begun.records.is_empty() && begun.step.is_none() && begun.blobs.is_empty());
    let mut running = session;
    running.apply(&begun);
    assert_eq!(running.status, SessionStatus::Running);
}

#[test]
fn a_reply_without_calls_is_the_step_and_closes_the_run() {
    let session = session();
    let replied = advance(&session, reply_of(vec![text("Hi.")]), TELL);
    assert_eq!((numbers(&replied), roles(&replied)), (vec![3], vec![Role::Assistant]));
    assert_eq!(names(&replied.events), ["LLM_CALLED", "GEN_START", "GEN_COMPLETE"]);
    assert!(replied.generation_over);
    let step = StepResult {
        from_message_number: 1,
        to_message_number: 3,
        finish_reason: FinishReason::Stop,
        usage: USAGE,
        executed_local_tool_count: 0,
    };
    assert_eq!((replied.step.as_ref(), replied.step_number), (Some(&step), 1));
    let closing = closing(&replied);
    assert_eq!((closing.status, &closing.error), (SessionStatus::Completed, &None));
    assert_eq!(names(&closing.events), ["state_transition", "invocation_result", "checkpoint"]);
    assert_eq!(closing.snapshot.bytes, b"{}");
}

#[test]
fn a_turn_with_calls_is_kept_before_a_tool_runs_and_is_no_step_yet() {
    let asked = advance(&session(), asks(&["a", "b"]), TELL);
    assert_eq!((&asked.next, &asked.step), (&Next::SameStep, &None));
    assert_eq!(
        names(&asked.events),
        ["LLM_CALLED", "GEN_START", "GEN_COMPLETE", "TOOL_INVOKED", "TOOL_INVOKED"]
    );
    let opened: Vec<_> = asked.calls_opened.iter().map(|call| (call.call_id.as_str(), call.effect)).collect();
    assert_eq!(opened, [("a", Effect::Idempotent), ("b", Effect::Idempotent)]);
    assert_eq!(asked.records[0].details.usage, Some(USAGE));
}

#[test]
fn a_call_of_a_tool_that_was_not_offered_is_guarded() {
    let unknown = ToolCall { name: "other".into(), ..tool_call("a") };
    let asked = advance(&session(), reply_of(vec![Block::ToolCall(unknown)]), TELL);
    assert_eq!(asked.calls_opened[0].effect, Effect::Guarded);
}

#[test]
fn messages_that_waited_stand_before_the_reply_in_their_order() {
    let session = with_inbox(session(), &[message(7, "one"), message(9, "two")]);
    let replied = advance(&session, reply_of(vec![text("Both.")]), TELL);
    assert_eq!(roles(&replied), [Role::User, Role::User, Role::Assistant]);
    assert_eq!(numbers(&replied), [3, 4, 5]);
    assert_eq!(replied.inbox_drained, [7, 9]);
    assert_eq!(replied.records[1].details.inbox_id, Some(9));
    assert_eq!(replied.step.unwrap().to_message_number, 5);
}

#[test]
fn a_projection_leaves_the_transcript_alone_and_a_reply_to_a_violated_one_is_its_next_message() {
    // Two user turns in a row, which one protocol merges and the other does not.
    let mut session = session();
    session.records.push(user(3, "hello?"));
    session.last_message_number = 3;
    let stored = serde_json::to_string(&session.records).unwrap();
    let context = session.context(Vec::new());
    let anthropic = wire::anthropic::project(&context, &wire::anthropic::Options::new("m", 7));
    let openai = wire::openai::project(&context, &wire::openai::Options::new("m", 7));
    assert_eq!((anthropic.repairs.total(), openai.repairs.total()), (1, 0));
    assert_eq!(serde_json::to_string(&session.records).unwrap(), stored);

    let replied = advance(&session, reply_of(vec![text("Hi.")]), TELL);
    assert_eq!((numbers(&replied), roles(&replied)), (vec![4], vec![Role::Assistant]));
    session.apply(&replied.continuing());
    let stored: Vec<i64> = session.records.iter().map(|record| record.message_number).collect();
    assert_eq!(stored, [2, 3, 4]);
}

#[test]
fn attempts_that_died_are_journalled_by_the_one_that_answered() {
    let mut session = Session { interrupted: vec![example::interrupted("gen_1", 1, 3)], ..session() };
    let replied = advance(&session, reply_of(vec![text("Hi.")]), TELL);
    assert_eq!(
        names(&replied.events),
        ["LLM_CALLED", "GEN_START", "GEN_RESUMED", "LLM_CALLED", "GEN_START", "GEN_COMPLETE"]
    );
    let resumed = Event::GenResumed {
        generation_id: "gen_2".into(),
        strategy: "replace".into(),
        replaces: "gen_1".into(),
        prior_seq: 3,
    };
    assert_eq!(replied.events[2], resumed);
    let told = |index: usize| {
        let payload = replied.events[index].to_row().1;
        ["prompt_tokens", "repairs", "started_at"].map(|key| payload[key].clone())
    };
    assert_eq!(told(0), [json!(null), json!(0), json!("2026-01-01T00:00:01+00:00")], "it was cut off");
    assert_eq!(told(3), [json!(10), json!(1), json!("2026-01-01T00:00:02+00:00")]);
    session.apply(&replied);
    assert!(session.interrupted.is_empty());
}

#[test]
fn a_call_that_nobody_makes_again_is_journalled_as_failed_with_its_reason() {
    let interrupted = vec![example::interrupted("gen_1", 1, 3), example::interrupted("gen_2", 2, 3)];
    let session = Session { interrupted, ..session() };
    let stops = [
        (Stop::Cancelled, "cancelled"),
        (Stop::Failed(Fault::StepLimit { limit: 3 }), "the run reached its limit of 3 steps"),
    ];
    for (stop, reason) in stops {
        let stopped = advance(&session, Outcome::Stopped(stop), TELL);
        let call = ["LLM_CALLED", "GEN_START"];
        let wanted = [call.as_slice(), &["GEN_RESUMED"], &call, &["GEN_FAILED"]].concat();
        assert_eq!(names(&stopped.events), wanted);
        let failed = Event::GenFailed { generation_id: "gen_2".into(), reason: reason.into() };
        assert_eq!(stopped.events[5], failed, "the first one was repeated by the second");
    }
}

#[test]
fn each_attempt_names_the_one_that_followed_it_and_how() {
    // The second was cut off before any chunk, the third went on from nothing, the fourth from the third's text.
    let interrupted = vec![
        example::interrupted("gen_1", 1, 2),
        Interrupted { resumes: Some("gen_1".into()), ..example::interrupted("gen_2", 2, -1) },
        example::interrupted("gen_3", 3, 0),
    ];
    let session = Session { interrupted, ..session() };
    let Outcome::Replied(generated) = reply_of(vec![text("Hi.")]) else { panic!("a reply") };
    let generated =
        Generated { generation_id: "gen_4".into(), resumes: Some("gen_3".into()), repairs: 2, ..generated };
    let replied = advance(&session, Outcome::Replied(generated), TELL);
    let resumed: Vec<(&str, &str, &str, i64)> = replied
        .events
        .iter()
        .filter_map(|event| match event {
            Event::GenResumed { generation_id, strategy, replaces, prior_seq } => {
                Some((replaces.as_str(), generation_id.as_str(), strategy.as_str(), *prior_seq))
            }
            _ => None,
        })
        .collect();
    let expected =
        [("gen_1", "gen_2", "resume", 2), ("gen_2", "gen_3", "replace", -1), ("gen_3", "gen_4", "resume", 0)];
    assert_eq!(resumed, expected);
    let repairs: Vec<i64> = replied
        .events
        .iter()
        .filter_map(|event| match event {
            Event::LlmCalled { repairs, .. } => Some(*repairs),
            _ => None,
        })
        .collect();
    assert_eq!(repairs, [0, 0, 0, 2]);
}

#[test]
fn call_ids_are_unique_in_a_session_whatever_the_provider_sends() {
    let long = "x".repeat(300);
    // ids of the reply, ids in the transcript
    let table: [(&[&str], &[&str]); 7] = [
        (&["b", "c"], &["b", "c"]),
        (&["a", "b"], &["a_5_0", "b"]),
        (&["b", "b", "b"], &["b", "b_5_1", "b_5_2"]),
        (&["", ""], &["call_5_0", "call_5_1"]),
        (&["a_5_1", "a"], &["a_5_1", "a_5_1_5_1"]),
        (&["b\0", "b\0"], &["b\u{fffd}", "b\u{fffd}_5_1"]),
        (&[&long, "call_5_0"], &["call_5_0", "call_5_0_5_1"]),
    ];
    let mut session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    session.records.push(crate::example::result(4, "a"));
    session.last_message_number = 4;
    for (given, wanted) in table {
        let asked = advance(&session, asks(given), TELL);
        let ids: Vec<_> = asked.calls_opened.iter().map(|call| call.call_id.as_str()).collect();
        assert_eq!(ids, wanted);
        let said: Vec<_> = asked.records[0].tool_calls().map(|call| call.call_id.as_str()).collect();
        assert_eq!(said, wanted);
        assert_eq!(asked, advance(&session, asks(given), TELL), "the same in every attempt");
    }
}

#[test]
fn nothing_that_the_database_cannot_hold_is_written() {
    let arguments = json!({"a\0": ["b\0"]});
    let call =
        ToolCall { call_id: "c\0".into(), name: "t\0".into(), arguments, malformed: Some("{\0".into()) };
    let session = with_inbox(session(), &[message(1, "m\0")]);
    let asked = advance(&session, reply_of(vec![text("x\0"), Block::ToolCall(call)]), TELL);
    let ended = Ending::Settled(
        CallStatus::Done,
        CallOutcome {
            content: "r\0".into(),
            is_error: false,
            details: Some(json!({"type": "fileWritten", "path": "p\0", "bytes": 1, "sha256": "00"})),
        },
    );
    let results =
        advance(&turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]), called(vec![("a", ended)]), TELL);
    let fault = Fault::Refused { status: 400, message: "e\0".into() };
    let failed = advance(&session, Outcome::Stopped(Stop::Failed(fault)), TELL);
    for transition in [&asked, &results, &failed] {
        let written = format!("{transition:?}");
        assert!(!written.contains("\\0"), "{written}");
    }
}

#[test]
fn signed_blocks_of_a_provider_are_kept_to_the_byte() {
    let raw: Value = json!({"type": "thinking", "signature": "s\0"});
    let block = Block::Provider { provider: "anthropic".into(), raw };
    let replied = advance(&session(), reply_of(vec![block.clone(), text("Hi.")]), TELL);
    assert_eq!(replied.records[0].content[0], block);
}

#[test]
fn results_complete_the_step_that_their_turn_began() {
    let calls = vec![
        row("a", Effect::Pure, CallStatus::Invoked),
        row("b", Effect::Guarded, CallStatus::Invoked),
        row("c", Effect::Pure, CallStatus::Invoked),
    ];
    let results =
        advance(&turn(calls), called(vec![("a", done()), ("b", done()), ("c", Ending::Abandoned)]), TELL);
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
    let results = advance(&session, called(vec![("a", Ending::Settled(CallStatus::Done, sent))]), TELL);
    assert_eq!(names(&results.events), ["context_update", "TOOL_RESULT"]);
    assert_eq!(results.state_updates[0].key, "email/a");
    assert_eq!(
        results.deliveries,
        [Outgoing { source_key: "a".into(), channel: "email".into(), content: details }]
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

/// A call that wrote a mail with so long a subject.
fn mailed(subject_bytes: usize) -> (Session, Outcome) {
    let details =
        json!({"type": "sentEmail", "to": ["a@b.c"], "subject": "x".repeat(subject_bytes), "body": ""});
    let sent = CallOutcome { details: Some(details), ..outcome("queued") };
    let session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    (session, called(vec![("a", Ending::Settled(CallStatus::Done, sent))]))
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
        called(vec![("a", Ending::Settled(CallStatus::Done, wrote)), ("q", Ending::Asked("?".into()))]);
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
    let question = || Ending::Asked("Which?".to_owned());
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

    // The answer is already there: the pause becomes the next step.
    let asked = asked.continuing();
    assert_eq!(asked.next, Next::NextStep);
    session.apply(&asked);
    assert_eq!(session.status, SessionStatus::Running);
    let answer = called(vec![("q", Ending::Answered { inbox_id: 4, text: "blue".into() })]);
    let answered = advance(&session, answer, TELL);
    assert_eq!((&answered.next, &answered.step), (&Next::SameStep, &None), "its step was committed");
    assert_eq!((answered.step_number, answered.inbox_drained), (2, vec![4]));
    assert_eq!(answered.records[0].text(), "blue");
}

#[test]
fn a_question_that_nobody_answered_pauses_the_run() {
    let paused = advance(&turn(vec![row("q", Effect::Pure, CallStatus::Waiting)]), Outcome::Paused, TELL);
    assert_eq!((closing(&paused).status, paused.step.clone()), (SessionStatus::WaitingInput, None));
    assert!(paused.records.is_empty());
}

#[test]
fn the_model_is_told_of_an_unknown_outcome_and_goes_on() {
    for known in [false, true] {
        let session = turn(vec![row("a", Effect::Guarded, CallStatus::Started)]);
        let told = advance(&session, called(vec![("a", Ending::Uncertain { known })]), TELL);
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
    let unknown = Ending::Uncertain { known: false };
    let stopped = advance(&session, called(vec![("a", unknown), ("b", done())]), ASK);
    assert_eq!(closed(&stopped), [("a", CallStatus::Uncertain, None), ("b", CallStatus::Done, Some(4))]);
    let closing = closing(&stopped);
    assert_eq!((closing.status, &stopped.step), (SessionStatus::NeedsAttention, &None));
    assert!(closing.error.as_deref().unwrap().contains("wakeful session resolve"));

    session.apply(&stopped);
    assert_eq!(session.calls, [row("a", Effect::Guarded, CallStatus::Uncertain)]);
    session.status = SessionStatus::Running;
    let told = advance(&session, called(vec![("a", Ending::Uncertain { known: true })]), ASK);
    assert_eq!((closed(&told)[0].2, &told.next), (Some(5), &Next::NextStep));
    let step = told.step.unwrap();
    assert_eq!(step.usage, USAGE, "the turn is counted when it is complete");
    assert_eq!(step.executed_local_tool_count, 2, "and so is what ran before the pause");
}

#[test]
fn a_run_that_was_to_fail_and_goes_on_for_a_message_has_not_said_that_it_failed() {
    let session = Session { interrupted: vec![example::interrupted("gen_1", 1, 3)], ..session() };
    let failed = advance(&session, Outcome::Stopped(Stop::Failed(Fault::EmptyReply)), TELL);
    assert!(names(&failed.events).contains(&"GEN_FAILED".to_owned()));
    let woken = failed.continuing();
    assert_eq!((woken.next, names(&woken.events)), (Next::SameStep, vec![]));
    assert!(!woken.generation_over, "the next plan finds the call that was cut off");
}

#[test]
fn a_person_who_could_not_be_asked_yet_is_asked_by_the_next_plan() {
    let session = turn(vec![
        row("a", Effect::Guarded, CallStatus::Started),
        row("b", Effect::Pure, CallStatus::Invoked),
    ]);
    let unknown = Ending::Uncertain { known: false };
    let woken = advance(&session, called(vec![("a", unknown), ("b", done())]), ASK).continuing();
    assert_eq!(closed(&woken), [("b", CallStatus::Done, Some(4))]);
    assert_eq!((names(&woken.events), woken.next), (vec!["TOOL_RESULT".to_owned()], Next::SameStep));
}

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
    let cancelled = advance(&session, Outcome::Stopped(Stop::Cancelled), TELL);
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
    assert_eq!((roles(&cancelled)[5], &cancelled.inbox_drained), (Role::User, &vec![6]));
    let unknown = Event::ToolFailedUncertain { call_id: "started".into(), name: "tool".into() };
    assert_eq!(cancelled.events.iter().filter(|event| **event == unknown).count(), 1);
    assert!(cancelled.generation_over);
    let closing = closing(&cancelled);
    assert_eq!((closing.status, closing.error.as_deref()), (SessionStatus::Failed, Some("cancelled")));
    let Event::StateTransition { reason, .. } = &closing.events[0] else { panic!("{:?}", closing.events) };
    assert_eq!(reason.as_deref(), Some("cancelled: the guest left"));
    session.apply(&cancelled);
    assert!(session.open_turn().is_none() && session.calls.is_empty());
}

#[test]
fn what_a_cancelled_turn_cost_is_counted_once() {
    let mut session = turn(vec![row("q", Effect::Pure, CallStatus::Waiting)]);
    let cancelled = advance(&session, Outcome::Stopped(Stop::Cancelled), TELL);
    let step = cancelled.step.clone().unwrap();
    assert_eq!((step.usage, step.executed_local_tool_count), (USAGE, 0));
    assert_eq!(cancelled.continuing().next, Next::NextStep);
    // The step of a paused turn is committed with the pause.
    session.last_step_number = 1;
    session.to_message_number = 3;
    assert_eq!(advance(&session, Outcome::Stopped(Stop::Cancelled), TELL).step, None);
}

#[test]
fn a_failed_run_keeps_its_open_calls_and_takes_the_messages_that_wait() {
    let calls = vec![row("a", Effect::Guarded, CallStatus::Started)];
    let mut session = with_inbox(turn(calls), &[message(1, "hi")]);
    let fault = Fault::StepLimit { limit: 3 };
    let failed = advance(&session, Outcome::Stopped(Stop::Failed(fault)), TELL);
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
        Fault::Stuck { attempts: 5, last_error: message() },
    ];
    for fault in faults {
        let failed = advance(&session(), Outcome::Stopped(Stop::Failed(fault.clone())), TELL);
        assert!(closing(&failed).error.as_deref().unwrap().contains("Remedy: "), "{}", fault.kind());
    }
}

#[test]
fn a_run_that_owes_nothing_is_completed_without_a_step() {
    let finished = advance(&turn(vec![]), Outcome::Stopped(Stop::Finished), TELL);
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
