use super::*;
use crate::context::{Context, Message};
use crate::effect::Effect;
use crate::example;
use crate::record::{Block, ToolCall};
use crate::wire::{anthropic, openai};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

const BASE: i64 = 1;

/// One message of a made-up history. Numbers begin after [`BASE`].
#[derive(Clone, Debug)]
enum Said {
    User,
    Text,
    /// This many calls at once.
    Calls(usize),
    /// The result of the nth call so far. It may come in any order, late, twice or never.
    Result(usize),
}

fn records(history: &[Said]) -> Vec<Record> {
    let mut asked: Vec<String> = Vec::new();
    let mut step_number = 1;
    let mut records = Vec::new();
    for said in history {
        let number = BASE + 1 + records.len() as i64;
        let mut record = match said {
            Said::User => example::user(number, &format!("user {number}")),
            Said::Text => {
                let content = vec![Block::Text { text: format!("model {number}") }];
                example::assistant(number, example::RUN, content)
            }
            Said::Calls(count) => {
                let calls: Vec<ToolCall> =
                    (0..*count).map(|n| example::tool_call(&format!("call_{number}_{n}"))).collect();
                asked.extend(calls.iter().map(|call| call.call_id.to_string()));
                example::assistant(number, example::RUN, calls.into_iter().map(Block::ToolCall).collect())
            }
            Said::Result(nth) => {
                let call_id = if asked.is_empty() { "nobody_asked" } else { &asked[nth % asked.len()] };
                example::result(number, call_id)
            }
        };
        record.step_number = step_number;
        step_number += i64::from(record.role == Role::Assistant);
        records.push(record);
    }
    records
}

/// The lines of a history. Journal entry 3n records message n.
fn lines(history: &[Said]) -> Vec<Line> {
    let records = records(history);
    let line = |record: &Record| {
        let n = record.message_number;
        Line::of(record, format!("msg_{n}"), Some(3 * n))
    };
    records.iter().map(line).collect()
}

fn at(history: &[Said], place: &str) -> Result<Cut, CannotCut> {
    cut(&lines(history), BASE, &place.parse().unwrap(), false)
}

/// A message, a turn of two calls and its results, the reply, and a second message: numbers 2 to 7.
const TURN: [Said; 6] =
    [Said::User, Said::Calls(2), Said::Result(0), Said::Result(1), Said::Text, Said::User];

#[test]
fn each_place_is_read_as_it_is_shown() {
    for place in ["start", "end", "7", "msg_0af", "last-user", "last-tool", "step:3", "event:12"] {
        assert_eq!(place.parse::<CutPoint>().unwrap().to_string(), place);
    }
    for nonsense in
        ["", "-1", "last", "step:", "step:x", "event:-2", "turn:4", "7.5", "MSG_1", "99999999999999999999"]
    {
        assert!(nonsense.parse::<CutPoint>().is_err(), "{nonsense}");
    }
}

#[test]
fn a_cut_outside_of_turns_is_where_it_is_asked_for() {
    for (place, number, last_step_number, awaits_model) in [
        ("start", 1, 0, false),
        ("1", 1, 0, false),
        ("2", 2, 0, true),
        ("5", 5, 1, true),
        ("last-tool", 5, 1, true),
        ("6", 6, 2, false),
        ("msg_6", 6, 2, false),
        ("step:2", 6, 2, false),
        ("event:20", 6, 2, false),
        ("last-user", 7, 2, true),
        ("end", 7, 2, true),
        ("event:21", 7, 2, true),
    ] {
        let cut = at(&TURN, place).unwrap();
        assert_eq!((cut.at_message_number, cut.moved), (number, None), "{place}");
        assert_eq!(cut.kept as i64, number - BASE, "{place}");
        assert_eq!((cut.last_step_number, cut.awaits_model), (last_step_number, awaits_model), "{place}");
    }
}

#[test]
fn a_cut_inside_of_a_turn_moves_before_it_and_says_so() {
    for place in ["3", "4", "msg_4", "event:9", "event:14"] {
        let cut = at(&TURN, place).unwrap();
        assert_eq!((cut.at_message_number, cut.kept), (2, 1), "{place}");
        assert!(cut.moved.unwrap().contains("inside of a tool turn"), "{place}");
    }
    // A user's message in the middle of the turn is left out too.
    let steered = [Said::User, Said::Calls(1), Said::User, Said::Result(0), Said::Text];
    assert_eq!(at(&steered, "4").unwrap().at_message_number, 2);
    assert_eq!(at(&steered, "5").unwrap().at_message_number, 5);
    // The model's next answer closes a turn with unanswered calls. A cut after that answer is outside of the
    // turn.
    let broken = [Said::User, Said::Calls(1), Said::User, Said::Text, Said::Calls(1), Said::Calls(1)];
    assert_eq!(at(&broken, "4").unwrap().at_message_number, 2);
    assert_eq!(at(&broken, "5").unwrap().at_message_number, 5);
    assert_eq!(at(&broken, "end").unwrap().at_message_number, 5, "back over both turns");
}

