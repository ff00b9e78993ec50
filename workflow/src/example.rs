//! Example sessions for tests.

use crate::effect::Effect;
use crate::generation::{InterruptedCall, Purpose};
use crate::policy::SessionPolicy;
use crate::record::{Block, Details, FinishReason, Record, Role, ToolCall, ToolResult, Usage};
use crate::seed::Seed;
use crate::session::{Call, CallOutcome, CallStatus, InboxMessage, Run, Session, SessionStatus, Totals};
use crate::state::State;
use serde_json::json;

/// The current run of every example.
pub const RUN: &str = "run_2";
/// A run that has ended.
pub const EARLIER_RUN: &str = "run_1";
/// Usage of one model call of the examples.
pub const USAGE: Usage =
    Usage { input_tokens: 10, output_tokens: 5, cached_tokens: 4, cache_write_tokens: 3, cost_micros: 2 };

/// A running session. The user's message is record 2 (the seed has number 1), and no step is committed.
pub fn session() -> Session {
    Session {
        session_id: "sess_1".into(),
        conversation_id: "default/c".into(),
        parent_session_id: None,
        space_id: "default".into(),
        mailbox_id: "default".into(),
        trigger_type: "chat".into(),
        agent: "assistant".into(),
        policy: SessionPolicy::default(),
        prefix: None,
        status: SessionStatus::Running,
        cancel_requested: false,
        cancel_reason: None,
        wake_seq: 1,
        base_message_number: 1,
        last_message_number: 2,
        to_message_number: 1,
        last_event_seq: 3,
        last_step_number: 0,
        totals: Totals::default(),
        state: State::new(),
        rebase: None,
        compaction_failures: 0,
        workspace: None,
        run: Some(Run { run_id: RUN.into(), steps: 0, tokens: 0 }),
        seeds: vec![Seed { role: Role::System, content: "Be brief.".into(), is_new: true }],
        records: vec![user(2, "hello")],
        left_out: None,
        calls: Vec::new(),
        inbox: Vec::new(),
        interrupted: Vec::new(),
    }
}

/// A model call that was interrupted after its chunk `last_chunk`. Its request has the hash `00`.
pub fn interrupted(generation_id: &str, attempt: i64, last_chunk: i64) -> InterruptedCall {
    InterruptedCall {
        generation_id: generation_id.into(),
        attempt,
        model: "scripted/m".into(),
        request_sha256: "00".into(),
        started_at: "2026-01-01T00:00:01+00:00".into(),
        base_sha256: Some("00".into()),
        repairs: 0,
        last_chunk,
        resumes: None,
        resumable: true,
        purpose: Purpose::Reply,
        context_strategy: "full".into(),
    }
}

/// Like `session()`, with a turn that asks for the calls `rows`, given as ledger rows.
pub fn turn(rows: Vec<Call>) -> Session {
    let mut session = session();
    let content = rows.iter().map(|row| Block::ToolCall(tool_call(row.call_id.as_str()))).collect();
    session.records.push(assistant(3, RUN, content));
    session.last_message_number = 3;
    session.calls = rows;
    session
}

/// Like `turn()`, but a run that has ended asked for it.
pub fn turn_of_earlier_run(rows: Vec<Call>) -> Session {
    let mut session = turn(rows);
    for record in &mut session.records {
        record.run_id = EARLIER_RUN.into();
    }
    session
}

pub fn user(message_number: i64, text: &str) -> Record {
    record(message_number, RUN, Role::User, vec![Block::Text { text: text.into() }], Details::default())
}

pub fn assistant(message_number: i64, run_id: &str, content: Vec<Block>) -> Record {
    let details =
        Details { usage: Some(USAGE), finish_reason: Some(FinishReason::ToolCalls), ..Details::default() };
    record(message_number, run_id, Role::Assistant, content, details)
}

pub fn result(message_number: i64, call_id: &str) -> Record {
    let result = ToolResult {
        call_id: call_id.into(),
        name: "tool".into(),
        content: "done".into(),
        is_error: false,
        details: None,
        output: None,
    };
    record(message_number, RUN, Role::Tool, vec![Block::ToolResult(result)], Details::default())
}

fn record(message_number: i64, run_id: &str, role: Role, content: Vec<Block>, details: Details) -> Record {
    Record {
        message_number,
        run_id: run_id.into(),
        step_number: 1,
        role,
        content: content.into(),
        internal: false,
        details,
    }
}

pub fn tool_call(call_id: &str) -> ToolCall {
    ToolCall { call_id: call_id.into(), name: "tool".into(), arguments: json!({}), malformed: None }
}

/// A ledger row without an outcome.
pub fn row(call_id: &str, effect: Effect, status: CallStatus) -> Call {
    Call { call_id: call_id.into(), effect, status, outcome: None }
}

/// A ledger row that has settled.
pub fn settled(call_id: &str, status: CallStatus) -> Call {
    Call { outcome: Some(outcome("settled before")), ..row(call_id, Effect::Guarded, status) }
}

pub fn outcome(content: &str) -> CallOutcome {
    CallOutcome { content: content.into(), is_error: false, details: None }
}

pub fn message(inbox_id: i64, text: &str) -> InboxMessage {
    InboxMessage { inbox_id, text: text.into(), attachments: Vec::new() }
}
