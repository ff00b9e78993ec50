//! Tests: the laws that projection obeys for any transcript.

use super::{Protocol, Repairs, Request, anthropic, openai, repair, strict};
use crate::agent::ToolDefinition;
use crate::context::{Context, Message};
use crate::effect::Effect;
use crate::record::{Block, Role, ToolCall, ToolResult};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

/// One way to project a context. Each law holds for all of them.
pub(crate) struct Wire {
    pub project: fn(&Context) -> Request,
    pub protocol: fn() -> Box<dyn Protocol>,
    normal_form: fn(&Context) -> (Context, Repairs),
    pub check: fn(&[u8]) -> Result<(), String>,
}

fn lenient_openai() -> openai::Options {
    openai::Options { merge_turns: true, legacy_max_tokens: true, ..openai::Options::new("m", 7) }
}

fn prefilled() -> anthropic::Options {
    anthropic::Options { prefill: true, ..anthropic::Options::new("m", 7) }
}

pub(crate) const WIRES: [Wire; 4] = [
    Wire {
        project: |context| anthropic::project(context, &anthropic::Options::new("m", 7)),
        protocol: || Box::new(anthropic::Options::new("m", 7)),
        normal_form: |context| anthropic::normal_form(context, &anthropic::Options::new("m", 7)),
        check: strict::anthropic,
    },
    Wire {
        project: |context| anthropic::project(context, &prefilled()),
        protocol: || Box::new(prefilled()),
        normal_form: |context| anthropic::normal_form(context, &prefilled()),
        check: strict::anthropic_prefilled,
    },
    Wire {
        project: |context| openai::project(context, &openai::Options::new("m", 7)),
        protocol: || Box::new(openai::Options::new("m", 7)),
        normal_form: |context| openai::normal_form(context, &openai::Options::new("m", 7)),
        check: |body| strict::openai(body, false),
    },
    Wire {
        project: |context| openai::project(context, &lenient_openai()),
        protocol: || Box::new(lenient_openai()),
        normal_form: |context| openai::normal_form(context, &lenient_openai()),
        check: |body| strict::openai(body, true),
    },
];

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        2 => "[a-z]{1,8}",
        1 => select(vec!["", " ", "\n\t", "\u{a0}", "\u{1c}", "\u{feff}", "\u{200b}", "\0", "e\u{301}", "👩‍👩‍👧", "\u{202e}x", "{\"a\":"])
            .prop_map(str::to_owned),
        1 => any::<String>(),
    ]
}

fn id() -> impl Strategy<Value = String> {
    let long = "x".repeat(70);
    prop_oneof![
        6 => select(vec!["a", "b", "c", "toolu_01", "call_9", "", "mit Leerzeichen", "ünï", "a:b"]).prop_map(str::to_owned),
        1 => Just(long),
    ]
}

fn arguments() -> impl Strategy<Value = Value> {
    select(vec![
        json!({}),
        json!({"b": 1, "a": {"z": null, "y": [1.5]}}),
        json!("text"),
        Value::Null,
        json!([1]),
    ])
}

fn raw() -> impl Strategy<Value = Value> {
    select(vec![
        json!({"type": "thinking", "thinking": "", "signature": "sig"}),
        json!({"type": "redacted_thinking", "data": "x"}),
        json!({"type": "server_tool_use", "id": "srv", "name": "s", "input": {}}),
        json!({"type": "tool_use", "id": "a", "name": "n", "input": {}}),
        json!({"type": "tool_result", "tool_use_id": "a"}),
        json!({"type": "text", "text": ""}),
        json!({"type": "image", "source": {}}),
        json!({"type": "image_url", "image_url": {"url": "data:,"}}),
        json!({"type": "refusal", "refusal": "no"}),
        json!({"type": 3}),
        json!("no object"),
    ])
}

