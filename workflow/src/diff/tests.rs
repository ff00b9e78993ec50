use super::*;
use crate::example;
use crate::record::{Block, FinishReason, Record, Role, ToolCall, ToolResult};
use crate::seed::Seed;
use crate::state::State;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A session of `records`, whose state is what they make.
fn side(session_id: &str, records: Vec<Record>) -> Side {
    Side {
        session_id: session_id.into(),
        agent: "default".into(),
        model: "openai/one".into(),
        status: "completed".into(),
        system: "Be brief.".into(),
        tools: Vec::new(),
        seeds: Vec::new(),
        state: crate::derive::fold(State::new(), &records),
        records,
        answers: BTreeMap::new(),
    }
}

fn call(id: &str, name: &str, arguments: Value) -> Block {
    Block::ToolCall(ToolCall { call_id: id.into(), name: name.into(), arguments, malformed: None })
}

fn said(text: &str) -> Block {
    Block::Text { text: text.into() }
}

fn gave(number: i64, call_id: &str, content: &str, details: Option<Value>) -> Record {
    let mut record = example::result(number, call_id);
    record.content = vec![Block::ToolResult(ToolResult {
        call_id: call_id.into(),
        name: "write_file".into(),
        content: content.into(),
        is_error: false,
        details,
        output: None,
    })]
    .into();
    record
}

fn answered(number: i64, content: Vec<Block>) -> Record {
    let asks = content.iter().any(|block| matches!(block, Block::ToolCall(_)));
    let mut record = example::assistant(number, example::RUN, content);
    record.details.finish_reason = Some(if asks { FinishReason::ToolCalls } else { FinishReason::Stop });
    record
}

/// A user asks for a file, the model writes it, and the user says thanks. `id` is the call id. `path` and
/// `end` vary between tests.
fn talk(session_id: &str, run_id: &str, id: &str, path: &str, end: &str) -> Side {
    let details = json!({"type": "fileWritten", "path": path, "bytes": 2, "sha256": "00"});
    let mut records = vec![
        example::user(2, "Write it down."),
        answered(3, vec![said("I write."), call(id, "write_file", json!({"path": path, "text": "hi"}))]),
        gave(4, id, "Wrote 2 bytes.", Some(details)),
        answered(5, vec![said(end)]),
        example::user(6, "Thanks."),
        answered(7, vec![said("You are welcome.")]),
    ];
    for record in &mut records {
        record.run_id = run_id.into();
    }
    side(session_id, records)
}

fn levels(report: &Report) -> Vec<Level> {
    report.turns.iter().map(|turn| turn.level).collect()
}

#[test]
fn the_same_talk_under_other_ids_is_equal() {
    let mut one = talk("sess_11111111", "run_11111111", "call_11111111", "a.txt", "Done.");
    let mut other = talk("sess_22222222", "run_22222222", "call_22222222", "a.txt", "Done.");
    for (side, id) in [(&mut one, "11111111"), (&mut other, "22222222")] {
        // Texts may name the ids, and keys of the state may contain them.
        let text = format!("In sess_{id}/a.txt for call_{id}, run_{id}.");
        side.records.push(example::user(8, &text));
        side.state.insert(format!("email/call_{id}"), json!({"to": ["ann@example.org"]}));
    }
    for record in &mut other.records {
        record.message_number += 40;
        record.step_number += 3;
        record.details.usage = None;
    }
    let report = diff(&one, &other);
    assert_eq!(report.verdict, Level::Equal, "{report:#?}");
    assert_eq!(report.first_divergence, None);
    assert_eq!(report.turns.len(), 4);
}

#[test]
fn a_short_id_is_read_where_an_id_stands_and_is_a_word_in_a_text() {
    let one = talk("s1", "r1", "a", "a.txt", "I saw a cat.");
    let other = talk("s2", "r2", "b", "a.txt", "I saw b cat.");
    let report = diff(&one, &other);
    assert_eq!(levels(&report), [Level::Equal, Level::Prose, Level::Equal]);
}

