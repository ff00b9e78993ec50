//! Made-up sessions, messages and outcomes for the tests of the store.

use serde_json::{Value, json};
use wakeful_store::new_id;
use wakeful_store::step::Performance;
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::advance::{CallEnd, EndedCall, Generated, Performed};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::record::{Block, FinishReason, Reply, Role, ToolCall, Usage};
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::{CallOutcome, CallStatus};
use wakeful_workflow::strategy::Strategy;

pub(super) fn new_session(conversation: &str, trigger: &str) -> NewSession {
    NewSession {
        space_id: "default".into(),
        mailbox_id: "default".into(),
        conversation_id: format!("default/{conversation}"),
        trigger_type: "chat".into(),
        trigger_id: trigger.into(),
        continues: Continues::Trigger,
        agent: "default".into(),
        model_id: "test/test".into(),
        model_context_window: 1000,
        tools: vec![reserve()],
        policy: SessionPolicy::default(),
        repository_id: None,
        speaker: None,
        only_agent: false,
        seeds: vec![Seed { role: Role::System, content: "You are a test.".into(), is_new: true }],
    }
}

fn reserve() -> ToolDefinition {
    ToolDefinition::new("reserve", "Reserves a table.", json!({"type": "object"}), Effect::Idempotent)
}

pub(super) fn message(text: &str) -> NewMessage {
    NewMessage {
        client_key: None,
        text: text.into(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    }
}

pub(super) fn performance() -> Performance<'static> {
    Performance { elapsed_s: 0.1, attempt: 1, intent: None }
}

pub(super) fn text(text: &str) -> Block {
    Block::Text { text: text.into() }
}

pub(super) fn call(id: &str, name: &str) -> ToolCall {
    ToolCall { call_id: id.into(), name: name.into(), arguments: json!({}), malformed: None }
}

pub(super) fn asks(call: &ToolCall) -> Block {
    Block::ToolCall(call.clone())
}

pub(super) fn replied(content: Vec<Block>) -> Performed {
    let effects = [
        ("reserve", Effect::Idempotent),
        ("charge", Effect::Guarded),
        ("compose_email", Effect::Pure),
        ("ask_user", Effect::Pure),
    ];
    let calls = content.iter().any(|block| matches!(block, Block::ToolCall(_)));
    Performed::Replied(Generated {
        generation_id: new_id("gen").into(),
        attempt: 1,
        model: "test/test".into(),
        request_sha256: "0".into(),
        started_at: Some("2026-01-01T00:00:00+00:00".into()),
        repairs: 0,
        resumes: None,
        prefill_bytes: None,
        context_strategy: Strategy::Full,
        rebase: None,
        reply: Reply::new(
            content,
            if calls { FinishReason::ToolCalls } else { FinishReason::Stop },
            Usage {
                input_tokens: 100,
                output_tokens: 10,
                cached_tokens: 40,
                cache_write_tokens: 2,
                cost_micros: 7,
            },
        ),
        effects: effects.map(|(name, effect)| (name.to_owned(), effect)).into(),
    })
}

pub(super) fn done(content: &str, details: Option<Value>) -> CallEnd {
    CallEnd::Settled(CallStatus::Done, CallOutcome { content: content.into(), is_error: false, details })
}

pub(super) fn performed(call: &ToolCall, ending: CallEnd) -> EndedCall {
    EndedCall { call: call.clone(), ending }
}

pub(super) fn asked(call: &ToolCall) -> Performed {
    Performed::Called(vec![performed(call, CallEnd::Asked("When?".into()))])
}
