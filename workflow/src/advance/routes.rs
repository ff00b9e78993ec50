//! Tests of which messages a commit sends by the session's reply route.

use super::Transition;
use super::{CallEnd, EndedCall, Generated, Next, Performed, advance};
use crate::agent::AgentPolicy;
use crate::example::{self, RUN, assistant, tool_call};
use crate::policy::{ReplyRoute, SessionPolicy, ToolMode};
use crate::record::{Attachment, Block, FinishReason, Reply};
use crate::session::{CallOutcome, CallStatus, InboxMessage, Session, SessionStatus};
use crate::strategy::Strategy;
use serde_json::json;

fn routed() -> Session {
    let mut session = example::session();
    let to = json!({"channel": "C1"});
    session.policy.reply = Some(ReplyRoute { channel: "slack".into(), to, split_at: Some(8) });
    session
}

fn says(session: &Session, text: &str) -> Transition {
    ends(session, text, FinishReason::Stop)
}

fn ends(session: &Session, text: &str, finish_reason: FinishReason) -> Transition {
    let generated = Generated {
        generation_id: "gen_1".into(),
        attempt: 1,
        model: "m".into(),
        request_sha256: String::new(),
        started_at: None,
        repairs: 0,
        resumes: None,
        prefill_bytes: None,
        context_strategy: Strategy::Full,
        rebase: None,
        reply: Reply {
            content: vec![Block::Text { text: text.into() }],
            finish_reason,
            usage: example::USAGE,
        },
        effects: Default::default(),
    };
    advance(session, Performed::Replied(generated), AgentPolicy::default())
}

#[test]
fn a_reply_leaves_by_its_route_in_parts_with_the_commit_that_says_it() {
    let out = says(&routed(), "Hello you there").deliveries;
    let sent: Vec<_> =
        out.iter().map(|one| (one.source_key.as_str(), one.content["text"].as_str().unwrap())).collect();
    assert_eq!(sent, [("reply/3/1", "Hello"), ("reply/3/2", "you"), ("reply/3/3", "there")]);
    assert!(out.iter().all(|one| one.channel == "slack" && one.content["to"] == json!({"channel": "C1"})));
    // A close that turns into a continuation still sends the reply.
    assert_eq!(says(&routed(), "Hello").continuing().deliveries.len(), 1);
}

#[test]
fn a_run_whose_answer_the_provider_withheld_fails_with_a_remedy_and_is_not_asked_for_again() {
    let mut of_a_program = routed();
    of_a_program.trigger_type = "api".to_owned();
    // Also after a mail: an operator is to learn what the provider withheld, as with the built-in providers.
    for session in [routed(), of_a_program, has_mailed()] {
        let withheld = ends(&session, " ", FinishReason::ContentFilter);
        assert!(withheld.deliveries.is_empty());
        assert!(withheld.step.is_some(), "it is paid for");
        assert!(withheld.records.last().unwrap().details.asks_again, "a retry asks the model once more");
        let Next::Close(close) = withheld.next else { panic!("the run ends") };
        assert_eq!(close.status, SessionStatus::Failed);
        let error = close.error.unwrap();
        assert!(error.contains("the provider withheld the whole answer. Remedy: "), "{error}");
        assert_eq!(close.failure.unwrap().kind, "refused");
    }
    let cut = ends(&routed(), "Hel", FinishReason::ContentFilter);
    assert_eq!(cut.status(), Some(SessionStatus::Completed), "what is there of an answer is sent");
    assert_eq!(ends(&routed(), "", FinishReason::Stop).status(), None, "any other empty answer is, once");
}

#[test]
fn without_a_route_or_in_a_rehearsal_nothing_leaves() {
    assert!(says(&example::session(), "Hello").deliveries.is_empty());
    let mut dry = routed();
    dry.policy = SessionPolicy { tool_mode: ToolMode::Dry, ..dry.policy };
    assert!(says(&dry, "Hello").deliveries.is_empty());
}

/// A session whose run has mailed somebody.
fn has_mailed() -> Session {
    let mut session = routed();
    session.trigger_type = "email".to_owned();
    session.records.push(assistant(3, RUN, vec![Block::ToolCall(tool_call("call_1"))]));
    let mut result = example::result(4, "call_1");
    let Block::ToolResult(inner) = &mut result.content.to_mut()[0] else { panic!("a result") };
    inner.details = Some(json!({"type": "sentEmail", "to": ["ann@example.com"], "subject": "Hi"}));
    session.records.push(result);
    session.last_message_number = 4;
    session
}

#[test]
fn a_remark_on_mail_that_was_composed_does_not_leave() {
    assert!(says(&has_mailed(), "Sent.").deliveries.is_empty());
}

/// Returns the transition of a session whose model asked for `call_1` and whose call ended as `ending`.
fn called(mut session: Session, ending: CallEnd) -> Transition {
    session.records.push(assistant(3, RUN, vec![Block::ToolCall(tool_call("call_1"))]));
    session.last_message_number = 3;
    let performed = EndedCall { call: tool_call("call_1"), ending };
    advance(&session, Performed::Called(vec![performed]), AgentPolicy::default())
}

#[test]
fn a_question_leaves_by_the_route_unless_its_answer_is_there() {
    let out = called(routed(), CallEnd::Asked("Red?".into())).deliveries;
    assert_eq!((out.len(), out[0].source_key.as_str()), (1, "question/call_1/1"));
    let mut answered = routed();
    answered.inbox.push(example::message(9, "Red."));
    assert!(called(answered, CallEnd::Asked("Red?".into())).deliveries.is_empty());
}

#[test]
fn composed_mail_is_told_which_mail_its_session_answers() {
    let mut session = routed();
    let to = json!({"in_reply_to": "<a@example.com>"});
    session.policy.reply = Some(ReplyRoute { channel: "email".into(), to: to.clone(), split_at: None });
    let details = json!({"type": "sentEmail", "to": ["a@example.com"], "subject": "Re", "body": "b"});
    let outcome = CallOutcome { content: "queued".into(), is_error: false, details: Some(details) };
    let out = called(session, CallEnd::Settled(CallStatus::Done, outcome)).deliveries;
    assert_eq!((out[0].channel.as_str(), &out[0].content["thread"]), ("email", &to));
}

#[test]
fn files_stay_with_the_message_they_came_with() {
    let file = Attachment {
        file_name: "a.txt".into(),
        media_type: "text/plain".into(),
        bytes: 1,
        sha256: "0".repeat(64),
    };
    let mut session = example::session();
    session.inbox.push(InboxMessage { inbox_id: 9, text: "look".into(), attachments: vec![file.clone()] });
    let said = says(&session, "Hello");
    assert_eq!(said.records[0].details.attachments, std::slice::from_ref(&file));
    let answer = CallEnd::Answered { inbox_id: 9, text: "look".into() };
    assert_eq!(called(session, answer).records[0].details.attachments, [file]);
}