#[test]
fn an_argument_is_found_by_its_path_and_the_state_by_its_key() {
    let report =
        diff(&talk("s1", "r1", "call_1", "a.txt", "Done."), &talk("s2", "r2", "call_1", "b.txt", "Done."));
    assert_eq!(report.verdict, Level::Tools);
    assert_eq!(levels(&report), [Level::Tools, Level::Equal, Level::Equal]);
    let parts: Vec<&Part> = report.turns[0].differences.iter().map(|one| &one.part).collect();
    let [
        Part::Call { name, arguments, position, malformed: false },
        Part::State { changes },
        Part::Result { details, .. },
    ] = parts.as_slice()
    else {
        panic!("{parts:#?}")
    };
    assert_eq!((name.left.as_str(), *position), ("write_file", Sides { left: 1, right: 1 }));
    assert_eq!(arguments.len(), 1);
    assert_eq!(arguments[0].path, "/path");
    assert_eq!((&arguments[0].left, &arguments[0].right), (&Some(json!("a.txt")), &Some(json!("b.txt"))));
    let keys: Vec<&str> = changes.iter().map(|change| change.path.as_str()).collect();
    assert_eq!(keys, ["/file~1a.txt", "/file~1b.txt"]);
    assert_eq!(details[0].path, "/path");
    let first = report.first_divergence.as_ref().unwrap();
    assert_eq!((first.turn, first.left_message, first.level), (1, Some(2), Level::Tools));
    assert_eq!(first.what, "write_file is called with another /path");
    assert_eq!(report.first_tool_divergence, report.first_divergence);
    assert_eq!(report.state.iter().map(|change| change.path.as_str()).collect::<Vec<_>>(), keys);
}

#[test]
fn prose_is_compared_word_by_word() {
    let report = diff(
        &talk("s1", "r1", "call_1", "a.txt", "It is done, as you asked."),
        &talk("s2", "r2", "call_1", "a.txt", "It is written, as you wanted me to."),
    );
    assert_eq!(
        (report.verdict, levels(&report)),
        (Level::Prose, vec![Level::Equal, Level::Prose, Level::Equal])
    );
    assert_eq!(report.first_tool_divergence, None);
    let Part::Text { words } = &report.turns[1].differences[0].part else { panic!("{report:#?}") };
    let pieces: Vec<(WhichSide, &str)> = words.iter().map(|piece| (piece.of, piece.text.as_str())).collect();
    assert_eq!(
        pieces,
        [
            (WhichSide::Both, "It is "),
            (WhichSide::Left, "done"),
            (WhichSide::Right, "written"),
            (WhichSide::Both, ", as you "),
            (WhichSide::Left, "asked"),
            (WhichSide::Right, "wanted me to"),
            (WhichSide::Both, "."),
        ]
    );
}

#[test]
fn a_turn_too_many_is_named_and_what_follows_it_stands_side_by_side_again() {
    let one = talk("s1", "r1", "call_1", "a.txt", "Done.");
    let mut other = talk("s2", "r2", "call_1", "a.txt", "Done.");
    other.records.insert(3, answered(50, vec![call("call_x", "current_time", json!({}))]));
    other.records.insert(4, gave(51, "call_x", "noon", None));
    let report = diff(&one, &other);
    assert_eq!(levels(&report), [Level::Equal, Level::Tools, Level::Equal, Level::Equal]);
    assert_eq!(report.turns[1].left, None);
    assert_eq!(report.turns[1].differences[0].part, Part::Turn { on: WhichSide::Right });
    assert_eq!(report.first_divergence.unwrap().what, "only on the right");
}

#[test]
fn parallel_calls_are_compared_each_with_its_own() {
    let turn = |ids: [&str; 2], places: [&str; 2]| {
        let calls =
            ids.iter().zip(places).map(|(id, place)| call(id, "weather", json!({"place": place}))).collect();
        vec![
            example::user(2, "How is it?"),
            answered(3, calls),
            gave(4, ids[0], "rain", None),
            gave(5, ids[1], "sun", None),
        ]
    };
    let one = side("s1", turn(["call_a", "call_b"], ["Paris", "Rome"]));
    assert_eq!(diff(&one, &side("s2", turn(["call_c", "call_d"], ["Paris", "Rome"]))).verdict, Level::Equal);
    let report = diff(&one, &side("s2", turn(["call_c", "call_d"], ["Paris", "Oslo"])));
    let [Difference { part: Part::Call { position, arguments, .. }, .. }] =
        report.turns[0].differences.as_slice()
    else {
        panic!("{report:#?}")
    };
    assert_eq!((position.left, arguments[0].path.as_str()), (2, "/place"));

    // A call on one side only is reported once, with its name. Its result does not count as a second
    // difference.
    let mut fewer = turn(["call_c", "call_d"], ["Paris", "Rome"]);
    fewer[1].content.to_mut().remove(1);
    fewer.pop();
    let report = diff(&one, &side("s2", fewer));
    let [Difference { level: Level::Tools, part: Part::CallOnly { on: WhichSide::Left, name, arguments } }] =
        report.turns[0].differences.as_slice()
    else {
        panic!("{report:#?}")
    };
    assert_eq!((name.as_str(), arguments), ("weather", &json!({"place": "Rome"})));
}

