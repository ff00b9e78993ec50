use super::*;
use crate::model::NoDeltas;
use serde_json::json;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::context::Message;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::record::ToolResult;

struct Heard(Vec<String>);

impl Deltas for Heard {
    fn text(&mut self, delta: &str) {
        self.0.push(delta.to_owned());
    }
}

fn scripted(text: &str) -> Scripted {
    Scripted::parse("test", "test.toml", text).unwrap()
}

fn text_message(role: Role, text: &str) -> Message {
    Message { role, content: vec![Block::Text { text: text.to_owned() }].into() }
}

fn user(text: &str) -> Message {
    text_message(Role::User, text)
}

fn answered(call_id: &CallId, name: &str, content: &str) -> Message {
    let result = ToolResult {
        call_id: call_id.clone(),
        name: name.to_owned(),
        content: content.to_owned(),
        is_error: false,
        details: Some(json!({"type": "secret", "why": "operators only"})),
        output: None,
    };
    Message { role: Role::Tool, content: vec![Block::ToolResult(result)].into() }
}

fn context(messages: Vec<Message>) -> Context {
    let tool = |name: &str| ToolDefinition::new(name, "d", json!({"type": "object"}), Effect::Pure);
    Context {
        system: "You are a test.".into(),
        tools: vec![tool("a"), tool("b")].into(),
        messages,
        prefill: None,
    }
}

async fn call(model: &Scripted, messages: &[Message]) -> Result<Reply, Fault> {
    model.call(&model.request(&context(messages.to_vec())), &mut NoDeltas).await
}

/// Runs a turn to its end as a worker would. The result of each call is its name in brackets.
async fn play(model: &Scripted, messages: &mut Vec<Message>) -> Vec<Reply> {
    let mut replies = Vec::new();
    loop {
        let reply = call(model, messages).await.unwrap();
        messages.push(Message { role: Role::Assistant, content: reply.content.clone().into() });
        for block in &reply.content {
            if let Block::ToolCall(call) = block {
                messages.push(answered(&call.call_id, &call.name, &format!("[{}]", call.name)));
            }
        }
        let more = reply.has_tool_calls();
        replies.push(reply);
        if !more {
            return replies;
        }
    }
}

fn texts(replies: &[Reply]) -> Vec<String> {
    replies.iter().map(|reply| wakeful_workflow::record::text_of(&reply.content)).collect()
}

fn calls(replies: &[Reply]) -> Vec<&ToolCall> {
    let blocks = replies.iter().flat_map(|reply| &reply.content);
    blocks
        .filter_map(|block| match block {
            Block::ToolCall(call) => Some(call),
            Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => None,
        })
        .collect()
}

const TWO_TOOLS: &str = "
[[turn]]
when = 'go'
[[turn.reply]]
text = 'first'
tool_calls = [{ name = 'one', arguments = { x = '{{user}}' } }, { name = 'two' }]
[[turn.reply]]
text = '{{result.1}} {{result.2}}'
tool_calls = [{ name = 'three' }]
[[turn.reply]]
text = 'end {{result}}'
";

#[test]
fn the_request_is_these_bytes() {
    let call = ToolCall {
        call_id: CallId::from("call_1_0"),
        name: "one".into(),
        arguments: serde_json::from_str("{\"b\": 1, \"a\": {\"d\": 2, \"c\": 3}}").unwrap(),
        malformed: None,
    };
    let raw = Block::Provider { provider: "anthropic".into(), raw: json!({"type": "thinking"}) };
    let messages = vec![
        user("go"),
        Message { role: Role::Assistant, content: vec![raw, Block::ToolCall(call.clone())].into() },
        answered(&call.call_id, "one", "r"),
    ];
    let request = scripted(TWO_TOOLS).request(&context(messages));
    let expected = concat!(
        r#"{"model":"scripted/test","system":"You are a test.","tools":["a","b"],"messages":["#,
        r#"{"role":"user","content":[{"type":"text","text":"go"}]},"#,
        r#"{"role":"assistant","content":[{"type":"tool_call","call_id":"call_1_0","name":"one","#,
        r#""arguments":{"a":{"c":3,"d":2},"b":1}}]},"#,
        r#"{"role":"tool","content":[{"type":"tool_result","call_id":"call_1_0","name":"one","content":"r","#,
        r#""is_error":false}]}]}"#,
    );
    assert_eq!(String::from_utf8(request.body).unwrap(), expected);
    assert_eq!(request.repairs, wakeful_workflow::wire::Repairs::default());
}

#[tokio::test]
async fn a_turn_is_played_reply_by_reply() {
    let replies = play(&scripted(TWO_TOOLS), &mut vec![user("Go!")]).await;
    assert_eq!(texts(&replies), ["first", "[one] [two]", "end [three]"]);
    let calls = calls(&replies);
    let ids: Vec<&str> = calls.iter().map(|call| call.call_id.as_str()).collect();
    assert_eq!(ids, ["call_1_0", "call_1_1", "call_4_0"]);
    assert_eq!(calls[0].arguments, json!({"x": "Go!"}));
    assert_eq!(calls[1].arguments, json!({}));
    let reasons: Vec<FinishReason> = replies.iter().map(|reply| reply.finish_reason).collect();
    assert_eq!(reasons, [FinishReason::ToolCalls, FinishReason::ToolCalls, FinishReason::Stop]);
}

