//! Tests: properties that hold for any two transcripts.

use super::*;
use crate::record::{Block, Details, FinishReason, Record, Role, ToolCall, ToolResult};
use crate::state::State;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn text() -> impl Strategy<Value = String> {
    vec(select(vec!["the", "cat", "sat", "on", "a", "mat", ".", "\n", "é", "call_aaaaaaaa"]), 0..6)
        .prop_map(|words| words.join(" "))
}

fn arguments() -> impl Strategy<Value = Value> {
    (select(vec!["a", "b/c", "~d"]), 0..3, text())
        .prop_map(|(key, number, text)| json!({key: [number, text]}))
}

fn block() -> impl Strategy<Value = Block> {
    let id = || select(vec!["call_aaaaaaaa", "call_bbbbbbbb", "c"]);
    let name = || select(vec!["write_file", "weather"]);
    prop_oneof![
        3 => text().prop_map(|text| Block::Text { text }),
        2 => (id(), name(), arguments(), prop::option::weighted(0.1, text())).prop_map(
            |(id, name, arguments, malformed)| {
                Block::ToolCall(ToolCall { call_id: id.into(), name: name.into(), arguments, malformed })
            }
        ),
        2 => (id(), name(), text(), any::<bool>(), prop::option::of(arguments())).prop_map(
            |(id, name, content, is_error, details)| {
                Block::ToolResult(ToolResult { call_id: id.into(), name: name.into(), content, is_error, details, output: None })
            }
        ),
        1 => arguments().prop_map(|raw| Block::Provider { provider: "p".into(), raw }),
    ]
}

fn record() -> impl Strategy<Value = Record> {
    let role = select(vec![Role::User, Role::Assistant, Role::Assistant, Role::Tool]);
    let finish = prop::option::of(select(vec![FinishReason::Stop, FinishReason::Length]));
    (role, vec(block(), 0..3), prop::bool::weighted(0.1), finish).prop_map(
        |(role, content, internal, finish_reason)| Record {
            message_number: 0,
            run_id: "run_aaaaaaaa".into(),
            step_number: 1,
            role,
            content: content.into(),
            internal,
            details: Details { finish_reason, ..Details::default() },
        },
    )
}

fn side() -> impl Strategy<Value = Side> {
    vec(record(), 0..14).prop_map(|mut records| {
        for (at, record) in records.iter_mut().enumerate() {
            record.message_number = at as i64 + 1;
        }
        Side {
            session_id: "sess_aaaaaaaa".into(),
            agent: "default".into(),
            model: "m".into(),
            status: "completed".into(),
            system: String::new(),
            tools: Vec::new(),
            seeds: Vec::new(),
            state: State::new(),
            records,
            answers: BTreeMap::new(),
        }
    })
}

/// A side, and a copy of it with some messages removed, doubled or replaced.
fn pair() -> impl Strategy<Value = (Side, Side)> {
    (side(), side(), vec((any::<prop::sample::Index>(), 0..3u8), 0..4)).prop_map(|(one, source, edits)| {
        let mut other = one.clone();
        for (at, edit) in edits {
            if other.records.is_empty() {
                break;
            }
            let at = at.index(other.records.len());
            match edit {
                0 => drop(other.records.remove(at)),
                1 => other.records.insert(at, other.records[at].clone()),
                _ => {
                    if let Some(record) = source.records.get(at) {
                        other.records[at] = record.clone();
                    }
                }
            }
        }
        (one, other)
    })
}

/// The report with its sides swapped.
fn mirrored(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut map: serde_json::Map<String, Value> =
                map.into_iter().map(|(key, value)| (key, mirrored(value))).collect();
            let (left, right) = (map.remove("left"), map.remove("right"));
            map.extend(left.map(|value| ("right".to_owned(), value)));
            map.extend(right.map(|value| ("left".to_owned(), value)));
            let (left, right) = (map.remove("left_message"), map.remove("right_message"));
            map.extend(left.map(|value| ("right_message".to_owned(), value)));
            map.extend(right.map(|value| ("left_message".to_owned(), value)));
            for key in ["of", "on"] {
                if let Some(word) = map.get_mut(key) {
                    *word = match word.as_str() {
                        Some("left") => "right".into(),
                        Some("right") => "left".into(),
                        _ => word.clone(),
                    };
                }
            }
            // A sentence names a side.
            map.remove("what");
            Value::Object(map)
        }
        Value::Array(items) => {
            let mut items: Vec<Value> = items.into_iter().map(mirrored).collect();
            // Of two pieces at the same place, the left one comes first.
            for at in 1..items.len() {
                if items[at - 1]["of"] == "right" && items[at]["of"] == "left" {
                    items.swap(at - 1, at);
                }
            }
            Value::Array(items)
        }
        other => other,
    }
}