#[test]
fn a_call_that_fails_on_one_side_is_more_than_prose() {
    let one = talk("s1", "r1", "call_1", "a.txt", "Done.");
    let mut other = one.clone();
    let Block::ToolResult(result) = &mut other.records[2].content.to_mut()[0] else { panic!("a result") };
    result.is_error = true;
    let report = diff(&one, &other);
    assert_eq!(report.verdict, Level::State);
    let parts: Vec<String> = report.turns[0].differences.iter().map(|one| one.part.sentence()).collect();
    assert_eq!(parts, ["another state: /file~1a.txt", "write_file succeeds, and fails on the right"]);
}

#[test]
fn every_field_of_a_record_that_counts_is_looked_at() {
    type Change = fn(&mut Side);
    fn text(side: &mut Side) -> &mut String {
        match &mut side.records[3].content.to_mut()[0] {
            Block::Text { text } => text,
            other => panic!("{other:?}"),
        }
    }
    let changes: [(&str, Level, Change); 12] = [
        ("a blank", Level::Prose, |side| text(side).push(' ')),
        ("the case", Level::Prose, |side| *text(side) = "done.".into()),
        ("an input", Level::Prose, |side| side.records[0] = example::user(2, "Write!")),
        ("an input too many", Level::Prose, |side| side.records.push(example::user(8, "Hello?"))),
        ("a block of the provider's", Level::Prose, |side| {
            let raw = json!({"thinking": "…"});
            side.records[3].content.to_mut().insert(0, Block::Provider { provider: "openai".into(), raw });
        }),
        ("the order of blocks", Level::Prose, |side| side.records[1].content.to_mut().reverse()),
        ("who may see it", Level::Prose, |side| side.records[3].internal = true),
        ("why it stopped", Level::Prose, |side| {
            side.records[3].details.finish_reason = Some(FinishReason::Length)
        }),
        ("the order of messages", Level::Prose, |side| {
            let result = side.records.remove(2);
            side.records.insert(4, result);
        }),
        ("the state", Level::State, |side| {
            side.state.insert("note".into(), json!(1));
        }),
        ("arguments that are no JSON", Level::Tools, |side| {
            let Block::ToolCall(call) = &mut side.records[1].content.to_mut()[1] else { panic!("a call") };
            call.malformed = Some("{".into());
        }),
        ("a tool", Level::Tools, |side| {
            let Block::ToolCall(call) = &mut side.records[1].content.to_mut()[1] else { panic!("a call") };
            call.name = "append_file".into();
        }),
    ];
    let one = talk("s1", "r1", "call_1", "a.txt", "Done.");
    for (what, level, change) in changes {
        let mut other = one.clone();
        change(&mut other);
        assert_eq!(diff(&one, &other).verdict, level, "{what}: {:#?}", diff(&one, &other).turns);
        assert_eq!(diff(&other, &one).verdict, level, "{what}, the other way about");
    }
}

#[test]
fn what_they_were_given_is_shown_and_does_not_count() {
    let one = talk("s1", "r1", "call_1", "a.txt", "Done.");
    let mut other = one.clone();
    other.model = "openai/two".into();
    other.system = "Be very brief.".into();
    other.seeds.push(Seed { role: Role::User, content: "Earlier.".into(), is_new: false });
    let report = diff(&one, &other);
    assert_eq!(report.verdict, Level::Equal);
    let what: Vec<&str> = report.setup.iter().map(|difference| difference.what).collect();
    assert_eq!(what, ["model", "system_prompt", "seeds"]);
    let inserted: Vec<&Piece> =
        report.setup[1].words.iter().filter(|piece| piece.of == WhichSide::Right).collect();
    assert_eq!(inserted, [&Piece { of: WhichSide::Right, text: "very ".into() }]);
}