#[tokio::test]
async fn the_same_request_has_the_same_answer_in_another_process() {
    let mut messages = vec![user("go")];
    let first = play(&scripted(TWO_TOOLS), &mut messages).await;
    // Use another instance and start at each point of the conversation, as after a crash.
    let other = scripted(TWO_TOOLS);
    let starts = [1, 4, 6];
    for (start, expected) in starts.into_iter().zip(&first) {
        assert_eq!(call(&other, &messages[..start]).await.as_ref(), Ok(expected));
    }
    let request = other.request(&context(messages.clone()));
    assert_eq!(request.sha256(), scripted(TWO_TOOLS).request(&context(messages)).sha256());
}

#[tokio::test]
async fn a_new_text_of_the_user_begins_a_new_turn() {
    let model = scripted(TWO_TOOLS);
    let mut messages = vec![user("go")];
    play(&model, &mut messages).await;
    messages.push(user("go again"));
    let again = play(&model, &mut messages).await;
    assert_eq!(texts(&again), ["first", "[one] [two]", "end [three]"]);
    let mut ids: Vec<String> = messages
        .iter()
        .flat_map(|m| &m.content)
        .filter_map(part)
        .filter_map(|part| match part {
            BodyPart::ToolCall { call_id, .. } => Some(call_id.as_str().to_owned()),
            BodyPart::Text { .. } | BodyPart::ToolResult { .. } => None,
        })
        .collect();
    let all = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!((all, ids.len()), (6, 6), "a call id is used twice");
}

#[tokio::test]
async fn call_ids_do_not_repeat_where_old_messages_are_left_out() {
    let model = scripted(TWO_TOOLS);
    let mut messages = vec![user("go")];
    play(&model, &mut messages).await;
    let mut tail = messages.split_off(4);
    tail.push(user("go"));
    let reply = call(&model, &tail).await.unwrap();
    assert_eq!(calls(&[reply])[0].call_id.as_str(), "call_5_0");
}

#[tokio::test]
async fn results_in_a_message_of_the_user_are_no_new_turn() {
    let model = scripted(TWO_TOOLS);
    let first = call(&model, &[user("go")]).await.unwrap();
    let mut results = answered(&CallId::from("call_1_0"), "one", "r");
    results.role = Role::User;
    let messages = [user("go"), Message { role: Role::Assistant, content: first.content.into() }, results];
    assert_eq!(texts(&[call(&model, &messages).await.unwrap()]), ["r (no result)"]);
}

#[tokio::test]
async fn where_the_scenario_says_nothing_the_answer_says_so() {
    let model = scripted(TWO_TOOLS);
    let reply = call(&model, &[user("stop")]).await.unwrap();
    assert_eq!(texts(&[reply]), ["(Scenario `test` has no turn for this message.)"]);
    assert!(call(&model, &[]).await.is_ok());
    let mut messages = vec![user("go")];
    play(&model, &mut messages).await;
    let reply = call(&model, &messages).await.unwrap();
    assert_eq!(
        texts(&[reply]),
        ["(Scenario `test` has no reply 4 for this message: its turn ends after 3.)"]
    );
}

#[tokio::test(start_paused = true)]
async fn text_is_streamed_word_by_word_in_its_time() {
    let model = scripted("delay_ms = 500\n[[turn]]\nreply = [{ text = 'one  two\\nthree ', chunk_ms = 40 }]");
    let model_text = "one  two\\nthree ";
    let mut heard = Heard(Vec::new());
    let before = tokio::time::Instant::now();
    let reply = model.call(&model.request(&context(vec![user("x")])), &mut heard).await.unwrap();
    assert_eq!(heard.0, ["one  ", "two\\nthree "]);
    assert_eq!(texts(&[reply]), [model_text]);
    assert_eq!(before.elapsed(), Duration::from_millis(500 + 2 * 40));
}

#[tokio::test]
async fn a_fault_comes_each_time_and_after_its_text() {
    let model = scripted("[[turn]]\nreply = [{ text = 'half an', fault = { kind = 'stream_cut' } }]");
    for _ in 0..2 {
        let mut heard = Heard(Vec::new());
        let result = model.call(&model.request(&context(vec![user("x")])), &mut heard).await;
        assert_eq!(result, Err(Fault::StreamCut));
        assert_eq!(heard.0.concat(), "half an");
    }
}

#[tokio::test]
async fn an_answer_that_comes_out_blank_is_a_fault() {
    let model = scripted("[[turn]]\nreply = [{ text = '{{user}}' }]");
    assert_eq!(call(&model, &[user(" ")]).await, Err(Fault::EmptyReply));
}

#[tokio::test]
async fn a_body_of_another_model_is_a_fault() {
    let model = scripted(TWO_TOOLS);
    for body in [b"".to_vec(), b"{}".to_vec(), vec![0xff], br#"{"model":"x","messages":[]}"#.to_vec()] {
        let result = model.call(&Request::new(body), &mut NoDeltas).await;
        assert!(matches!(result, Err(Fault::Internal { .. })), "{result:?}");
    }
}

