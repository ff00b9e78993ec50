//! Examples of what each strategy selects.

use super::*;
use crate::example;
use crate::record::{Block, Record, Role, ToolResult};
use crate::session::{InboxMessage, Session};
use crate::strategy::{ContextPolicy, Rebase, Strategy};
use serde_json::json;

/// A session with these messages: `u` is a user message, `a` an answer, `t` an answer that asks for a call,
/// and its result, `w` the same with a user message in between.
fn session(script: &str, result_bytes: usize) -> Session {
    let mut session = Session { records: Vec::new(), last_message_number: 1, ..example::session() };
    let mut push = |mut record: Record| {
        session.last_message_number += 1;
        record.message_number = session.last_message_number;
        session.records.push(record);
    };
    for (index, kind) in script.chars().enumerate() {
        match kind {
            'u' => push(example::user(0, &format!("question {index}"))),
            'a' => push(example::assistant(
                0,
                example::RUN,
                vec![Block::Text { text: format!("answer {index}") }],
            )),
            't' | 'w' => {
                let id = format!("call_{index}");
                push(example::assistant(0, example::RUN, vec![Block::ToolCall(example::tool_call(&id))]));
                if kind == 'w' {
                    push(example::user(0, &format!("question {index}")));
                }
                let mut result = example::result(0, &id);
                if let Block::ToolResult(one) = &mut result.content.to_mut()[0] {
                    one.content = "r".repeat(result_bytes);
                }
                push(result);
            }
            other => panic!("{other}"),
        }
    }
    session
}

fn policy(strategy: Strategy) -> ContextPolicy {
    ContextPolicy { strategy, high: 6, low: 4, keep_results: 2, trim_at_bytes: 3_000, compact_at_percent: 80 }
}

fn built(session: &Session, strategy: Strategy) -> Built {
    build(session, Vec::new(), &policy(strategy), 1_000_000)
}

#[test]
fn a_window_grows_to_its_high_mark_and_is_cut_to_its_low_one_at_the_users_message() {
    let table = [
        ("uauaua", None, "it may have six"),
        ("uauauau", Some((6, None)), "seven: cut to three, for the fourth is no question"),
        ("uttt", Some((5, Some(2))), "within one long turn: its question stays"),
        ("utttttt", Some((11, Some(2))), "four of its messages"),
        ("uauattt", Some((8, Some(4))), "the question of the turn stays, not the first one"),
        ("uwwww", Some((12, Some(10))), "a message between a call and its result begins nothing"),
    ];
    for (script, expected, why) in table {
        let session = session(script, 10);
        let found = built(&session, Strategy::SlidingWindow).rebase;
        let found = found.map(|rebase| (rebase.keep_from_message_number, rebase.user_messages_from));
        assert_eq!(found, expected, "{script}: {why}");
    }
}

/// An operator's yes, or a new run, may come after a user's message. Then the log has the message between the call and the
/// result.
#[test]
fn a_result_is_shown_right_after_its_call_whatever_was_said_in_between() {
    let mut session = session("uw", 10);
    // A reply with two calls: one has its result, the other waits.
    let two = ["call_a", "call_b"].map(|id| Block::ToolCall(example::tool_call(id)));
    session.records.extend([
        example::assistant(6, example::RUN, two.to_vec()),
        example::result(7, "call_a"),
        example::user(8, "Are you there?"),
        example::user(9, "Hello?"),
        example::result(10, "call_b"),
    ]);
    session.last_message_number = 10;
    let numbers: Vec<i64> = numbered(&session, None).into_iter().flatten().collect();
    assert_eq!(numbers, [2, 3, 5, 4, 6, 7, 10, 8, 9]);
    let roles: Vec<Role> = full(&session, Vec::new()).messages.iter().map(|message| message.role).collect();
    use Role::{Assistant, Tool, User};
    assert_eq!(roles, [User, Assistant, Tool, User, Assistant, Tool, Tool, User, User]);
}

#[test]
fn what_waits_in_the_inbox_counts_and_is_never_cut() {
    let mut session = session("uauau", 0);
    session.inbox = (0..2)
        .map(|id| InboxMessage { inbox_id: id, text: format!("more {id}"), attachments: Vec::new() })
        .collect();
    let built = built(&session, Strategy::SlidingWindow);
    let rebase = built.rebase.expect("five and two are more than six");
    assert_eq!((rebase.at_message_number, rebase.keep_from_message_number), (8, 6));
    assert_eq!(built.context.messages.len(), 3);
}

#[test]
fn old_results_become_a_line_and_the_newest_and_the_errors_stay() {
    let mut session = session("uttttu", 2_000);
    let is_error = |record: &mut Record| {
        if let Block::ToolResult(result) = &mut record.content.to_mut()[0] {
            result.is_error = true;
        }
    };
    is_error(&mut session.records[2]);
    let calm = built(&session, Strategy::TrimToolResults);
    assert_eq!(calm.rebase, None, "but for the error there is one old result of 2,000 bytes");
    let mut longer = self::session("utttttu", 2_000);
    is_error(&mut longer.records[2]);
    let trimmed = built(&longer, Strategy::TrimToolResults);
    assert_eq!(trimmed.rebase.as_ref().and_then(|rebase| rebase.trim_results_before), Some(10));
    let shown: Vec<(usize, bool)> = trimmed
        .context
        .messages
        .iter()
        .filter_map(|message| match &message.content[0] {
            Block::ToolResult(result) => Some((result.content.len(), result.is_error)),
            _ => None,
        })
        .collect();
    assert_eq!(shown.iter().map(|one| one.1).collect::<Vec<_>>(), [true, false, false, false, false]);
    assert_eq!(shown[0].0, 2_000, "an error stays");
    assert!(shown[1].0 < 200 && shown[2].0 < 200, "{shown:?}");
    assert_eq!((shown[3].0, shown[4].0), (2_000, 2_000), "the newest two stay");
}