#[test]
fn requests_tokens_and_time_stand_side_by_side() {
    let mut one = talk("s1", "r1", "call_1", "a.txt", "Done.");
    let mut other = talk("s2", "r2", "call_1", "a.txt", "Done.");
    for (side, shas) in [(&mut one, ["aa", "bb", "cc"]), (&mut other, ["aa", "xx", ""])] {
        let events: Vec<crate::event::Event> = shas
            .iter()
            .zip([3, 5, 7])
            .filter(|(sha, _)| !sha.is_empty())
            .flat_map(|(sha, number)| {
                let (kind, payload) = ("LLM_CALLED", json!({"generation_id": format!("gen_{number}"), "model": "openai/one",
                    "attempt": 1, "request_sha256": sha, "context_strategy": "full"}));
                let complete = json!({"generation_id": format!("gen_{number}"), "message_number": number, "reason": "stop"});
                [(kind, payload), ("GEN_COMPLETE", complete)]
            })
            .map(|(kind, payload)| crate::event::Event::from_row(kind, payload).unwrap())
            .collect();
        let step = |from, to| Step {
            from_message_number: from,
            to_message_number: to,
            usage: example::USAGE,
            time_ms: 30,
        };
        let steps = [step(1, 4), step(4, 5), step(6, 7)];
        side.answers = Side::answers(
            &side.records,
            &steps[..shas.iter().filter(|sha| !sha.is_empty()).count()],
            &events,
        );
    }
    let report = diff(&one, &other);
    assert_eq!(report.verdict, Level::Equal);
    assert_eq!(report.requests, Requests { equal: 1, differ: 1, unknown: 1, first_that_differs: Some(2) });
    assert_eq!((report.totals.left.time_ms, report.totals.right.time_ms), (90, 60));
    assert_eq!(report.totals.left.usage.input_tokens, 30);
    // The third answer was measured on one side only.
    assert_eq!((report.compared.left.time_ms, report.compared.left.turns), (60, 2));
    assert_eq!((report.totals.left.tool_calls, report.totals.left.turns), (1, 3));
}

#[test]
fn a_report_is_json_with_the_names_that_are_documented() {
    let report =
        diff(&talk("s1", "r1", "call_1", "a.txt", "Done."), &talk("s2", "r2", "call_1", "b.txt", "Done so."));
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["format"], FORMAT);
    assert_eq!(json["verdict"], "tools");
    assert_eq!(json["first_divergence"]["turn"], 1);
    assert_eq!(json["turns"][0]["differences"][0]["part"], "call");
    assert_eq!(json["turns"][0]["differences"][0]["arguments"][0]["path"], "/path");
    assert_eq!(json["turns"][0]["differences"][1]["part"], "state");
    assert_eq!(json["turns"][1]["differences"][0]["words"][1], json!({"of": "right", "text": " so"}));
    assert_eq!(json["turns"][1]["request"], "unknown");
    assert_eq!(json["requests"]["equal"], 0);
    assert_eq!(json["totals"]["left"]["input_tokens"], 0);
}

#[test]
fn huge_and_hostile_transcripts_are_compared_in_bounded_work() {
    let noise = |seed: u64, words: usize| {
        let mut state = seed;
        let mut text = String::new();
        for _ in 0..words {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            text.push_str(&format!("{:x} ", state >> 44));
        }
        text
    };
    // A message of many different words, hundreds of unlike turns, a value of a hundred levels.
    let mut deep = json!(1);
    let mut other_deep = json!(2);
    for _ in 0..100 {
        (deep, other_deep) = (json!([deep]), json!([other_deep]));
    }
    let huge = |seed: u64, deep: Value| {
        let mut records = vec![
            example::user(2, &noise(seed, 30_000)),
            answered(3, vec![call("c", "t", json!({"a": deep}))]),
        ];
        for number in 0..300 {
            records.push(example::user(4 + 2 * number, &noise(seed + number as u64, 120)));
            records.push(answered(5 + 2 * number, vec![said(&noise(seed * 7 + number as u64, 120))]));
        }
        side("s", records)
    };
    let (one, other) = (huge(1, deep), huge(90_000, other_deep));
    let report = diff(&one, &other);
    assert_eq!(report.turns.len(), 301);
    assert!(report.turns.iter().all(|turn| turn.left.is_some() && turn.right.is_some()));
    let Part::Call { arguments, .. } = &report.turns[0].differences[0].part else { panic!("{report:#?}") };
    assert_eq!(arguments.len(), 1);
    // A text that is too long to compare is reported whole.
    let Part::Input { words } = &report.turns[0].differences[1].part else { panic!("another part") };
    assert_eq!(words.len(), 2);
}

#[test]
fn a_state_of_many_changes_is_cut() {
    let one = side("s1", Vec::new());
    let mut other = one.clone();
    other.state = (0..5000).map(|number| (format!("key/{number}"), json!(number))).collect();
    let report = diff(&one, &other);
    assert_eq!((report.verdict, report.state.len()), (Level::State, 100));
}
