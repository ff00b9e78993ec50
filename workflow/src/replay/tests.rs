use super::*;
use crate::effect::Effect;
use crate::example;
use crate::record::Details;
use serde_json::json;

const CUT: i64 = 1;

fn due(replay: &Session, rules: &Replay, recording: &Recording) -> Option<Input> {
    Follower::default().follow(replay, rules, recording).due()
}

fn next_input(replay: &Session, rules: &Replay, recording: &Recording) -> Option<Input> {
    Follower::default().follow(replay, rules, recording).next_input()
}

fn is_at_the_end(replay: &Session, rules: &Replay, recording: &Recording) -> bool {
    Follower::default().follow(replay, rules, recording).is_at_the_end()
}

fn answer<'s>(
    replay: &Session,
    rules: &Replay,
    recording: &'s Recording,
) -> Result<RecordedReply<'s>, Fault> {
    Follower::default().follow(replay, rules, recording).answer()
}

fn result<'s>(
    replay: &Session,
    rules: &Replay,
    recording: &'s Recording,
    call_id: &CallId,
) -> Option<RecordedResult<'s>> {
    Follower::default().follow(replay, rules, recording).result(call_id)
}

fn unrecorded<'r>(replay: &'r Session, rules: &Replay, recording: &Recording) -> Vec<(i64, &'r ToolCall)> {
    Follower::default().follow(replay, rules, recording).unrecorded()
}

fn rules() -> Replay {
    Replay {
        source_session_id: "sess_0".into(),
        after_message_number: CUT,
        fed: true,
        answers: Answers::Recorded,
    }
}

fn text(text: &str) -> Vec<Block> {
    vec![Block::Text { text: text.into() }]
}

fn says(number: i64, said: &str) -> Record {
    example::assistant(number, example::RUN, text(said))
}

fn asks(number: i64, calls: &[(&str, &str, i64)]) -> Record {
    let calls = calls.iter().map(|(id, name, argument)| {
        Block::ToolCall(ToolCall {
            call_id: (*id).into(),
            name: (*name).into(),
            arguments: json!({ "n": argument }),
            malformed: None,
        })
    });
    example::assistant(number, example::RUN, calls.collect())
}

/// The result of a tool, or of a person if `inbox_id` is given.
fn answers(number: i64, call_id: &str, content: &str, inbox_id: Option<i64>) -> Record {
    let mut record = example::result(number, call_id);
    if let Some(Block::ToolResult(result)) = record.content.to_mut().first_mut() {
        result.content = content.into();
    }
    record.details = Details { inbox_id, ..Details::default() };
    record
}

#[test]
fn a_recorded_call_has_the_rebase_that_held_for_it() {
    let rebases = [4, 9].map(|at| Rebase::nothing(Strategy::SlidingWindow, at));
    let recording =
        Recording::new(session(source()), BTreeMap::new(), BTreeMap::new()).with_rebases(rebases.into());
    let held = |answer| recording.rebase_of(answer).map(|rebase| rebase.at_message_number);
    assert_eq!([3, 4, 8, 9, 10].map(held), [None, None, Some(4), Some(4), Some(9)]);
}

/// A user's message, a tool turn, a follow-up in mid-run, a question to the user and its answer.
fn source() -> Vec<Record> {
    vec![
        example::user(2, "hello"),
        asks(3, &[("a", "get", 1), ("b", "get", 1), ("c", "put", 2)]),
        answers(4, "b", "second", None),
        answers(5, "a", "first", None),
        answers(6, "c", "third", None),
        example::user(7, "and this"),
        asks(8, &[("q", "ask_user", 0)]),
        answers(9, "q", "yes", Some(7)),
        says(10, "Done."),
    ]
}

fn session(records: Vec<Record>) -> Session {
    let last = records.last().map_or(CUT, |record| record.message_number);
    Session { records, last_message_number: last, ..example::session() }
}

fn recording() -> Recording {
    let settled = [("a", CallStatus::Done), ("b", CallStatus::Abandoned), ("c", CallStatus::Uncertain)];
    let settled = settled.into_iter().map(|(id, status)| (CallId::from(id), status)).collect();
    let call = RecordedCall {
        model: "scripted/m".into(),
        request_sha256: "00".into(),
        context_strategy: Strategy::Full,
        rebase: None,
        prefill_bytes: 3,
    };
    Recording::new(session(source()), BTreeMap::from([(10, call)]), settled)
}

