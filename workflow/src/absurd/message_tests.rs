use super::*;

fn there_and_back(raw: Value) -> Said {
    let said = read(&raw).unwrap_or_else(|why| panic!("{why}: {raw}"));
    assert_eq!(restore(&said.content, &said.rest).unwrap(), raw, "{:?}", said.rest);
    said
}

fn call_of(said: &Said, at: usize) -> &ToolCall {
    let Block::ToolCall(call) = &said.content[at] else { panic!("no call: {said:?}") };
    call
}

fn result_of(said: &Said, at: usize) -> &ToolResult {
    let Block::ToolResult(result) = &said.content[at] else { panic!("no result: {said:?}") };
    result
}

#[test]
fn messages_of_the_vercel_ai_sdk() {
    there_and_back(json!({"role": "user", "content": "Hi"}));
    there_and_back(
        json!({"role": "user", "content": [{"type": "text", "text": "Hi", "providerOptions": {"a": 1}},
        {"type": "image", "image": "data:…"}]}),
    );
    let asks = there_and_back(json!({"role": "assistant", "id": "m1", "content": [
        {"type": "reasoning", "text": "Hm.", "providerOptions": {"anthropic": {"signature": "s"}}},
        {"type": "text", "text": "Let me look."},
        {"type": "tool-call", "toolCallId": "call_1", "toolName": "look", "input": {"at": "it"}},
        {"type": "tool-call", "toolCallId": "call_2", "toolName": "look", "args": "not an object"}]}));
    assert_eq!(
        (call_of(&asks, 2).call_id.as_str(), &call_of(&asks, 2).arguments),
        ("call_1", &json!({"at": "it"}))
    );
    assert_eq!(call_of(&asks, 3).malformed.as_deref(), Some("\"not an object\""));
    assert!(matches!(&asks.content[0], Block::Provider { provider, .. } if provider == PROVIDER));
    let got = there_and_back(json!({"role": "tool", "content": [
        {"type": "tool-result", "toolCallId": "call_1", "toolName": "look", "output": {"type": "text", "value": "a\u{1F600}"}},
        {"type": "tool-result", "toolCallId": "call_2", "toolName": "look", "output": {"type": "error-json", "value": {"no": [1.5]}, "providerOptions": {}}},
        {"type": "tool-result", "toolCallId": "call_3", "toolName": "old", "result": {"b": 1}},
        {"type": "tool-result", "toolCallId": "call_4", "toolName": "old", "result": "text", "isError": true}]}));
    assert_eq!((got.role, result_of(&got, 0).content.as_str()), (Role::Tool, "a\u{1F600}"));
    assert!(result_of(&got, 1).is_error && !result_of(&got, 2).is_error && result_of(&got, 3).is_error);
    assert_eq!(result_of(&got, 2).content, r#"{"b":1}"#);
}

#[test]
fn a_call_that_the_provider_ran_itself_stays_as_it_is() {
    let said = there_and_back(json!({"role": "assistant", "content": [
        {"type": "tool-call", "toolCallId": "ws_1", "toolName": "web", "input": {}, "providerExecuted": true},
        {"type": "tool-result", "toolCallId": "ws_1", "toolName": "web", "output": {"type": "json", "value": []}},
        {"type": "text", "text": "Found."}]}));
    assert_eq!(said.role, Role::Assistant);
    assert!(matches!((&said.content[0], &said.content[1]), (Block::Provider { .. }, Block::Provider { .. })));
}

#[test]
fn messages_of_pi_ai() {
    let asks = there_and_back(
        json!({"role": "assistant", "api": "anthropic-messages", "provider": "anthropic", "model": "m",
        "content": [{"type": "thinking", "thinking": "Hm.", "thinkingSignature": "s"},
            {"type": "toolCall", "id": "toolu_1", "name": "get_time", "arguments": {}}],
        "usage": {"input": 10, "output": 5, "cacheRead": 3, "cacheWrite": 2, "totalTokens": 20, "cost": {"total": 0.25}},
        "stopReason": "toolUse", "timestamp": 1}),
    );
    let usage = asks.usage.unwrap();
    assert_eq!((usage.input_tokens, usage.output_tokens, usage.cached_tokens), (15, 5, 3));
    assert_eq!((usage.cost_micros, asks.finish), (250_000, Some(FinishReason::ToolCalls)));
    let got = there_and_back(json!({"role": "toolResult", "toolCallId": "toolu_1", "toolName": "get_time",
        "content": [{"type": "text", "text": "noon"}], "details": {"type": "sentEmail", "to": ["a@b.c"]}, "isError": false,
        "timestamp": 2}));
    assert_eq!((result_of(&got, 0).content.as_str(), result_of(&got, 0).name.as_str()), ("noon", "get_time"));
    assert_eq!(result_of(&got, 0).details.as_ref().unwrap()["type"], "sentEmail");
    for odd in [
        json!({"role": "toolResult", "toolCallId": "a", "content": [{"type": "text", "text": "b"}, {"type": "image", "data": "x"}]}),
        json!({"role": "toolResult", "toolCallId": "a", "toolName": "", "content": [], "details": null}),
        json!({"role": "toolResult", "toolCallId": "a", "toolName": "w", "content": [{"type": "text", "text": "b", "more": 1}],
            "details": {"type": "fileWritten", "path": "/etc/passwd"}}),
    ] {
        assert_eq!(result_of(&there_and_back(odd), 0).details, None);
    }
}

#[test]
fn messages_of_openai_and_anthropic() {
    let asks = there_and_back(json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{\"b\": 1, \"a\": 2}"}},
        {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{\"a\":2}"}},
        {"id": "call_3", "type": "function", "function": {"name": "look", "arguments": "{broken"}}]}));
    assert_eq!(call_of(&asks, 0).arguments, json!({"a": 2, "b": 1}));
    assert_eq!(call_of(&asks, 2).malformed.as_deref(), Some("{broken"));
    there_and_back(json!({"role": "assistant", "content": "", "tool_calls": []}));
    there_and_back(json!({"role": "tool", "tool_call_id": "call_1", "content": "seen"}));
    there_and_back(
        json!({"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "seen"}]}),
    );
    there_and_back(json!({"role": "system", "content": "Be brief."}));
    there_and_back(
        json!({"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": 1}}]}),
    );
    let got = there_and_back(json!({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen", "is_error": true},
        {"type": "tool_result", "tool_use_id": "toolu_2"},
        {"type": "tool_result", "tool_use_id": "toolu_3", "content": [{"type": "text", "text": "x"}]},
        {"type": "text", "text": "And now?"}]}));
    assert_eq!((got.role, result_of(&got, 0).is_error), (Role::Tool, true));
}