fn without_sentences(report: &Report) -> Value {
    let mut value = serde_json::to_value(report).unwrap();
    for key in ["first_divergence", "first_tool_divergence"] {
        if let Some(map) = value[key].as_object_mut() {
            map.remove("what");
        }
    }
    fn walk(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.remove("what");
                map.values_mut().for_each(walk);
            }
            Value::Array(items) => items.iter_mut().for_each(walk),
            _ => {}
        }
    }
    walk(&mut value);
    value
}

fn joined(words: &[Piece], other: WhichSide) -> String {
    words.iter().filter(|piece| piece.of != other).map(|piece| piece.text.as_str()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_session_is_equal_to_itself(one in side()) {
        let report = diff(&one, &one);
        prop_assert_eq!(report.verdict, Level::Equal);
        prop_assert!(report.turns.iter().all(|turn| turn.differences.is_empty()));
    }

    #[test]
    fn the_other_way_about_it_is_the_same((one, other) in pair()) {
        let there = serde_json::to_value(diff(&one, &other)).unwrap();
        prop_assert_eq!(mirrored(there), without_sentences(&diff(&other, &one)));
    }

    #[test]
    fn no_message_is_lost_and_the_first_divergence_is_the_least((one, other) in pair()) {
        let report = diff(&one, &other);
        for (side, views) in [
            (&one, report.turns.iter().filter_map(|turn| turn.left.as_ref()).collect::<Vec<_>>()),
            (&other, report.turns.iter().filter_map(|turn| turn.right.as_ref()).collect::<Vec<_>>()),
        ] {
            let answers = side.records.iter().filter(|record| record.role == Role::Assistant).count();
            prop_assert_eq!(views.iter().filter(|view| view.answer_message.is_some()).count(), answers);
        }
        let first = report.turns.iter().position(|turn| turn.level > Level::Equal).map(|at| at + 1);
        prop_assert_eq!(report.first_divergence.as_ref().map(|first| first.turn), first);
        for turn in &report.turns {
            prop_assert_eq!(turn.level > Level::Equal, !turn.differences.is_empty());
            let least = turn.differences.iter().map(|difference| difference.level).max();
            prop_assert_eq!(least.unwrap_or(Level::Equal), turn.level);
            prop_assert!(turn.differences.is_sorted_by_key(|difference| std::cmp::Reverse(difference.level)));
        }
        let highest = report.turns.iter().map(|turn| turn.level).max().unwrap_or(Level::Equal);
        prop_assert_eq!(report.verdict, highest);
        // Before the first divergence, both sides said and did the same.
        let same = first.map_or(report.turns.len(), |first| first - 1);
        prop_assert!(report.turns[..same].iter().all(|turn| turn.left.is_some() && turn.right.is_some()));
    }

    #[test]
    fn a_change_of_any_record_is_found(one in side(), at in any::<prop::sample::Index>(), with in record()) {
        prop_assume!(!one.records.is_empty());
        let at = at.index(one.records.len());
        let mut other = one.clone();
        other.records[at] = Record { message_number: one.records[at].message_number, ..with };
        prop_assume!(other.records[at] != one.records[at]);
        // Calls and results are matched by position and not by id, so another id alone is no difference.
        let ids = |record: &Record| serde_json::to_string(&record.content).unwrap().matches("call_id").count();
        prop_assume!(ids(&one.records[at]) == 0 && ids(&other.records[at]) == 0);
        let report = diff(&one, &other);
        prop_assert!(report.verdict > Level::Equal);
    }

    #[test]
    fn the_pieces_are_the_texts(left in text(), right in text()) {
        let side = |text: &str| {
            let mut record = crate::example::user(1, text);
            record.run_id = "run_aaaaaaaa".into();
            record
        };
        let make = |text: &str| Side { records: vec![side(text)], ..Side {
            session_id: "s".into(), agent: String::new(), model: String::new(), status: String::new(),
            system: String::new(), tools: Vec::new(), seeds: Vec::new(), records: Vec::new(),
            state: State::new(), answers: BTreeMap::new(),
        }};
        let report = diff(&make(&left), &make(&right));
        match report.turns[0].differences.as_slice() {
            [] => prop_assert_eq!(left, right),
            [Difference { part: Part::Input { words }, .. }] => {
                prop_assert_eq!(joined(words, WhichSide::Right), left);
                prop_assert_eq!(joined(words, WhichSide::Left), right);
                prop_assert!(words.windows(2).all(|pair| pair[0].of != pair[1].of));
            }
            other => prop_assert!(false, "{other:?}"),
        }
    }
}