#[test]
fn where_there_is_no_message_or_none_is_left_it_is_refused() {
    let refused = |history: &[Said], place: &str| at(history, place).unwrap_err().to_string();
    assert_eq!(refused(&TURN, "8"), "it has no message 8: its messages are 2 to 7");
    assert_eq!(refused(&TURN, "0"), "it has no message 0: its messages are 2 to 7");
    assert_eq!(refused(&[], "2"), "it has no message 2: it has none yet");
    assert_eq!(refused(&TURN, "msg_8"), "it has no message msg_8");
    assert_eq!(refused(&[Said::Text], "last-user"), "no user has said anything in it");
    assert_eq!(refused(&[Said::User], "last-tool"), "no tool was called in it");
    assert_eq!(refused(&TURN, "step:4"), "it has no step 4");
    assert_eq!(refused(&TURN, "event:5"), "nothing had been said at its entry 5");
    let turn_first = [Said::Calls(1), Said::Result(0)];
    assert!(refused(&turn_first, "2").contains("nothing stands before it"));
    assert_eq!(at(&turn_first, "3").unwrap().kept, 2);
}

#[test]
fn an_edited_message_is_left_out_and_only_a_users_can_be() {
    let edited = |place: &str| cut(&lines(&TURN), BASE, &place.parse().unwrap(), true);
    let first = edited("2").unwrap();
    assert_eq!((first.asked_message_number, first.at_message_number, first.kept), (2, BASE, 0));
    let last = edited("last-user").unwrap();
    assert_eq!((last.asked_message_number, last.at_message_number), (7, 6));
    assert_eq!((last.moved, last.awaits_model), (None, false));
    assert!(edited("4").unwrap_err().to_string().contains("message 4 is the tool's"));
    assert!(edited("6").unwrap_err().to_string().contains("message 6 is the assistant's"));
    assert!(edited("start").is_err());
    let steered = [Said::User, Said::Calls(1), Said::User, Said::Result(0)];
    let cut = cut(&lines(&steered), BASE, &CutPoint::Message(4), true).unwrap();
    assert_eq!((cut.asked_message_number, cut.at_message_number), (4, 2));
    assert!(cut.moved.is_some());
}

#[test]
fn messages_of_before_the_journal_are_before_its_first_entry() {
    let mut lines = lines(&TURN);
    for line in &mut lines[..5] {
        line.seq = None;
    }
    let cut = cut(&lines, BASE, &CutPoint::Event(1), false).unwrap();
    assert_eq!(cut.at_message_number, 6);
}

#[test]
fn a_summary_is_copied_and_changes_neither_who_is_to_answer_nor_the_step() {
    let mut summed_up = lines(&[Said::User, Said::Text, Said::User, Said::Text, Said::Text]);
    summed_up[3].summary = true;
    let at = |place: &str| cut(&summed_up, BASE, &place.parse().unwrap(), false).unwrap();
    for place in ["4", "5"] {
        assert!(at(place).awaits_model, "{place}");
        assert_eq!(at(place).last_step_number, 1, "{place}: the step of the summary has not been answered");
    }
    assert_eq!((at("5").kept, at("end").last_step_number), (4, 3));
    // A summary ends no turn: a call before it may be answered after it.
    let mut summed_up = lines(&[Said::User, Said::Calls(1), Said::Text, Said::Result(0)]);
    summed_up[2].summary = true;
    assert_eq!(cut(&summed_up, BASE, &CutPoint::Message(4), false).unwrap().at_message_number, 2);
}

fn tool(name: &str) -> ToolDefinition {
    ToolDefinition {
        name: name.into(),
        description: String::new(),
        parameters: json!({"type": "object"}),
        effect: Effect::Pure,
    }
}

fn seed(role: Role, content: &str) -> Seed {
    Seed { role, content: content.into(), is_new: true }
}

#[test]
fn a_prompt_is_replaced_or_gone_on_from_and_never_takes_a_messages_number() {
    let seeds = vec![seed(Role::System, "Be brief."), seed(Role::User, "earlier")];
    let replaced = patched(seeds.clone(), &SystemPromptPatch::Replace("Be long.".into()));
    assert_eq!(replaced, [seed(Role::System, "Be long."), seed(Role::User, "earlier")]);
    let appended = patched(seeds.clone(), &SystemPromptPatch::Append("And kind.".into()));
    assert_eq!(appended, [seed(Role::System, "Be brief.\n\nAnd kind."), seed(Role::User, "earlier")]);
    assert_eq!(patched(Vec::new(), &SystemPromptPatch::Append("x".into())), [seed(Role::System, "x")]);
}