fn block() -> impl Strategy<Value = Block> {
    let provider = select(vec!["anthropic", "openai", "other"]);
    prop_oneof![
        4 => text().prop_map(|text| Block::Text { text }),
        3 => (id(), id(), arguments(), proptest::option::weighted(0.2, text())).prop_map(|(id, name, arguments, malformed)| {
            Block::ToolCall(ToolCall { call_id: id.into(), name, arguments, malformed })
        }),
        3 => (id(), text(), any::<bool>()).prop_map(|(id, content, is_error)| Block::ToolResult(ToolResult {
            call_id: id.into(),
            name: "n".into(),
            content,
            is_error,
            details: Some(json!({"type": "secret"})),
            output: None,
        })),
        1 => (provider, raw()).prop_map(|(provider, raw)| Block::Provider { provider: provider.into(), raw }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let role = select(vec![
        Role::System,
        Role::User,
        Role::User,
        Role::Assistant,
        Role::Assistant,
        Role::Assistant,
        Role::Tool,
        Role::Tool,
        Role::Tool,
    ]);
    // Most tool messages look like Wakeful's own, so that calls and results match often enough.
    let result = (id(), text()).prop_map(|(id, content)| {
        let call_id = id.into();
        vec![Block::ToolResult(ToolResult {
            call_id,
            name: "n".into(),
            content,
            is_error: false,
            details: None,
            output: None,
        })]
    });
    (role, vec(block(), 0..5), result, any::<bool>()).prop_map(|(role, blocks, result, plain)| {
        let content = if plain && role == Role::Tool { result } else { blocks };
        Message { role, content: content.into() }
    })
}

fn definitions() -> impl Strategy<Value = Vec<ToolDefinition>> {
    let definition =
        (id(), text(), select(vec![json!({"type": "object"}), json!(true), json!({"type": "string"})]));
    let definition = definition.prop_map(|(name, description, parameters)| ToolDefinition {
        name,
        description,
        parameters,
        effect: Effect::Pure,
    });
    vec(definition, 0..3)
}

pub(super) fn any_context() -> impl Strategy<Value = Context> {
    let prefill = proptest::option::weighted(0.3, text());
    (text(), definitions(), vec(message(), 0..12), prefill).prop_map(|(system, tools, messages, prefill)| {
        Context { system, tools: tools.into(), messages, prefill }
    })
}

/// A transcript as a live session writes it: a user message, then assistant turns. Every call is answered, in
/// any order.
pub(super) fn live_context() -> impl Strategy<Value = Context> {
    let turn = ("[a-z]{1,6}", 0..4_usize, any::<bool>(), any::<bool>(), any::<bool>());
    vec(turn, 0..6).prop_map(|turns| {
        let say =
            |role, text: &str| Message { role, content: vec![Block::Text { text: text.into() }].into() };
        let mut messages = vec![say(Role::User, "hello")];
        for (at, (text, calls, speaks, reversed, interrupted)) in turns.into_iter().enumerate() {
            let mut content = Vec::new();
            if speaks || calls == 0 {
                content.push(Block::Text { text: text.clone() });
            }
            let mut results = Vec::new();
            for call in 0..calls {
                let call_id = crate::id::CallId::from(format!("call_{at}_{call}"));
                content.push(Block::ToolCall(ToolCall {
                    call_id: call_id.clone(),
                    name: "n".into(),
                    arguments: json!({"b": 1, "a": 2}),
                    malformed: None,
                }));
                let result = ToolResult {
                    call_id,
                    name: "n".into(),
                    content: "r".into(),
                    is_error: reversed,
                    details: None,
                    output: None,
                };
                results.push(Message { role: Role::Tool, content: vec![Block::ToolResult(result)].into() });
            }
            if reversed {
                results.reverse();
            }
            messages.push(Message { role: Role::Assistant, content: content.into() });
            messages.extend(results);
            if calls == 0 || interrupted {
                messages.push(say(Role::User, &text));
            }
        }
        Context { system: "be kind".into(), tools: Vec::new().into(), messages, prefill: None }
    })
}

/// The body's messages as the provider's prompt cache sees them: blocks in order, without breakpoints.
pub(crate) fn prompt(body: &[u8]) -> Vec<(String, Value)> {
    let body: Value = serde_json::from_slice(body).unwrap();
    let mut prompt = Vec::new();
    for message in body["messages"].as_array().unwrap() {
        let role = message["role"].as_str().unwrap().to_owned();
        let mut envelope = message.clone();
        envelope.as_object_mut().unwrap().remove("content");
        match message["content"].as_array() {
            Some(blocks) => {
                for block in blocks {
                    let mut block = block.clone();
                    block.as_object_mut().unwrap().remove("cache_control");
                    prompt.push((role.clone(), block));
                }
            }
            None if message["content"].is_null() => {}
            None => prompt.push((role.clone(), json!({"type": "text", "text": message["content"]}))),
        }
        if envelope.as_object().unwrap().len() > 1 {
            prompt.push((role, envelope));
        }
    }
    prompt
}

fn strings(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::String(text) => into.push(text.clone()),
        Value::Array(list) => list.iter().for_each(|value| strings(value, into)),
        Value::Object(fields) => fields.values().for_each(|value| strings(value, into)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn l1_the_same_transcript_gives_the_same_bytes_also_after_storage(context in any_context()) {
        for wire in &WIRES {
            let mut stored = context.clone();
            for message in &mut stored.messages {
                let json = serde_json::to_string(&message.content).unwrap();
                message.content = serde_json::from_str(&json).unwrap();
            }
            let request = (wire.project)(&context);
            prop_assert_eq!(&request, &(wire.project)(&context));
            prop_assert_eq!(&request.body, &(wire.project)(&stored).body);
        }
    }

    #[test]
    fn l2_the_transcript_is_left_as_it_is(context in any_context()) {
        let before = context.clone();
        for wire in &WIRES {
            let _ = (wire.project)(&context);
        }
        prop_assert_eq!(before, context);
    }

    #[test]
    fn l3_repairing_what_was_repaired_changes_nothing(context in any_context()) {
        for wire in &WIRES {
            let (once, _) = (wire.normal_form)(&context);
            let (twice, repairs) = (wire.normal_form)(&once);
            prop_assert_eq!(&twice, &once);
            prop_assert_eq!(repairs.total(), 0);
            prop_assert_eq!((wire.project)(&once).body, (wire.project)(&context).body);
        }
    }

    #[test]
    fn l4_what_a_live_session_writes_is_sent_as_it_is(context in live_context()) {
        for wire in &WIRES {
            let (normal, repairs) = (wire.normal_form)(&context);
            prop_assert_eq!(&normal, &context);
            prop_assert_eq!(repairs.total(), 0);
        }
    }

    #[test]
    fn l5_no_text_and_no_result_is_lost(context in any_context()) {
        for wire in &WIRES {
            let mut sent = Vec::new();
            strings(&serde_json::from_slice(&(wire.project)(&context).body).unwrap(), &mut sent);
            for block in context.messages.iter().flat_map(|message| &message.content) {
                let said = match block {
                    Block::Text { text } => text,
                    Block::ToolResult(result) => &result.content,
                    Block::ToolCall(_) | Block::Provider { .. } => continue,
                };
                let found = repair::is_blank(said) || sent.iter().any(|text| text.contains(said.as_str()));
                prop_assert!(found, "lost: {:?}", said);
            }
        }
    }

    #[test]
    fn l6_a_longer_transcript_gives_a_longer_request(context in any_context(), cut in 0..12_usize) {
        let cut = cut.min(context.messages.len());
        let has_result = |message: &Message| message.content.iter().any(|block| matches!(block, Block::ToolResult(_)));
        // Wakeful asks a model only when every call has its result. So skip cuts between a call and its
        // result.
        let parts_a_turn = context.messages.get(cut).is_some_and(|next| next.role != Role::Assistant && has_result(next));
        prop_assume!(!parts_a_turn);
        // A prefill belongs to one model call and not to the transcript.
        let shorter = Context { messages: context.messages[..cut].to_vec(), prefill: None, ..context.clone() };
        prop_assume!(shorter.messages.iter().any(|message| message.role != Role::System));
        for wire in &WIRES {
            // Wakeful never asks a model without a message to answer.
            if (wire.normal_form)(&shorter).1.added_turns > 0 {
                continue;
            }
            let before = prompt(&(wire.project)(&shorter).body);
            let after = prompt(&(wire.project)(&context).body);
            prop_assert!(after.starts_with(&before), "{:#?}\nis no prefix of\n{:#?}", before, after);
        }
    }

    #[test]
    fn l7_a_strict_server_takes_every_request(context in any_context()) {
        for wire in &WIRES {
            let request = (wire.project)(&context);
            let checked = (wire.check)(&request.body);
            prop_assert!(checked.is_ok(), "{:?}: {}", checked, String::from_utf8_lossy(&request.body));
        }
    }

    #[test]
    fn l7_a_request_ends_with_the_assistant_only_where_it_is_prefilled(context in any_context()) {
        for wire in &WIRES {
            let request = (wire.project)(&context);
            let last = prompt(&request.body).pop().unwrap();
            prop_assert_eq!(last.0 == "assistant", request.prefill.is_some(), "{:?}", last);
            if let Some(prefill) = request.prefill {
                prop_assert_eq!(last.1["text"].as_str(), Some(prefill.as_str()));
                prop_assert!(context.prefill.as_ref().unwrap().starts_with(&prefill));
            }
        }
    }

    #[test]
    fn l8_what_is_changed_is_counted(context in any_context()) {
        for wire in &WIRES {
            let (normal, repairs) = (wire.normal_form)(&context);
            prop_assert_eq!(repairs.total() == 0, normal == context);
            prop_assert_eq!((wire.project)(&context).repairs, repairs);
        }
    }

    #[test]
    fn l9_a_late_result_never_replaces_what_was_sent(mut context in live_context(), late in "[a-z]{9}") {
        context.messages.push(Message { role: Role::Assistant, content: vec![Block::ToolCall(ToolCall {
            call_id: "late".into(),
            name: "n".into(),
            arguments: json!({}),
            malformed: None,
        })].into() });
        context.messages.push(Message { role: Role::User, content: vec![Block::Text { text: "still there?".into() }].into() });
        for wire in &WIRES {
            let before = (wire.project)(&context);
            prop_assert_eq!(before.repairs.unanswered_calls, 1);
            let mut grown = context.clone();
            grown.messages.push(Message { role: Role::Tool, content: vec![Block::ToolResult(ToolResult {
                call_id: "late".into(),
                name: "n".into(),
                content: late.clone(),
                is_error: false,
                details: None,
                output: None,
            })].into() });
            let after = (wire.project)(&grown);
            prop_assert!(prompt(&after.body).starts_with(&prompt(&before.body)));
            let last = prompt(&after.body).pop().unwrap();
            prop_assert_eq!(last.0, "user");
            prop_assert!(last.1.to_string().contains(&late));
        }
    }
}
