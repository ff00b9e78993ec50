//! Tests: the protocols' rules one by one, on the smallest transcript that breaks each.

use super::{Request, anthropic, openai, strict, tool_name};
use crate::agent::ToolDefinition;
use crate::context::{Context, Message};
use crate::effect::Effect;
use crate::record::{Block, Role, ToolCall, ToolResult};
use serde_json::{Value, json};

fn context(messages: Vec<Message>) -> Context {
    Context { system: String::new(), tools: Vec::new().into(), messages, prefill: None }
}

fn text(text: &str) -> Block {
    Block::Text { text: text.to_owned() }
}

fn call(id: &str) -> Block {
    Block::ToolCall(ToolCall {
        call_id: id.into(),
        name: "search".to_owned(),
        arguments: json!({"q": 1}),
        malformed: None,
    })
}

fn raw(provider: &str, raw: Value) -> Block {
    Block::Provider { provider: provider.to_owned(), raw }
}

fn user(said: &str) -> Message {
    Message { role: Role::User, content: vec![text(said)].into() }
}

fn assistant(content: &[Block]) -> Message {
    Message { role: Role::Assistant, content: content.to_vec().into() }
}

fn result(id: &str, content: &str) -> Message {
    let result = ToolResult {
        call_id: id.into(),
        name: "search".to_owned(),
        content: content.to_owned(),
        is_error: false,
        details: Some(json!({"type": "internal"})),
        output: None,
    };
    Message { role: Role::Tool, content: vec![Block::ToolResult(result)].into() }
}

fn body(request: &Request) -> Value {
    serde_json::from_slice(&request.body).unwrap()
}

/// The messages without cache breakpoints, checked by the strict validator.
fn to_anthropic(messages: Vec<Message>) -> (Value, Request) {
    let options = anthropic::Options { cache_prompt: false, ..anthropic::Options::new("m", 7) };
    let request = anthropic::project(&context(messages), &options);
    strict::anthropic(&request.body).unwrap();
    (body(&request)["messages"].clone(), request)
}

fn to_openai(messages: Vec<Message>) -> (Value, Request) {
    let request = openai::project(&context(messages), &openai::Options::new("m", 7));
    strict::openai(&request.body, false).unwrap();
    (body(&request)["messages"].clone(), request)
}

#[test]
fn an_empty_transcript_still_makes_a_request() {
    assert_eq!(to_anthropic(Vec::new()).0[0]["role"], "user");
    let (messages, request) = to_openai(Vec::new());
    assert_eq!(messages[0]["role"], "user");
    assert_eq!(request.repairs.added_turns, 1);
}