fn waiting(mut session: Session, texts: &[&str]) -> Session {
    session.inbox = texts.iter().enumerate().map(|(id, text)| example::message(id as i64, text)).collect();
    session
}

fn number(input: Option<Input>) -> Option<i64> {
    input.map(|input| input.message_number)
}

/// The source took a message while a call waited for an operator.
#[test]
fn a_message_between_a_call_and_its_result_is_due_after_the_result() {
    let records = vec![
        example::user(2, "hello"),
        asks(3, &[("a", "put", 1)]),
        example::user(4, "are you there?"),
        answers(5, "a", "done", None),
        says(6, "It is done."),
    ];
    let recording = Recording::new(session(records.clone()), BTreeMap::new(), BTreeMap::new());
    let mut replay = records[..2].to_vec();
    assert_eq!(due(&session(replay.clone()), &rules(), &recording), None, "first the call");
    replay.push(answers(4, "a", "done", None));
    assert_eq!(number(due(&session(replay.clone()), &rules(), &recording)), Some(4));
    replay.push(example::user(5, "are you there?"));
    let answered = answer(&session(replay), &rules(), &recording).unwrap().record.message_number;
    assert_eq!(answered, 6);
}

#[test]
fn a_call_that_waits_for_approval_in_the_source_is_held_and_is_no_difference() {
    let records = vec![
        example::user(2, "hello"),
        asks(3, &[("a", "reserve", 1), ("b", "charge", 2)]),
        answers(4, "a", "done", None),
    ];
    let statuses = [("a", CallStatus::Done), ("b", CallStatus::Unapproved)];
    let settled = statuses.into_iter().map(|(id, status)| (CallId::from(id), status)).collect();
    let recording = Recording::new(session(records.clone()), BTreeMap::new(), settled);
    let asked = session(records[..1].to_vec());
    let held = |replay: &Session| Follower::default().follow(replay, &rules(), &recording).unapproved();
    assert_eq!(held(&asked), [false, true]);
    let mut replay = session(records);
    assert!(held(&replay).is_empty(), "no reply follows");
    assert_eq!(unrecorded(&replay, &rules(), &recording).len(), 1, "without a row it would be run dry");
    replay.calls = vec![example::row("b", Effect::Guarded, CallStatus::Unapproved)];
    assert!(unrecorded(&replay, &rules(), &recording).is_empty());
    assert!(is_at_the_end(&replay, &rules(), &recording));
}

#[test]
fn a_message_is_due_exactly_where_the_source_took_it() {
    let (rules, recording) = (rules(), recording());
    for kept in 0..=source().len() {
        let replay = session(source()[..kept].to_vec());
        let expected = match kept {
            0 => Some(2),
            5 => Some(7),
            _ => None,
        };
        assert_eq!(number(due(&replay, &rules, &recording)), expected, "after {kept} messages");
    }
    // The message waits in the inbox already.
    let given = waiting(session(source()[..5].to_vec()), &["and this"]);
    assert_eq!(due(&given, &rules, &recording), None);
    assert_eq!(answer(&given, &rules, &recording).unwrap().record.message_number, 8);
}

#[test]
fn inputs_come_in_their_order_at_rest_whatever_was_said_between() {
    let (rules, recording) = (rules(), recording());
    let mut replay = session(vec![example::user(2, "hello"), says(3, "No tool is needed.")]);
    assert_eq!(due(&replay, &rules, &recording), None, "others speak here than there");
    assert_eq!(number(next_input(&replay, &rules, &recording)), Some(7));
    replay.records.extend([example::user(4, "and this"), says(5, "Fine.")]);
    assert_eq!(number(next_input(&replay, &rules, &recording)), Some(9), "the answer to a question as well");
    replay.records.extend([example::user(6, "yes"), says(7, "What?")]);
    assert_eq!(next_input(&replay, &rules, &recording), None);
    assert!(!is_at_the_end(&replay, &rules, &recording));
    assert!(is_at_the_end(&session(source()), &rules, &recording));
}

