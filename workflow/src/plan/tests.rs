//! Tests of everything that a session can owe, and of the order in which it is planned.

use super::*;
use crate::example::{message, outcome, result, row, session, settled, tool_call, turn, turn_of_earlier_run};
use crate::session::{Call, InboxMessage};

const LIMITS: Limits = Limits { steps: 3, tokens: 100, attempts: 5, outage_ms: 1000, tool_s: 1 };
const EFFECTS: [Effect; 3] = [Effect::Pure, Effect::Idempotent, Effect::Guarded];

fn planned(session: &Session) -> Action {
    plan(session, &LIMITS)
}

/// Returns the plan for each call of the open turn, with the call's id.
fn hows(session: &Session) -> Vec<(String, How)> {
    match planned(session) {
        Action::CallTools { calls } => {
            calls.into_iter().map(|one| (one.call.call_id.into_string(), one.how)).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the plan for the only call of an open turn.
fn how_of(row: Call, earlier_run: bool, inbox: &[InboxMessage]) -> Option<How> {
    let rows = vec![row];
    let mut session = if earlier_run { turn_of_earlier_run(rows) } else { turn(rows) };
    session.inbox = inbox.to_vec();
    match planned(&session) {
        Action::Pause => None,
        Action::CallTools { calls } => Some(calls[0].how.clone()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_session_that_is_not_open_rests_whatever_it_owes() {
    for status in SessionStatus::ALL.into_iter().filter(|status| !status.is_open()) {
        let mut session = turn(vec![row("a", Effect::Guarded, CallStatus::Started)]);
        session.status = status;
        session.cancel_requested = true;
        session.inbox = vec![message(1, "hi")];
        assert_eq!(planned(&session), Action::Rest, "{status:?}");
    }
}

#[test]
fn a_session_without_an_open_run_rests() {
    for status in [SessionStatus::Queued, SessionStatus::Running] {
        let session = Session { run: None, status, ..session() };
        assert_eq!(planned(&session), Action::Rest);
    }
}

#[test]
fn a_cancel_comes_before_everything_else_that_is_owed() {
    for status in [SessionStatus::Queued, SessionStatus::Running] {
        let mut session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
        session.status = status;
        session.cancel_requested = true;
        session.inbox = vec![message(1, "hi")];
        assert_eq!(planned(&session), Action::Stop(Stop::Cancelled), "{status:?}");
    }
}

#[test]
fn a_queued_run_begins_before_its_first_call() {
    let session = Session { status: SessionStatus::Queued, ..session() };
    assert_eq!(planned(&session), Action::Begin);
    let mut resumed = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    resumed.status = SessionStatus::Queued;
    assert_eq!(planned(&resumed), Action::Begin);
}

#[test]
fn what_the_ledger_proves_decides_what_may_be_done_about_a_call() {
    use CallStatus::{Abandoned, Done, Failed, Invoked, Started, Uncertain};
    let unknown = || How::Uncertain { known: false };
    // status, effect, what its own run does, what a later run does
    let table = [
        (Invoked, Effect::Pure, How::Run, How::Abandon),
        (Invoked, Effect::Idempotent, How::Run, How::Abandon),
        (Invoked, Effect::Guarded, How::Run, How::Abandon),
        (Started, Effect::Pure, How::Run, unknown()),
        (Started, Effect::Idempotent, How::Run, unknown()),
        (Started, Effect::Guarded, unknown(), unknown()),
        // Settled without an outcome: Wakeful never writes such rows, so their calls never run.
        (Done, Effect::Pure, unknown(), unknown()),
        (Done, Effect::Idempotent, unknown(), unknown()),
        (Done, Effect::Guarded, unknown(), unknown()),
        (Failed, Effect::Pure, unknown(), unknown()),
        (Failed, Effect::Idempotent, unknown(), unknown()),
        (Failed, Effect::Guarded, unknown(), unknown()),
    ];
    for (status, effect, own, later) in table {
        assert_eq!(how_of(row("a", effect, status), false, &[]), Some(own), "{status:?} {effect:?}");
        assert_eq!(how_of(row("a", effect, status), true, &[]), Some(later), "{status:?} {effect:?} later");
    }
    for effect in EFFECTS {
        for later in [false, true] {
            let known = How::Uncertain { known: true };
            assert_eq!(how_of(row("a", effect, Uncertain), later, &[]), Some(known), "{effect:?}");
            assert_eq!(how_of(row("a", effect, Abandoned), later, &[]), Some(How::Abandon), "{effect:?}");
        }
    }
}

#[test]
fn what_settled_before_is_used_again_in_every_run() {
    for status in [CallStatus::Done, CallStatus::Failed, CallStatus::Uncertain] {
        for later in [false, true] {
            let reuse = How::Reuse(status, outcome("settled before"));
            assert_eq!(how_of(settled("a", status), later, &[]), Some(reuse), "{status:?}");
        }
    }
}

#[test]
fn a_call_without_a_ledger_row_never_runs() {
    for mut session in [turn(Vec::new()), turn_of_earlier_run(Vec::new())] {
        let content = vec![crate::record::Block::ToolCall(tool_call("a"))];
        session.records.last_mut().unwrap().content = content.into();
        assert_eq!(hows(&session), [("a".to_owned(), How::Abandon)]);
    }
}

#[test]
fn a_question_waits_and_the_oldest_message_is_its_answer() {
    for later in [false, true] {
        let question = || row("q", Effect::Pure, CallStatus::Waiting);
        assert_eq!(how_of(question(), later, &[]), None);
        let answer = How::Answer { inbox_id: 4, text: "blue".into() };
        assert_eq!(how_of(question(), later, &[message(4, "blue"), message(5, "no, red")]), Some(answer));
    }
}

#[test]
fn a_call_that_waits_for_approval_is_planned_when_it_has_it_and_never_by_a_later_run() {
    for effect in EFFECTS {
        let row = || row("a", effect, CallStatus::Unapproved);
        assert_eq!(how_of(row(), false, &[message(4, "go on")]), None, "a message is no approval");
        assert_eq!(how_of(row(), true, &[]), Some(How::Abandon));
        assert_eq!(planned(&turn(vec![row()])), Action::Pause);
    }
    let session = turn(vec![
        row("a", Effect::Guarded, CallStatus::Unapproved),
        row("b", Effect::Pure, CallStatus::Invoked),
    ]);
    assert_eq!(hows(&session), [("b".to_owned(), How::Run)], "the others run");
}

#[test]
fn calls_beside_an_open_question_are_planned_without_it() {
    let session = turn(vec![
        row("q", Effect::Pure, CallStatus::Waiting),
        row("a", Effect::Guarded, CallStatus::Uncertain),
    ]);
    assert_eq!(hows(&session), [("a".to_owned(), How::Uncertain { known: true })]);
}

#[test]
fn of_parallel_calls_only_the_unanswered_are_planned_in_the_order_asked() {
    let mut session = turn(vec![
        row("c", Effect::Pure, CallStatus::Invoked),
        row("a", Effect::Pure, CallStatus::Invoked),
        row("b", Effect::Guarded, CallStatus::Started),
    ]);
    // The newest record is a result, but two calls are still open.
    session.records.push(result(4, "a"));
    session.calls.retain(|call| call.call_id.as_str() != "a");
    assert_eq!(
        hows(&session),
        [("c".to_owned(), How::Run), ("b".to_owned(), How::Uncertain { known: false })]
    );
}

#[test]
fn an_open_turn_comes_before_messages_and_limits() {
    let mut session = turn(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    session.inbox = vec![message(1, "hi")];
    session.run.as_mut().unwrap().steps = LIMITS.steps;
    session.run.as_mut().unwrap().tokens = LIMITS.tokens;
    assert_eq!(hows(&session), [("a".to_owned(), How::Run)]);
}

#[test]
fn an_open_turn_is_found_behind_messages_that_came_later() {
    let mut session = turn_of_earlier_run(vec![row("a", Effect::Pure, CallStatus::Invoked)]);
    session.records.push(crate::example::user(4, "go on"));
    assert_eq!(hows(&session), [("a".to_owned(), How::Abandon)]);
}

#[test]
fn the_model_owes_an_answer_to_a_user_a_result_and_a_message_that_waits() {
    assert_eq!(planned(&session()), Action::CallModel);
    let mut answered = turn(vec![]);
    answered.records.push(result(4, "a"));
    assert_eq!(planned(&answered), Action::CallModel);
    let mut replied = turn(vec![]);
    assert_eq!(planned(&replied), Action::Stop(Stop::Finished));
    replied.inbox = vec![message(1, "and?")];
    assert_eq!(planned(&replied), Action::CallModel);
}

#[test]
fn a_run_that_owes_nothing_is_finished_even_at_its_limits() {
    let mut session = turn(vec![]);
    session.run.as_mut().unwrap().steps = LIMITS.steps;
    assert_eq!(planned(&session), Action::Stop(Stop::Finished));
    session.records.clear();
    assert_eq!(planned(&session), Action::Stop(Stop::Finished));
}

#[test]
fn limits_are_reached_and_not_passed() {
    let failed = |fault| Action::Stop(Stop::Failed(fault));
    let (steps, tokens) = (Fault::StepLimit { limit: 3 }, Fault::TokenLimit { limit: 100 });
    // steps, tokens, what is planned
    let table = [
        (2, 99, Action::CallModel),
        (3, 0, failed(steps.clone())),
        (4, 0, failed(steps.clone())),
        (0, 100, failed(tokens)),
        (3, 100, failed(steps)),
    ];
    for (steps, tokens, wanted) in table {
        let mut session = session();
        let run = session.run.as_mut().unwrap();
        (run.steps, run.tokens) = (steps, tokens);
        assert_eq!(planned(&session), wanted, "{steps} steps, {tokens} tokens");
    }
}
