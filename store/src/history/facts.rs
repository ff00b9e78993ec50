//! What the entries of a history say, for the OpenAPI document alone: the query makes their JSON.
#![allow(dead_code, reason = "a schema is derived from the types, and no value is made")]

use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde_json::Value;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::record::Attachment;
use wakeful_workflow::session::{CallStatus, SessionStatus};
use wakeful_workflow::trigger::TriggerSource;

/// The facts of an entry, by its type.
#[derive(JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Facts {
    Session {
        trigger_type: String,
        trigger_id: String,
        trigger_source: TriggerSource,
        agent: String,
        model_id: String,
        #[schemars(extend("enum" = SessionStatus::WORDS))]
        status: String,
        error: Option<String>,
        parent_session_id: Option<String>,
        total_turns: i32,
        total_input_tokens: i64,
        total_output_tokens: i64,
        total_cost_micros: i64,
    },
    Message(HistoryMessage),
    Reply(HistoryMessage),
    #[serde(rename = "message")]
    EarlierMessage(HistoryEarlier),
    #[serde(rename = "reply")]
    EarlierReply(HistoryEarlier),
    ToolCall {
        name: String,
        effect: Effect,
        status: CallStatus,
        message_number: i64,
        started_at: Option<DateTime<Utc>>,
        settled_at: Option<DateTime<Utc>>,
    },
    Delivery {
        channel: String,
        #[schemars(extend("enum" = crate::outbox::STATUSES))]
        status: String,
        content: Value,
        attempt: i32,
        last_error: Option<String>,
        receipt: Value,
        undelivered: Value,
        settled_at: Option<DateTime<Utc>>,
    },
}

/// What was said.
#[derive(JsonSchema)]
pub(super) struct HistoryMessage {
    message_number: i64,
    /// Who wrote it, if that is known.
    sender: Option<String>,
    /// The files that came with it.
    attachments: Option<Vec<Attachment>>,
    text: String,
    /// How many tools the model called with it.
    tool_calls: u64,
}

/// What was said before the first session.
#[derive(JsonSchema)]
pub(super) struct HistoryEarlier {
    /// Always true.
    earlier: bool,
    ordinal: i64,
    text: String,
    tool_calls: u64,
}