#[test]
fn the_recorded_answer_is_the_one_in_the_same_place() {
    let (rules, recording) = (rules(), recording());
    let replay = |kept: usize| session(source()[..kept].to_vec());
    assert_eq!(answer(&replay(1), &rules, &recording).unwrap().record.message_number, 3);
    let last = answer(&replay(8), &rules, &recording).map(|answer| (answer.record.text(), prefill(&answer)));
    assert_eq!(last.unwrap(), ("Done.".to_owned(), Some("Don".to_owned())));
    let refused = |replay: &Session| answer(replay, &rules, &recording).unwrap_err().to_string();
    assert!(refused(&replay(9)).contains("no further answer"));
    assert!(refused(&replay(0)).contains("message 2 of the source is no answer"), "{}", refused(&replay(0)));
    let mut other = replay(2);
    other.records.push(example::user(4, "in between"));
    assert!(refused(&other).contains("has diverged"));
}

#[test]
fn a_place_is_counted_from_the_cut_and_not_by_number() {
    let (rules, recording) = (rules(), recording());
    // Another session of the conversation wrote messages in between.
    let mut apart = recording.session.clone();
    for record in &mut apart.records[1..] {
        record.message_number += 40;
    }
    let apart = Recording::new(apart, BTreeMap::new(), BTreeMap::new());
    let replay = session(source()[..5].to_vec());
    assert_eq!(number(due(&replay, &rules, &apart)), Some(47));
    assert_eq!(due(&replay, &rules, &apart).unwrap().client_key(), "replay/47");
}

#[test]
fn the_nth_call_of_the_same_name_and_arguments_has_the_nth_result() {
    let (rules, recording) = (rules(), recording());
    // The same calls under other ids, in another order.
    let replay = session(vec![
        example::user(2, "hello"),
        asks(3, &[("x", "put", 2), ("y", "get", 1), ("z", "get", 1), ("w", "get", 1)]),
    ]);
    let said = |id: &str| match result(&replay, &rules, &recording, &id.into()) {
        Some(RecordedResult::Settled { status, result, message_number }) => {
            Some((result.content.clone(), status, message_number))
        }
        Some(RecordedResult::Asked) | None => None,
    };
    assert_eq!(said("x"), Some(("third".into(), CallStatus::Done, 6)), "nobody has to look after it");
    assert_eq!(said("y"), Some(("first".into(), CallStatus::Done, 5)));
    assert_eq!(said("z"), Some(("second".into(), CallStatus::Abandoned, 4)));
    assert_eq!(said("w"), None, "it was asked for twice and no third time");
    let unrecorded: Vec<&str> =
        unrecorded(&replay, &rules, &recording).iter().map(|(_, call)| call.call_id.as_str()).collect();
    assert_eq!(unrecorded, ["w"]);
}

#[test]
fn other_arguments_have_the_result_of_the_call_in_the_same_place_if_it_has_that_name() {
    let (rules, recording) = (rules(), recording());
    let replay = session(vec![
        example::user(2, "hello"),
        asks(3, &[("x", "get", 7), ("y", "put", 7), ("z", "put", 7)]),
    ]);
    let said = |id: &str| match result(&replay, &rules, &recording, &id.into()) {
        Some(RecordedResult::Settled { result, .. }) => Some(result.content.as_str()),
        Some(RecordedResult::Asked) | None => None,
    };
    assert_eq!((said("x"), said("y"), said("z")), (Some("first"), None, Some("third")));
}

#[test]
fn what_a_person_answered_is_asked_again() {
    let (rules, recording) = (rules(), recording());
    let replay = session(source()[..7].to_vec());
    assert_eq!(result(&replay, &rules, &recording, &"q".into()), Some(RecordedResult::Asked));
    assert_eq!(number(next_input(&replay, &rules, &recording)), Some(9));
}

