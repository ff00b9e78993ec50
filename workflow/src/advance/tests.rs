//! Tests of the transition that each outcome gives. This file: a run begins, and the model answers.

mod results;
mod stop;

use super::*;
use crate::agent::{JournalLevel, OnEmptyReply, OnUncertain};
use crate::blob::Blob;
use crate::context;
use crate::derive;
use crate::derive::NewDelivery;
use crate::event::Event;
use crate::example::{
    self, EARLIER_RUN, RUN, USAGE, assistant, message, outcome, row, session, settled, tool_call, turn, user,
};
use crate::fault::Fault;
use crate::generation::InterruptedCall;
use crate::record::{Block, FinishReason, Role, ToolCall};
use crate::session::CallStatus;
use crate::session::{InboxMessage, Run};
use crate::state::State;
use crate::wire;
use serde_json::{Value, json};

const TELL: AgentPolicy = AgentPolicy {
    on_uncertain: OnUncertain::TellModel,
    journal: JournalLevel::Full,
    on_empty_reply: OnEmptyReply::AskAgain,
};
const ASK: AgentPolicy = AgentPolicy { on_uncertain: OnUncertain::NeedsAttention, ..TELL };
const SNAPSHOTS: AgentPolicy = AgentPolicy { journal: JournalLevel::Checkpoint, ..TELL };

fn text(text: &str) -> Block {
    Block::Text { text: text.to_owned() }
}

fn reply_of(content: Vec<Block>) -> Performed {
    let finish_reason = FinishReason::Stop;
    Performed::Replied(Generated {
        generation_id: "gen_2".into(),
        attempt: 2,
        model: "scripted/m".into(),
        request_sha256: "00".into(),
        started_at: Some("2026-01-01T00:00:02+00:00".into()),
        repairs: 1,
        resumes: None,
        prefill_bytes: None,
        context_strategy: Strategy::Full,
        rebase: None,
        reply: Reply { content, finish_reason, usage: USAGE },
        effects: BTreeMap::from([("tool".to_owned(), Effect::Idempotent)]),
    })
}

fn asks(ids: &[&str]) -> Performed {
    reply_of(ids.iter().map(|id| Block::ToolCall(tool_call(id))).collect())
}

fn called(endings: Vec<(&str, CallEnd)>) -> Performed {
    let one = |(id, ending)| EndedCall { call: tool_call(id), ending };
    Performed::Called(endings.into_iter().map(one).collect())
}