#[test]
fn the_line_says_the_size_and_how_to_read_it_again_where_that_can_be_done() {
    let mut session = session("uttttt", 2_000);
    let line =
        |session: &Session| match &built(session, Strategy::TrimToolResults).context.messages[2].content[0] {
            Block::ToolResult(ToolResult { content, .. }) => content.clone(),
            other => panic!("{other:?}"),
        };
    assert!(line(&session).contains("2000 bytes") && line(&session).contains("Call the tool again"));
    let reader = crate::agent::ToolDefinition {
        name: crate::record::READ_OUTPUT.into(),
        description: String::new(),
        parameters: json!({"type": "object"}),
        effect: crate::effect::Effect::Pure,
    };
    session.prefix = Some(crate::prefix::Prefix { system: String::new(), tools: vec![reader].into() });
    assert!(line(&session).contains("read_output and the call_id \"call_1\""), "{}", line(&session));
}

#[test]
fn full_takes_back_what_another_strategy_left_out() {
    let mut session = session("uauauaua", 0);
    session.rebase = built(&session, Strategy::SlidingWindow).rebase;
    assert!(session.rebase.is_some());
    let full = built(&session, Strategy::Full);
    assert_eq!(full.context, super::full(&session, Vec::new()));
    assert_eq!(full.rebase, Some(Rebase::nothing(Strategy::Full, 9)));
    session.rebase = full.rebase;
    assert_eq!(built(&session, Strategy::Full).rebase, None, "once");
}

fn summarised(script: &str, window: i64) -> (Session, Rebase) {
    let mut session = session(script, 100);
    let rebase = compaction::rebase(&session, &[], window);
    session.last_message_number += 1;
    let mut summary = example::assistant(
        session.last_message_number,
        example::RUN,
        vec![Block::Text { text: compaction::text("They met.", &session.state) }],
    );
    summary.details.summary = true;
    session.records.push(summary);
    session.rebase = Some(rebase.clone());
    (session, rebase)
}

#[test]
fn a_summary_stands_first_and_the_users_words_and_the_newest_turns_stay() {
    // The example session has 10 tokens for 55 bytes, so ten percent of the window are 27 bytes of the newest
    // turns.
    let (session, rebase) = summarised("uauaua", 50);
    assert_eq!((rebase.at_message_number, rebase.summary_message_number), (8, Some(8)));
    let context = built(&session, Strategy::Compaction).context;
    let said: Vec<(Role, String)> = context
        .messages
        .iter()
        .map(|message| (message.role, crate::record::text_of(&message.content)))
        .collect();
    assert_eq!(said[0].0, Role::User);
    assert!(
        said[0].1.starts_with("[Summary of the conversation so far.") && said[0].1.ends_with("They met.")
    );
    let rest: Vec<&str> = said[1..].iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(rest, ["question 0", "question 2", "answer 3", "question 4", "answer 5"]);
    assert!(!session.awaits_model(), "a summary asks for no answer, and the last answer was given");
}

#[test]
fn a_summary_awaits_nothing_and_hides_no_question() {
    let (session, rebase) = summarised("uau", 10);
    assert!(session.awaits_model(), "the question before the summary is still open");
    assert_eq!(rebase.keep_from_message_number, 5, "no turn fits");
    assert_eq!(rebase.user_messages_from, Some(4), "the newest question stays, however long");
    let context = built(&session, Strategy::Compaction).context;
    assert_eq!(context.messages.len(), 2);
    assert!(session.open_turn().is_none());
}

#[test]
fn no_summary_is_written_twice_without_an_answer_between_nor_after_three_failures() {
    let policy = policy(Strategy::Compaction);
    let (mut summed, _) = summarised("uau", 10);
    assert!(!compaction::is_possible(&summed, &policy));
    let mut session = session("uau", 0);
    assert!(compaction::is_possible(&session, &policy));
    session.compaction_failures = compaction::FAILURES;
    assert!(!compaction::is_possible(&session, &policy));
    summed.records.push(example::assistant(6, example::RUN, vec![Block::Text { text: "so".into() }]));
    assert!(compaction::is_possible(&summed, &policy));
    let none = self::session("u", 0);
    assert!(!compaction::is_possible(&none, &policy), "nothing was said that a summary could stand for");
}

#[test]
fn a_summary_that_is_too_long_to_ask_for_is_asked_for_without_the_oldest_turns() {
    let session = session("uauattu", 10);
    let whole = compaction::request(&session, Vec::new(), 0).unwrap().messages;
    for without in 1..6 {
        let request = compaction::request(&session, Vec::new(), without).unwrap().messages;
        assert!(request.len() < whole.len());
        assert!(whole.ends_with(&request), "{without}");
        assert_ne!(request[0].role, Role::Tool);
    }
    assert_eq!(compaction::request(&session, Vec::new(), 7), None);
}

#[test]
fn tokens_are_estimated_by_what_the_provider_counted() {
    let mut session = session("uau", 0);
    session.records[1].details.usage =
        Some(crate::record::Usage { input_tokens: 5, output_tokens: 3, ..Default::default() });
    // The provider counted 5 tokens for "Be brief." and "question 0". So "question 2" is 3 more, rounded up.
    assert_eq!(weigh(&session, &[], None).tokens, 5 + 3 + 3);
    session.records[1].details.usage = None;
    let bytes = weigh(&session, &[], None).bytes;
    assert_eq!(weigh(&session, &[], None).tokens, (bytes as i64 * 2).div_euclid(7) + 1, "3.5 bytes a token");
}