#[test]
fn fed_at_its_places_a_recording_gives_the_whole_transcript_again() {
    let (rules, recording) = (rules(), recording());
    let mut replay = session(Vec::new());
    let mut said = 0;
    while !is_at_the_end(&replay, &rules, &recording) {
        said += 1;
        assert!(said < 100, "it comes to its end");
        let place = replay.records.len() + replay.inbox.len();
        let open = replay.open_turn().map(|turn| turn.without_result[0].call_id.clone());
        match open {
            Some(call_id) => match result(&replay, &rules, &recording, &call_id) {
                Some(RecordedResult::Settled { .. }) => replay.records.push(source()[place].clone()),
                Some(RecordedResult::Asked) => {
                    let input = next_input(&replay, &rules, &recording).unwrap();
                    assert_eq!(input.message_number, source()[place].message_number);
                    replay.records.push(source()[place].clone());
                }
                None => panic!("call {call_id} was recorded"),
            },
            None => match due(&replay, &rules, &recording).or_else(|| {
                (!replay.awaits_model()).then(|| next_input(&replay, &rules, &recording)).flatten()
            }) {
                Some(input) => {
                    assert_eq!(input.text, source()[place].text());
                    replay.records.push(source()[place].clone());
                }
                None => {
                    let answer = answer(&replay, &rules, &recording).unwrap();
                    replay.records.push(answer.record.clone());
                }
            },
        }
    }
    assert_eq!(replay.records, source());
}

#[test]
fn a_summary_takes_no_place_and_is_due_before_what_followed_it() {
    let rules = rules();
    let mut records = source();
    let mut summary = says(6, "So far: a table.");
    summary.details.summary = true;
    for record in &mut records[5..] {
        record.message_number += 1;
    }
    records.insert(5, Record { message_number: 7, ..summary });
    let recording = Recording::new(session(records.clone()), BTreeMap::new(), BTreeMap::new());
    let due_summary = |replay: &Session| summary_of(replay, &rules, &recording);
    fn summary_of(replay: &Session, rules: &Replay, recording: &Recording) -> Option<i64> {
        Follower::default()
            .follow(replay, rules, recording)
            .summary()
            .map(|answer| answer.record.message_number)
    }
    // The follow-up after the summary waits in the inbox by then.
    let before = session(source()[..5].to_vec());
    assert_eq!(number(due(&before, &rules, &recording)), Some(8));
    let given = waiting(before, &["and this"]);
    assert_eq!(due_summary(&given), Some(7));
    let written = waiting(session(records[..6].to_vec()), &["and this"]);
    assert_eq!(due_summary(&written), None);
    assert_eq!(answer(&written, &rules, &recording).unwrap().record.message_number, 9);
}

#[test]
fn a_follower_reads_each_message_once_and_says_what_a_new_one_says() {
    let rules = rules();
    let records: Vec<Record> = (0..300)
        .flat_map(|turn: i64| {
            let id = format!("call_{turn}");
            [asks(2 * turn + 2, &[(&id, "get", turn % 7)]), answers(2 * turn + 3, &id, "it", None)]
        })
        .collect();
    let recording = Recording::new(session(records.clone()), BTreeMap::new(), BTreeMap::new());
    let (mut follower, mut read_by_new_ones) = (Follower::default(), 0);
    for kept in 0..=records.len() {
        let replay = session(records[..kept].to_vec());
        let mut new = Follower::default();
        for _ in 0..2 {
            let place = follower.follow(&replay, &rules, &recording);
            let place_again = new.follow(&replay, &rules, &recording);
            let numbers = [&place, &place_again].map(|place| {
                let answer = place.answer().map(|answer| answer.record.message_number);
                (answer.ok(), place.due(), place.next_input(), place.is_at_the_end())
            });
            assert_eq!(numbers[0], numbers[1], "after {kept} messages");
            if let Some(call) = replay.records.last().and_then(|last| last.tool_calls().next()) {
                let [result, again] = [&place, &place_again].map(|place| place.result(&call.call_id));
                assert!(result.is_some() && result == again, "{}", call.call_id);
            }
        }
        read_by_new_ones += new.messages_read();
    }
    assert_eq!(follower.messages_read(), 2 * records.len(), "the source's and its own, once");
    // The worker lost its last reply before it was committed.
    let (replay, kept) = (session(records[..99].to_vec()), 98);
    follower.follow(&replay, &rules, &recording);
    let before = session(records[..kept].to_vec());
    let place = follower.follow(&before, &rules, &recording);
    let answer = place.answer().expect("the lost reply is due again");
    assert_eq!(answer.record.message_number, records[kept].message_number);
    assert!(read_by_new_ones > 200 * follower.messages_read(), "{read_by_new_ones}");
}