fn done() -> CallEnd {
    CallEnd::Settled(CallStatus::Done, outcome("done"))
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

/// Returns id, status and message number of the result, for each ledger row that changes.
fn closed(transition: &Transition) -> Vec<(&str, CallStatus, Option<i64>)> {
    let row = |call: &'_ crate::session::CallUpdate| (call.status, call.message_number);
    transition.call_updates.iter().map(|call| (call.call_id.as_str(), row(call).0, row(call).1)).collect()
}

fn with_inbox(session: Session, inbox: &[InboxMessage]) -> Session {
    Session { inbox: inbox.to_vec(), ..session }
}

#[test]
fn a_run_begins_with_a_journal_entry_and_nothing_else() {
    let session = Session { status: SessionStatus::Queued, ..session() };
    let begun = advance(&session, Performed::Begun, TELL);
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
fn limits_count_from_the_newest_answer() {
    let used = |session: &Session| session.run.as_ref().map(|run| (run.steps, run.tokens));
    let mut session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    session.apply(&advance(&session, called(vec![("a", done())]), TELL));
    let step = USAGE.input_tokens + USAGE.output_tokens;
    assert_eq!(used(&session), Some((1, step)));
    // Some servers say "stop" beside a call, which is no answer.
    let asked = advance(&session, asks(&["b"]), TELL);
    assert_eq!(asked.records[0].details.finish_reason, Some(FinishReason::ToolCalls));
    session.apply(&asked);
    let refused = CallEnd::Settled(CallStatus::Failed, outcome("There is no such tool."));
    session.apply(&advance(&session, called(vec![("b", refused)]), TELL));
    assert_eq!(used(&session), Some((2, 2 * step)));
    let session = with_inbox(session, &[message(7, "And then?")]);
    let mut answered = session.clone();
    answered.apply(&advance(&session, reply_of(vec![text("Then that.")]), TELL).continuing());
    assert_eq!(used(&answered), Some((0, 0)));
}

#[test]
fn an_empty_reply_is_asked_about_once_for_each_message_of_a_person() {
    let empty = |session: &Session| advance(session, reply_of(vec![]), TELL);
    let mut session = session();
    assert!(empty(&session).records[1].details.asks_again);
    session.apply(&empty(&session));
    // Calls between them change nothing: each request to answer again begins the limits anew.
    let mut called_since = session.clone();
    called_since.apply(&advance(&called_since, asks(&["b"]), TELL));
    called_since.apply(&advance(&called_since, called(vec![("b", done())]), TELL));
    for session in [&session, &called_since] {
        let unanswered = empty(session);
        let close = closing(&unanswered);
        assert_eq!(close.status, SessionStatus::Failed, "that was the second one, and a person waits");
        assert!(close.error.as_ref().unwrap().contains("Remedy: "));
        assert_eq!(close.failure.as_ref().unwrap().kind, "empty_reply");
        assert!(unanswered.records.last().unwrap().details.asks_again, "a retry asks the model once more");
        let mut of_a_program = session.clone();
        of_a_program.trigger_type = "api".to_owned();
        assert_eq!(closing(&empty(&of_a_program)).status, SessionStatus::Completed, "nobody waits");
    }
    let mut mailed = session.clone();
    mailed.apply(&advance(&mailed, asks(&["b"]), TELL));
    let mut sent = outcome("Sent.");
    sent.details =
        Some(serde_json::json!({"type": "sentEmail", "to": ["a@b.c"], "subject": "Hi", "body": "x"}));
    let sent = CallEnd::Settled(CallStatus::Done, sent);
    mailed.apply(&advance(&mailed, called(vec![("b", sent)]), TELL));
    assert_eq!(closing(&empty(&mailed)).status, SessionStatus::Completed, "the mail is the answer");
    let heard = with_inbox(session, &[message(7, "Well?")]);
    assert!(empty(&heard).records.last().unwrap().details.asks_again, "a person asks something new");
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
    // Two user messages in a row. One protocol merges them, the other does not.
    let mut session = session();
    session.records.push(user(3, "hello?"));
    session.last_message_number = 3;
    let stored = serde_json::to_string(&session.records).unwrap();
    let context = context::full(&session, Vec::new());
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
    assert_eq!(told(0), [json!(null), json!(0), json!("2026-01-01T00:00:01+00:00")], "it was interrupted");
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
        let stopped = advance(&session, Performed::Stopped(stop), TELL);
        let call = ["LLM_CALLED", "GEN_START"];
        let wanted = [call.as_slice(), &["GEN_RESUMED"], &call, &["GEN_FAILED"]].concat();
        assert_eq!(names(&stopped.events), wanted);
        let failed =
            Event::GenFailed { generation_id: "gen_2".into(), reason: reason.into(), estimated: None };
        assert_eq!(stopped.events[5], failed, "the first one was repeated by the second");
    }
}

#[test]
fn each_attempt_names_the_one_that_followed_it_and_how() {
    // The second attempt was interrupted before any chunk, so the third replaced it. The fourth resumes the
    // third's text.
    let interrupted = vec![
        example::interrupted("gen_1", 1, 2),
        InterruptedCall { resumes: Some("gen_1".into()), ..example::interrupted("gen_2", 2, -1) },
        example::interrupted("gen_3", 3, 0),
    ];
    let session = Session { interrupted, ..session() };
    let Performed::Replied(generated) = reply_of(vec![text("Hi.")]) else { panic!("a reply") };
    let generated =
        Generated { generation_id: "gen_4".into(), resumes: Some("gen_3".into()), repairs: 2, ..generated };
    let replied = advance(&session, Performed::Replied(generated), TELL);
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
    let ended = CallEnd::Settled(
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
    let failed = advance(&session, Performed::Stopped(Stop::Failed(fault)), TELL);
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