#[tokio::test]
async fn usage_is_estimated_and_what_was_sent_before_counts_as_cached() {
    let model = scripted(TWO_TOOLS);
    let replies = play(&model, &mut vec![user("go")]).await;
    let usage: Vec<Usage> = replies.iter().map(|reply| reply.usage).collect();
    assert_eq!(usage[0].cached_tokens, 0);
    assert_eq!(usage[1].cached_tokens, usage[0].input_tokens);
    assert_eq!(usage[2].cached_tokens, usage[1].input_tokens);
    assert!(usage.iter().all(|usage| usage.cached_tokens < usage.input_tokens && usage.output_tokens > 0));
}

#[tokio::test]
async fn given_usage_and_finish_reason_replace_the_estimate() {
    let model = scripted(
        "[[turn]]\nreply = [{ text = 'x', finish_reason = 'length', usage = { input_tokens = 9, cached_tokens = 4 } }]",
    );
    let reply = call(&model, &[user("x")]).await.unwrap();
    assert_eq!((reply.usage.input_tokens, reply.usage.cached_tokens, reply.usage.output_tokens), (9, 4, 1));
    assert_eq!(reply.finish_reason, FinishReason::Length);
}

#[test]
fn a_file_wins_over_the_built_in_of_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let built_in = Scripted::load(Some(dir.path()), "demo").unwrap();
    assert_eq!(built_in.scenario, Scripted::load(None, "demo").unwrap().scenario);
    std::fs::write(dir.path().join("demo.toml"), "[[turn]]\nreply = [{ text = 'mine' }]").unwrap();
    assert_eq!(Scripted::load(Some(dir.path()), "demo").unwrap().scenario.turns.len(), 1);
}

#[test]
fn what_cannot_be_loaded_is_told_with_its_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("bad.toml"), "[[turn]]\nreply = [{ txt = 'x' }]").unwrap();
    std::fs::create_dir(dir.path().join("dir.toml")).unwrap();
    let error = |dir: Option<&Path>, name: &str| Scripted::load(dir, name).unwrap_err().to_string();
    let bad = error(Some(dir.path()), "bad");
    assert!(bad.contains("bad.toml, line 2: unknown field `txt`, expected one of `text`"), "{bad}");
    let missing = error(Some(dir.path()), "missing");
    assert!(missing.contains("missing.toml") && missing.contains("built in: demo"), "{missing}");
    assert!(error(None, "missing").contains("[scripted] dir"));
    assert!(error(Some(dir.path()), "dir").contains("could not be read"));
    for name in ["", "../bad", "/etc/passwd", "a.b", "a\0", &"x".repeat(65)] {
        assert!(error(Some(dir.path()), name).contains("scenario name"), "{name:?}");
    }
}

#[test]
fn every_built_in_scenario_parses() {
    for name in Scripted::built_in() {
        let scripted = Scripted::load(None, name).unwrap();
        let last = scripted.scenario.turns.last().unwrap();
        assert_eq!(scripted.scenario.turn("\u{1}"), Some(last), "{name} has no turn for everything else");
    }
}

#[tokio::test(start_paused = true)]
async fn every_branch_of_the_demo_is_reachable() {
    let demo = Scripted::load(None, "demo").unwrap();
    let mut reached = vec![0; demo.scenario.turns.len()];
    for (said, tools, answer) in [
        ("What time is it?", &["current_time"][..], "[current_time]"),
        (
            "Please write a note about today's meeting",
            &["write_file", "read_file", "compose_email"],
            "[compose_email]",
        ),
        (
            "Write a report",
            &["write_file", "write_file", "write_file", "current_time"],
            "Done, at [current_time]",
        ),
        ("Help me choose", &["ask_user"], "[ask_user]"),
        ("Hello there", &[], "You said: Hello there"),
    ] {
        let replies = play(&demo, &mut vec![user(said)]).await;
        let called: Vec<&str> = calls(&replies).iter().map(|call| call.name.as_str()).collect();
        assert_eq!(called, tools, "{said}");
        assert!(texts(&replies).last().unwrap().contains(answer), "{said}: {:?}", texts(&replies));
        let turn =
            demo.scenario.turns.iter().position(|turn| Some(turn) == demo.scenario.turn(said)).unwrap();
        assert_eq!(replies.len(), demo.scenario.turns[turn].replies.len(), "{said}");
        reached[turn] += 1;
    }
    assert!(reached.iter().all(|&times| times == 1), "{reached:?}");
}

#[tokio::test(start_paused = true)]
async fn the_calls_of_the_demo_fit_the_tools_they_name() {
    let demo = Scripted::load(None, "demo").unwrap();
    let registry = crate::tool::registry::Registry::built_in().unwrap();
    for said in ["What time is it?", "Write a note", "Help me choose"] {
        let replies = play(&demo, &mut vec![user(said)]).await;
        for call in calls(&replies) {
            registry.validate(&call.name, &call.arguments).unwrap();
        }
    }
}
