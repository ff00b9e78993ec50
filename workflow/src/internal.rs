//! Internal messages: an agent's own bookkeeping. They stay in the transcript and the model sees them, but
//! readers of the replies do not.

use crate::derive;
use crate::mail::plain_address;
use crate::record::{Block, Role, ToolResult, text_of};
use crate::session::Session;
use serde_json::Value;

/// Returns whether `content`, as the model's reply in `session`, only comments on an email that the model
/// has just composed. If the session replies by mail, that email was the reply, and the comment would be a
/// second one. If anything was said since, the new reply is about that and is not a comment.
pub fn is_remark(session: &Session, content: &[Block]) -> bool {
    if !session.replies_by_mail() || !session.inbox.is_empty() || text_of(content).trim().is_empty() {
        return false;
    }
    let said = session.records.iter().rev().filter(|record| !record.internal);
    let results = said.take_while(|record| record.role == Role::Tool);
    let mut composed = false;
    for record in results {
        // A user's answer to a question is a result too.
        if record.details.inbox_id.is_some() {
            return false;
        }
        composed |=
            record.tool_results().any(|result| derive::composes_email(result) && answers(session, result));
    }
    composed
}

/// Returns whether a composed mail goes to a recipient of the session's replies, and so was the reply. If it
/// goes only to others, the person who wrote still needs a reply.
fn answers(session: &Session, composed: &ToolResult) -> bool {
    let route = session.policy.reply.as_ref().filter(|route| derive::is_mail(&route.channel));
    let Some(route) = route else { return true };
    let addresses = |list: &Value| -> Vec<String> {
        let texts = list.as_array().into_iter().flatten().filter_map(Value::as_str);
        texts.map(|text| plain_address(text).to_ascii_lowercase()).collect()
    };
    let asked = addresses(&route.to["to"]);
    let details = composed.details.as_ref().unwrap_or(&Value::Null);
    addresses(&details["to"]).iter().chain(&addresses(&details["cc"])).any(|one| asked.contains(one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advance::{Generated, Performed, advance};
    use crate::agent::AgentPolicy;
    use crate::example::{self, RUN, assistant, message, tool_call, user};
    use crate::record::{FinishReason, Record, Reply};
    use crate::strategy::Strategy;
    use serde_json::json;

    /// A session with this trigger type, whose last step composed an email.
    fn after_an_email(trigger_type: &str) -> Session {
        let mut session = example::session();
        session.trigger_type = trigger_type.to_owned();
        session.records.push(assistant(3, RUN, vec![Block::ToolCall(tool_call("call_1"))]));
        session.records.push(result(4, "sentEmail", false));
        session.last_message_number = 4;
        session
    }

    fn result(message_number: i64, details: &str, is_error: bool) -> Record {
        let mut record = example::result(message_number, "call_1");
        let Block::ToolResult(result) = &mut record.content.to_mut()[0] else { panic!("a result") };
        result.details = Some(json!({"type": details, "to": ["ann@example.com"], "subject": "Hi"}));
        result.is_error = is_error;
        record
    }

    fn text(text: &str) -> Vec<Block> {
        vec![Block::Text { text: text.to_owned() }]
    }

    /// For each record that the answer's commit writes: whether it is internal.
    fn marks(session: &Session, content: Vec<Block>) -> Vec<bool> {
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
            reply: Reply { content, finish_reason: FinishReason::Stop, usage: example::USAGE },
            effects: Default::default(),
        };
        let transition = advance(session, Performed::Replied(generated), AgentPolicy::default());
        transition.records.iter().map(|record| record.internal).collect()
    }

    #[test]
    fn after_mail_to_somebody_else_the_answer_still_goes_to_whoever_wrote() {
        for (to, internal) in
            [("ann@example.com", true), ("Ann <Ann@Example.com>", true), ("bob@example.com", false)]
        {
            let mut session = after_an_email("email");
            let to = json!({"to": [to]});
            session.policy.reply =
                Some(crate::policy::ReplyRoute { channel: "email".into(), to, split_at: None });
            assert_eq!(marks(&session, text("It is on its way.")), [internal]);
        }
    }

    #[test]
    fn what_is_said_of_an_email_is_internal_where_replies_go_out_as_mail_and_nowhere_else() {
        for (trigger_type, internal) in [
            ("email", true),
            ("cron", true),
            ("herald", true),
            ("chat", false),
            ("message", false),
            ("api", false),
        ] {
            let session = after_an_email(trigger_type);
            assert_eq!(marks(&session, text("I have written to Ann.")), [internal], "{trigger_type}");
        }
        let mut fork = after_an_email("fork");
        fork.policy.replies_as = Some("email".to_owned());
        assert_eq!(marks(&fork, text("I have written to Ann.")), [true], "as its source");

        let email = after_an_email("email");
        let mut two = text("Now the file.");
        two.push(Block::ToolCall(tool_call("call_2")));
        assert_eq!(marks(&email, two), [true]);
        assert_eq!(marks(&email, vec![Block::ToolCall(tool_call("call_2"))]), [false], "it says nothing");
    }

    #[test]
    fn what_does_not_follow_an_email_is_for_its_reader() {
        let answer = || text("Here you are.");
        let mut session = after_an_email("email");
        session.records[2] = result(4, "sentEmail", true);
        assert_eq!(marks(&session, answer()), [false], "none was composed");
        session.records[2] = result(4, "fileWritten", false);
        assert_eq!(marks(&session, answer()), [false], "another tool");

        let mut session = after_an_email("email");
        session.inbox.push(message(1, "And Bob?"));
        assert_eq!(marks(&session, answer()), [false, false], "it answers the message");
        let mut session = after_an_email("email");
        session.records.push(user(5, "And Bob?"));
        assert_eq!(marks(&session, answer()), [false], "it answers the message");
        let mut session = after_an_email("email");
        session.records.push(example::result(5, "call_2"));
        assert_eq!(marks(&session, answer()), [true], "a turn with another call beside it");
        session.records[3].details.inbox_id = Some(1);
        assert_eq!(marks(&session, answer()), [false], "the user answered a question");

        let mut session = after_an_email("email");
        session.records.push(assistant(5, RUN, vec![Block::ToolCall(tool_call("call_2"))]));
        session.records.push(example::result(6, "call_2"));
        assert_eq!(marks(&session, answer()), [false], "a step lies between");
    }

    #[test]
    fn a_record_that_is_internal_itself_says_nothing_to_the_model() {
        let mut session = after_an_email("email");
        session.records.push(Record { internal: true, ..user(5, "a summary") });
        assert_eq!(marks(&session, text("I have written to Ann.")), [true]);
    }
}