#[test]
fn the_body_says_exactly_what_was_asked_for() {
    let tool = ToolDefinition {
        name: "search".to_owned(),
        description: "Searches.".to_owned(),
        parameters: json!({"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}),
        effect: Effect::Pure,
    };
    let context = Context {
        system: "Be kind.".to_owned(),
        tools: vec![tool].into(),
        messages: vec![user("hi")],
        prefill: None,
    };
    let schema = json!({"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]});
    let cache = json!({"type": "ephemeral"});

    let sent = body(&anthropic::project(&context, &anthropic::Options::new("claude", 7)));
    let expected = json!({
        "model": "claude",
        "max_tokens": 7,
        "stream": true,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": cache}],
        "tools": [{"name": "search", "description": "Searches.", "input_schema": schema, "cache_control": cache}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": cache}]}],
    });
    assert_eq!(sent, expected);

    let sent = body(&openai::project(&context, &openai::Options::new("gpt", 7)));
    let function = json!({"name": "search", "description": "Searches.", "parameters": schema});
    let expected = json!({
        "model": "gpt",
        "max_completion_tokens": 7,
        "stream": true,
        "stream_options": {"include_usage": true},
        "tools": [{"type": "function", "function": function}],
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
    });
    assert_eq!(sent, expected);
}

#[test]
fn all_results_of_a_turn_are_one_user_message_with_the_text_after_them() {
    let turn = vec![
        user("hi"),
        assistant(&[call("a"), call("b")]),
        result("b", "2"),
        result("a", "1"),
        user("and?"),
    ];
    let (messages, request) = to_anthropic(turn.clone());
    let expected = json!([
        {"type": "tool_result", "tool_use_id": "b", "content": "2"},
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "text", "text": "and?"},
    ]);
    assert_eq!(messages[2], json!({"role": "user", "content": expected}));
    assert_eq!(request.repairs.total(), 0);

    let (messages, _) = to_openai(turn);
    assert_eq!(messages[2], json!({"role": "tool", "tool_call_id": "b", "content": "2"}));
    assert_eq!(messages[4], json!({"role": "user", "content": "and?"}));
}

#[test]
fn parallel_calls_stay_in_one_message_whose_arguments_are_text_for_openai() {
    let turn = vec![user("hi"), assistant(&[call("a"), call("b")]), result("a", "1"), result("b", "2")];
    let call =
        |id| json!({"id": id, "type": "function", "function": {"name": "search", "arguments": "{\"q\":1}"}});
    let expected = json!({"role": "assistant", "content": null, "tool_calls": [call("a"), call("b")]});
    assert_eq!(to_openai(turn).0[1], expected);
}

#[test]
fn a_call_without_a_result_gets_one_that_says_so() {
    let turn = vec![user("hi"), assistant(&[call("a"), call("b")]), result("a", "1"), user("and?")];
    let (messages, request) = to_anthropic(turn.clone());
    assert_eq!(messages[2]["content"][1]["tool_use_id"], "b");
    assert_eq!(messages[2]["content"][1]["is_error"], true);
    assert_eq!(request.repairs.unanswered_calls, 1);
    let (messages, _) = to_openai(turn);
    assert!(messages[3]["content"].as_str().unwrap().starts_with("Error: "));
}

#[test]
fn a_result_without_its_call_is_said_in_the_users_voice() {
    let (messages, request) = to_openai(vec![user("hi"), result("gone", "42 apples")]);
    assert_eq!(messages[1]["role"], "user");
    assert!(messages[1]["content"].as_str().unwrap().contains("42 apples"));
    assert!(!String::from_utf8_lossy(&request.body).contains("gone"), "no id enters a text");
    assert_eq!(request.repairs.orphan_results, 1);
}

#[test]
fn a_second_result_of_one_call_is_a_note_and_not_an_answer() {
    let turn = vec![user("hi"), assistant(&[call("a")]), result("a", "one"), result("a", "two")];
    let (messages, request) = to_anthropic(turn);
    let kinds: Vec<_> =
        messages[2]["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
    assert_eq!(kinds, ["tool_result", "text"]);
    assert_eq!(request.repairs.orphan_results, 1);
}

#[test]
fn ids_that_come_twice_are_told_apart_and_each_keeps_its_result() {
    let turn = |said| [assistant(&[call("a")]), result("a", said)];
    let messages = [vec![user("hi")], turn("one").to_vec(), turn("two").to_vec()].concat();
    let (messages, request) = to_anthropic(messages);
    assert_eq!(messages[1]["content"][0]["id"], "a");
    let second = &messages[3]["content"][0]["id"];
    assert_ne!(second, "a");
    assert_eq!(&messages[4]["content"][0]["tool_use_id"], second);
    assert_eq!(messages[4]["content"][0]["content"], "two");
    assert_eq!(request.repairs.rewritten_ids, 1);
}

#[test]
fn an_id_outside_the_alphabet_or_too_long_is_mapped_on_both_sides() {
    for id in ["", "fn:search/1", "ü", &"x".repeat(65)] {
        let turn = vec![user("hi"), assistant(&[call(id)]), result(id, "1")];
        let (messages, request) = to_anthropic(turn.clone());
        assert_eq!(messages[1]["content"][0]["id"], messages[2]["content"][0]["tool_use_id"]);
        assert_eq!(request.repairs.rewritten_ids, 1, "{id:?}");
        to_openai(turn);
    }
    // 41 bytes are too many for OpenAI only.
    let turn = vec![user("hi"), assistant(&[call(&"x".repeat(41))]), result(&"x".repeat(41), "1")];
    assert_eq!(to_anthropic(turn.clone()).1.repairs.rewritten_ids, 0);
    assert_eq!(to_openai(turn).1.repairs.rewritten_ids, 1);
}

#[test]
fn tool_names_stay_apart_when_they_are_rewritten() {
    assert_eq!(tool_name("web_search-2"), "web_search-2");
    assert_ne!(tool_name("a.b"), tool_name("a:b"));
    assert_ne!(tool_name(&"x".repeat(65)), tool_name(&"x".repeat(66)));
    assert!(tool_name(&"ü".repeat(99)).len() <= 64);
    assert_eq!(tool_name(&tool_name("a.b")), tool_name("a.b"));
}

#[test]
fn blanks_are_left_out() {
    for blank in ["", " \n\t", "\u{a0}", "\u{feff}", "\u{200b}", "\u{1c}"] {
        let messages = vec![user("hi"), assistant(&[text(blank)]), user(blank), user("there")];
        let (messages, request) = to_anthropic(messages);
        assert_eq!(messages.as_array().unwrap().len(), 1, "{blank:?}");
        assert_eq!(request.repairs.dropped_blanks, 2);
    }
}

#[test]
fn a_result_without_output_says_so() {
    let turn = vec![user("hi"), assistant(&[call("a")]), result("a", " ")];
    assert_eq!(to_anthropic(turn.clone()).0[2]["content"][0]["content"], "(no output)");
    assert_eq!(to_openai(turn).0[2]["content"], "(no output)");
}

#[test]
fn turns_of_one_role_are_merged_by_appending_blocks() {
    let (messages, request) = to_anthropic(vec![user("one"), user("two")]);
    let content = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]);
    assert_eq!(messages, json!([{"role": "user", "content": content}]));
    assert_eq!(request.repairs.merged_turns, 1);

    assert_eq!(to_openai(vec![user("one"), user("two")]).0.as_array().unwrap().len(), 2);
    let lenient = openai::Options { merge_turns: true, ..openai::Options::new("m", 7) };
    let request = openai::project(&context(vec![user("one"), user("two")]), &lenient);
    assert_eq!(body(&request)["messages"], json!([{"role": "user", "content": content}]));
}

#[test]
fn text_after_a_call_goes_before_it() {
    let turn = vec![user("hi"), assistant(&[call("a"), text("so")]), result("a", "1")];
    let (messages, request) = to_anthropic(turn);
    assert_eq!(messages[1]["content"][0]["text"], "so");
    assert_eq!(request.repairs.misplaced_blocks, 1);
}

#[test]
fn thinking_goes_back_verbatim_and_only_to_whom_it_came_from() {
    let thinking = json!({"type": "thinking", "thinking": "", "signature": "c2ln"});
    let redacted = json!({"type": "redacted_thinking", "data": "x"});
    let own = [raw("anthropic", thinking.clone()), raw("anthropic", redacted.clone())];
    let blocks = [&own[..], &[raw("bedrock", thinking.clone()), call("a")]].concat();
    let turn = vec![user("hi"), assistant(&blocks), result("a", "1")];
    let (messages, _) = to_anthropic(turn.clone());
    let content = messages[1]["content"].as_array().unwrap();
    assert_eq!(content[..2], [thinking, redacted]);
    assert_eq!(content[2]["type"], "tool_use");
    assert_eq!(content.len(), 3);
    let (messages, request) = to_openai(turn);
    assert_eq!(messages[1]["content"], Value::Null);
    assert_eq!(request.repairs.misplaced_blocks, 3);
}

#[test]
fn a_raw_block_cannot_pass_for_a_call_or_a_result() {
    let blocks =
        [raw("anthropic", json!({"type": "tool_use", "id": "x", "name": "n", "input": {}})), text("hm")];
    let (messages, _) = to_anthropic(vec![user("hi"), assistant(&blocks), user("go on")]);
    assert_eq!(messages[1]["content"], json!([{"type": "text", "text": "hm"}]));
}

#[test]
fn a_raw_block_of_a_tool_is_said_by_the_user_and_counted() {
    let image = json!({"type": "image", "source": {}});
    let said = Message { role: Role::Tool, content: vec![raw("anthropic", image.clone())].into() };
    let context = context(vec![said]);
    let request = anthropic::project(&context, &anthropic::Options::new("m", 7));
    let message = &body(&request)["messages"][0];
    assert_eq!((&message["role"], &message["content"][0]["type"]), (&json!("user"), &json!("image")));
    assert_eq!(request.repairs.misplaced_blocks, 1);
}

#[test]
fn a_malformed_call_goes_out_with_an_empty_object() {
    let malformed = Block::ToolCall(ToolCall {
        call_id: "a".into(),
        name: "search".to_owned(),
        arguments: json!({"half": true}),
        malformed: Some("{\"half\":".to_owned()),
    });
    let turn = vec![user("hi"), assistant(&[malformed]), result("a", "not JSON")];
    assert_eq!(to_anthropic(turn.clone()).0[1]["content"][0]["input"], json!({}));
    assert_eq!(to_openai(turn).0[1]["tool_calls"][0]["function"]["arguments"], "{}");
}

#[test]
fn details_of_a_result_are_never_sent() {
    let turn = vec![user("hi"), assistant(&[call("a")]), result("a", "1")];
    for request in [to_anthropic(turn.clone()).1, to_openai(turn).1] {
        assert!(!String::from_utf8_lossy(&request.body).contains("internal"));
    }
}

#[test]
fn a_transcript_that_ends_with_the_assistant_asks_it_to_go_on() {
    let messages = vec![user("hi"), assistant(&[text("Well, \n")])];
    assert_eq!(to_anthropic(messages.clone()).0[2]["role"], "user");
    let prefill = anthropic::Options { prefill: true, ..anthropic::Options::new("m", 7) };
    let sent = body(&anthropic::project(&context(messages), &prefill));
    assert_eq!(sent["messages"].as_array().unwrap().len(), 3, "only what was cut off is a prefill");
}

#[test]
fn a_prefill_is_the_last_thing_said_where_the_model_takes_one_and_nowhere_else() {
    let plain = context(vec![user("hi")]);
    let takes = anthropic::Options { prefill: true, ..anthropic::Options::new("m", 7) };
    let unprefilled = body(&anthropic::project(&plain, &takes));
    // given, sent, repairs
    let table = [
        ("Well, I", Some("Well, I"), 0),
        ("Well,\u{a0} \n\u{1c}", Some("Well,"), 1),
        (" \n", None, 1),
        ("", None, 1),
    ];
    for (given, expected, repairs) in table {
        let context = Context { prefill: Some(given.to_owned()), ..plain.clone() };
        let request = anthropic::project(&context, &takes);
        assert_eq!(request.prefill.as_deref(), expected);
        assert_eq!(request.repairs.total(), repairs, "{given:?}");
        let mut sent = body(&request);
        let messages = sent["messages"].as_array_mut().unwrap();
        if let Some(expected) = expected {
            let last = messages.pop().unwrap();
            assert_eq!(last, json!({"role": "assistant", "content": [{"type": "text", "text": expected}]}));
        }
        assert_eq!(sent, unprefilled, "all else is as it was");

        let refuses = anthropic::project(&context, &anthropic::Options::new("m", 7));
        assert_eq!((refuses.prefill.as_ref(), refuses.repairs.misplaced_blocks), (None, 1));
        strict::anthropic(&refuses.body).unwrap();
        let openai = openai::project(&context, &openai::Options::new("m", 7));
        assert_eq!((openai.prefill.as_ref(), openai.repairs.misplaced_blocks), (None, 1));
        strict::openai(&openai.body, false).unwrap();
    }
}

#[test]
fn a_leading_system_message_joins_the_prompt_and_a_later_one_is_said_by_the_user() {
    let system = |said: &str| Message { role: Role::System, content: vec![text(said)].into() };
    let mut context = context(vec![system("Be kind."), system("Be brief."), user("hi"), system("New rule.")]);
    context.system = "Be kind.".to_owned();
    let sent = body(&openai::project(&context, &openai::Options::new("m", 7)));
    let expected = json!([
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "New rule."},
    ]);
    assert_eq!(sent["messages"], expected);
}

#[test]
fn the_last_two_user_messages_are_cache_breakpoints_so_the_next_request_finds_the_last() {
    let turns = |count: usize| {
        let turn = |at: usize| [assistant(&[call(&format!("c{at}"))]), result(&format!("c{at}"), "r")];
        let mut messages = vec![user("hi")];
        messages.extend((0..count).flat_map(turn));
        body(&anthropic::project(&context(messages), &anthropic::Options::new("m", 7)))["messages"].clone()
    };
    let marked = |messages: &Value| -> Vec<usize> {
        let is_marked = |message: &Value| message["content"].to_string().contains("cache_control");
        messages
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
            .filter(|(_, m)| is_marked(m))
            .map(|(at, _)| at)
            .collect()
    };
    assert_eq!(marked(&turns(2)), [2, 4]);
    assert_eq!(marked(&turns(3)), [4, 6]);
}

/// A provider searches 20 blocks back from a breakpoint for a cached prefix. The end of the previous request
/// is a breakpoint itself, so the provider finds it however many blocks a turn has.
#[test]
fn after_a_turn_of_many_calls_the_end_of_the_request_before_is_a_breakpoint_of_its_own() {
    let ids: Vec<String> = (0..30).map(|at| format!("c{at}")).collect();
    let calls: Vec<Block> = ids.iter().map(|id| call(id)).collect();
    let before = vec![user("hi"), assistant(&[call("first")]), result("first", "r")];
    let mut after = before.clone();
    after.push(assistant(&calls));
    after.extend(ids.iter().map(|id| result(id, "r")));
    let sent = |messages: Vec<Message>| {
        let request = anthropic::project(&context(messages), &anthropic::Options::new("m", 7));
        assert!(String::from_utf8_lossy(&request.body).matches("cache_control").count() <= 4);
        body(&request)["messages"].clone()
    };
    let (before, after) = (sent(before), sent(after));
    let end = before.as_array().unwrap().last().unwrap();
    assert_eq!(end["content"][0]["cache_control"]["type"], "ephemeral");
    assert_eq!(after[2], *end, "marked in both");
}

#[test]
fn further_fields_are_sent_but_never_replace_ours() {
    let mut options = anthropic::Options::new("m", 7);
    options.extra = json!({"temperature": 0.5, "stream": false, "tools": [1]}).as_object().unwrap().clone();
    let sent = body(&anthropic::project(&context(vec![user("hi")]), &options));
    assert_eq!(sent["temperature"], 0.5);
    assert_eq!(sent["stream"], true);
    assert!(sent.get("tools").is_none());
}

#[test]
fn a_tools_schema_is_always_an_object() {
    let tool = |parameters| ToolDefinition {
        name: "t".to_owned(),
        description: String::new(),
        parameters,
        effect: Effect::Pure,
    };
    for parameters in [json!(null), json!({}), json!({"type": "object"})] {
        let context = Context { tools: vec![tool(parameters)].into(), ..context(vec![user("hi")]) };
        let sent = body(&openai::project(&context, &openai::Options::new("m", 7)));
        let function = json!({"name": "t", "parameters": {"type": "object", "properties": {}}});
        assert_eq!(sent["tools"][0]["function"], function);
    }
}