#[test]
fn what_is_no_message_is_said() {
    for (raw, why) in [
        (json!("text"), "not an object"),
        (json!({"content": "Hi"}), "no role"),
        (json!({"role": "judge", "content": "Hi"}), "judge"),
        (json!({"role": "user", "content": 7}), "neither text nor a list"),
    ] {
        assert!(read(&raw).unwrap_err().contains(why), "{raw}");
    }
}

#[test]
fn unknown_parts_are_kept() {
    there_and_back(
        json!({"role": "assistant", "content": [{"type": "audio", "data": [1, 2]}, 7, null, "text",
        {"type": "text", "text": 9}, {"type": "tool-call", "toolCallId": 1, "toolName": "x", "input": {}},
        {"type": "tool-result", "toolCallId": "c", "toolName": "x", "output": "plain"}]}),
    );
    there_and_back(json!({"role": "assistant"}));
    there_and_back(json!({"role": "assistant", "content": null}));
}

proptest::proptest! {
    /// Whatever JSON stands in the fields of a message, the way back leads to it.
    #[test]
    fn the_way_back_leads_to_the_same_message(raw in any_message()) {
        if let Ok(said) = read(&raw) {
            proptest::prop_assert_eq!(restore(&said.content, &said.rest), Ok(raw));
        }
    }
}

fn any_json() -> impl proptest::strategy::Strategy<Value = Value> {
    use proptest::prelude::*;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z\"\\\\]{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            proptest::collection::btree_map("type|value|text|more", inner, 0..3).prop_map(|map| json!(map)),
        ]
    })
}

fn any_message() -> impl proptest::strategy::Strategy<Value = Value> {
    use proptest::prelude::*;
    let kind = "text|tool-call|tool-result|toolCall|tool_use|tool_result|reasoning";
    let keys = "text|toolCallId|toolName|input|args|output|result|isError|id|name|arguments|tool_use_id|content|is_error";
    let text = "[a-c]{0,2}".prop_map(Value::from);
    let part =
        (kind, proptest::collection::btree_map(keys, prop_oneof![text.clone(), text, any_json()], 0..7))
            .prop_map(|(kind, mut fields)| {
                fields.insert("type".to_owned(), json!(kind));
                json!(fields)
            });
    let content = prop_oneof![any_json(), proptest::collection::vec(part, 0..4).prop_map(Value::from)];
    let roles = "user|assistant|tool|toolResult|system";
    let top = "toolCallId|tool_call_id|toolName|details|isError|tool_calls|usage|name|id";
    let one = "[a-c]{0,2}".prop_map(Value::from);
    (roles, content, proptest::collection::btree_map(top, prop_oneof![one, any_json()], 0..4)).prop_map(
        |(role, content, mut fields)| {
            fields.insert("role".to_owned(), json!(role));
            fields.insert("content".to_owned(), content);
            json!(fields)
        },
    )
}
