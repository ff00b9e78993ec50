use super::*;

const AT: &str = "2026-01-31T12:00:00.000000Z";

fn task(state: TaskState) -> Task {
    Task {
        queue: "default".to_owned(),
        task_id: "0190".to_owned(),
        name: "agent".to_owned(),
        params: json!({"prompt": "Hi"}),
        state,
        attempt: 1,
        enqueued_at: AT.to_owned(),
        started_at: None,
        ended_at: None,
        failure: None,
        result: None,
        idempotency_key: None,
        waits_for: None,
        wakes_at: None,
        parked: false,
    }
}

fn listed(name: &str) -> Listed {
    Listed {
        name: name.to_owned(),
        status: "committed".to_owned(),
        attempt: Some(1),
        updated_at: AT.to_owned(),
        bytes: 1,
    }
}

fn build(task: &Task, shape: &Shape, checkpoints: &[(&str, Value)]) -> (Vec<RecordRow>, Built) {
    let mut builder = Builder::new(Ids::of("default", "default", "0190", 1), 1, task);
    let mut records = Vec::new();
    for (name, state) in checkpoints {
        let reading = shape.read(name, state).unwrap();
        records.extend(builder.add(shape, &listed(name), reading).unwrap());
    }
    (records, builder.finish(task, &Fate::of(task)))
}

fn asks(id: &str) -> Value {
    json!({"role": "assistant", "content": [{"type": "tool-call", "toolCallId": id, "toolName": "look", "input": {}}]})
}

fn got(id: &str) -> Value {
    json!({"role": "tool", "content": [{"type": "tool-result", "toolCallId": id, "toolName": "look",
        "output": {"type": "text", "value": "seen"}}]})
}

#[test]
fn each_step_points_at_its_messages_and_the_opening_belongs_to_the_first() {
    let (records, built) = build(
        &task(TaskState::Completed),
        &Shape::NewMessages,
        &[
            ("initial-message", json!({"role": "user", "content": "Hi"})),
            ("agent-loop", json!({"newMessages": [asks("a"), got("a")], "finishReason": "tool-calls"})),
            (
                "agent-loop#2",
                json!({"newMessages": [{"role": "assistant", "content": "Done."}], "finishReason": "stop"}),
            ),
        ],
    );
    assert_eq!(records.iter().map(|row| row.message_number).collect::<Vec<_>>(), [2, 3, 4, 5]);
    assert_eq!(records.iter().map(|row| row.step_number).collect::<Vec<_>>(), [1, 1, 1, 2]);
    let steps: Vec<_> = built
        .steps
        .iter()
        .map(|step| {
            (
                step.from_message_number,
                step.to_message_number,
                step.finish_reason.as_str(),
                step.executed_local_tool_count,
            )
        })
        .collect();
    assert_eq!(steps, [(1, 4, "tool_calls", 1), (4, 5, "stop", 0)]);
    assert_eq!(built.unknown_usage, [1, 2]);
    assert_eq!((built.calls[0].status, built.calls[0].result_message_number), (CallStatus::Done, Some(4)));
    assert_eq!((built.run.steps, built.totals.turns, built.to_message_number), (2, 2, 5));
}

#[test]
fn a_log_of_messages_has_a_step_for_each_reply() {
    let message = |raw: Value| json!({"message": raw});
    let (records, built) = build(
        &task(TaskState::Completed),
        &Shape::MessageLog,
        &[
            ("message", message(json!({"role": "user", "content": "Hi"}))),
            (
                "message#2",
                message(
                    json!({"role": "assistant", "usage": {"input": 3, "output": 1}, "stopReason": "toolUse",
                "content": [{"type": "toolCall", "id": "a", "name": "look", "arguments": {}}]}),
                ),
            ),
            (
                "message#3",
                message(json!({"role": "toolResult", "toolCallId": "a", "toolName": "look", "content": []})),
            ),
            ("message#4", message(json!({"role": "assistant", "content": [], "stopReason": "stop"}))),
        ],
    );
    assert_eq!(records.iter().map(|row| row.step_number).collect::<Vec<_>>(), [1, 1, 1, 2]);
    assert_eq!(built.steps.len(), 2);
    assert_eq!((built.totals.usage.input_tokens, &built.unknown_usage[..]), (3, &[2][..]));
}

#[test]
fn calls_without_a_result_are_asked_uncertain_or_over() {
    let open = [("agent-loop", json!({"newMessages": [asks("old"), asks("a")]}))];
    let statuses = |task: &Task| {
        let (_, built) = build(task, &Shape::NewMessages, &open);
        (built.calls.iter().map(|call| call.status).collect::<Vec<_>>(), built.steps.len())
    };
    let waits = Task { waits_for: Some("approved".to_owned()), ..task(TaskState::Sleeping) };
    assert_eq!(statuses(&waits), (vec![CallStatus::Abandoned, CallStatus::Waiting], 1));
    // The step goes on here, so it is not complete.
    assert_eq!(statuses(&task(TaskState::Failed)), (vec![CallStatus::Abandoned, CallStatus::Uncertain], 0));
    assert_eq!(
        statuses(&task(TaskState::Completed)),
        (vec![CallStatus::Abandoned, CallStatus::Abandoned], 1)
    );
}

#[test]
fn a_fate_for_each_state() {
    let of = |task: &Task| (Fate::of(task).session, Fate::of(task).job);
    assert_eq!(of(&task(TaskState::Completed)), (SessionStatus::Completed, None));
    assert_eq!(of(&task(TaskState::Cancelled)), (SessionStatus::Failed, None));
    assert_eq!(of(&task(TaskState::Pending)), (SessionStatus::Queued, Some(None)));
    let sleeps = Task { wakes_at: Some(AT.to_owned()), ..task(TaskState::Sleeping) };
    assert_eq!(of(&sleeps), (SessionStatus::Queued, Some(Some(AT.to_owned()))));
    let waits = Task { waits_for: Some("e".to_owned()), ..sleeps };
    assert_eq!(of(&waits), (SessionStatus::WaitingInput, None));
    let failed = Task { failure: Some(json!({"message": "no more"})), ..task(TaskState::Failed) };
    assert_eq!(Fate::of(&failed).error.as_deref(), Some("no more"));
}

#[test]
fn updates_and_other_checkpoints_become_state() {
    let task = Task { result: Some(json!("ok")), ..task(TaskState::Completed) };
    let mut builder = Builder::new(Ids::of("default", "default", "0190", 1), 0, &task);
    let state = json!({"appendedMessages": [], "conversationUpdates": [{"key": "name", "value": "Bob"}]});
    let reading = Shape::AgentLoop.read("agent-loop", &state).unwrap();
    builder.add(&Shape::AgentLoop, &listed("agent-loop"), reading).unwrap();
    builder.other("send-mail", json!({"id": 7}));
    builder.other("big", json!("x".repeat(9000)));
    let built = builder.finish(&task, &Fate::of(&task));
    assert_eq!((&built.state["name"], &built.state["absurd/send-mail"]["id"]), (&json!("Bob"), &json!(7)));
    assert_eq!(
        (&built.state["absurd/$result"], &built.state["absurd/big"]["bytes"]),
        (&json!("ok"), &json!(9002))
    );
}

#[test]
fn the_ids_depend_on_the_task_alone() {
    let ids = Ids::of("default", "q", "t", 1);
    assert_eq!(ids, Ids::of("default", "q", "t", 1));
    for other in
        [Ids::of("other", "q", "t", 1), Ids::of("default", "r", "t", 1), Ids::of("default", "q", "t", 2)]
    {
        assert_ne!(ids.session_id, other.session_id);
    }
}