#[test]
fn a_prefix_is_made_anew_only_where_it_differs() {
    let parent = Prefix::new(&[seed(Role::System, "Be brief.")], vec![tool("a"), tool("b")]);
    assert_eq!(prefix(Some(&parent), None, None), None);
    assert_eq!(prefix(None, Some(&[]), Some(vec![tool("a")])), None, "it has none to differ from");
    let fewer = prefix(Some(&parent), None, Some(vec![tool("b")])).unwrap();
    assert_eq!((fewer.system.as_str(), fewer.tools.len()), ("Be brief.", 1));
    let other = prefix(Some(&parent), Some(&[seed(Role::System, "Be long.")]), None).unwrap();
    assert_eq!((other.system.as_str(), &other.tools), ("Be long.", &parent.tools));
    let same = prefix(Some(&parent), None, Some(vec![tool("b"), tool("a")])).unwrap();
    assert_eq!(same.blob(), parent.blob(), "the same tools are the same bytes");
}

/// The repairs that the model's request needs, per dialect. Adds a user message if the model owes no answer.
fn repairs(records: &[Record], awaits_model: bool) -> [usize; 4] {
    let mut messages: Vec<Message> =
        records.iter().map(|one| Message { role: one.role, content: one.content.clone() }).collect();
    if !awaits_model {
        messages
            .push(Message { role: Role::User, content: vec![Block::Text { text: "go on".into() }].into() });
    }
    let context = Context { system: String::new(), tools: Vec::new().into(), messages, prefill: None };
    let options = openai::Options::new("m", 7);
    let lenient = openai::Options { merge_turns: true, ..options.clone() };
    [
        anthropic::project(&context, &anthropic::Options::new("m", 7)).repairs.total(),
        anthropic::project(
            &context,
            &anthropic::Options { prefill: true, ..anthropic::Options::new("m", 7) },
        )
        .repairs
        .total(),
        openai::project(&context, &options).repairs.total(),
        openai::project(&context, &lenient).repairs.total(),
    ]
}

fn said() -> impl Strategy<Value = Said> {
    prop_oneof![
        3 => Just(Said::User),
        2 => Just(Said::Text),
        3 => (1usize..4).prop_map(Said::Calls),
        5 => (0usize..6).prop_map(Said::Result),
    ]
}

/// Turns as live sessions have them: every call is answered, in any order, and a user's message may come in
/// between.
fn turn() -> impl Strategy<Value = Vec<Said>> {
    prop_oneof![
        Just(vec![Said::User]),
        Just(vec![Said::Text]),
        (1usize..4, any::<bool>()).prop_map(|(calls, steered)| {
            let mut said = vec![Said::Calls(calls)];
            said.extend(steered.then_some(Said::User));
            said.extend((0..calls).map(|_| Said::Result(0)));
            said
        }),
    ]
}

/// Numbers the results so that each call gets one.
fn answered(mut history: Vec<Said>) -> Vec<Said> {
    let mut results: usize = 0;
    for said in &mut history {
        if let Said::Result(nth) = said {
            *nth = results;
            results += 1;
        }
    }
    history
}

fn history() -> impl Strategy<Value = Vec<Said>> {
    prop_oneof![vec(said(), 0..16), vec(turn(), 0..8).prop_map(|turns| answered(turns.concat())),]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn every_cut_of_every_history_needs_no_repair_that_its_parent_does_not(history in history()) {
        let (lines, records) = (lines(&history), records(&history));
        let whole = cut(&lines, BASE, &CutPoint::End, false);
        let parent_awaits = records.last().is_some_and(|one| matches!(one.role, Role::User | Role::Tool));
        let parents = repairs(&records, parent_awaits);
        for asked in 0..=records.len() {
            let Ok(cut) = cut(&lines, BASE, &CutPoint::Message(BASE + asked as i64), false) else {
                // A cut is refused only if the session begins with a turn that is open there.
                prop_assert_eq!(records[0].role, Role::Assistant);
                continue;
            };
            prop_assert!(cut.kept <= asked, "nothing that was said later");
            prop_assert_eq!(cut.at_message_number, BASE + cut.kept as i64);
            prop_assert_eq!(cut.moved.is_some(), cut.kept < asked);
            let own = repairs(&records[..cut.kept], cut.awaits_model);
            for (own, parents) in own.into_iter().zip(parents) {
                prop_assert!(own <= parents, "{own} repairs, its parent has {parents}: {cut:?}");
            }
        }
        if let Ok(whole) = whole {
            // Cutting a fork at its end changes nothing, so a fork of a fork is also a valid fork of the
            // first session.
            let again = cut(&lines[..whole.kept], BASE, &CutPoint::End, false).unwrap();
            prop_assert_eq!((again.kept, again.moved), (whole.kept, None));
        }
    }
}
