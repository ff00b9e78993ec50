//! The journal: what happened to a session, one small entry each, numbered by commit order.
//!
//! Entries point at messages and never copy them. Names in capitals follow the append-only session log that
//! "events as the source of truth" harnesses use; `state_transition`, `context_update` and `checkpoint` are
//! those of a replay engine's journal.

use crate::id::{CallId, GenerationId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One journal entry, without its number and time, which the commit gives it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "payload")]
pub enum Event {
    /// A message was taken. Its text is the inbox row's.
    #[serde(rename = "MESSAGE_RECEIVED")]
    MessageReceived { inbox_id: i64 },
    /// A model call was made. Written when it ended, or when the next attempt found it cut off.
    #[serde(rename = "LLM_CALLED")]
    LlmCalled {
        generation_id: GenerationId,
        model: String,
        attempt: i64,
        request_sha256: String,
        context_strategy: String,
    },
    #[serde(rename = "GEN_START")]
    GenStart { generation_id: GenerationId, stream: bool },
    /// An earlier attempt was cut off; readers forget its chunks.
    #[serde(rename = "GEN_RESUMED")]
    GenResumed { generation_id: GenerationId, strategy: String, replaces: GenerationId, prior_chunks: i64 },
    /// The answer is in the transcript: the only truth about what the model said.
    #[serde(rename = "GEN_COMPLETE")]
    GenComplete { generation_id: GenerationId, message_number: i64, reason: String },
    /// A delivery was sent.
    #[serde(rename = "GEN_SENT")]
    GenSent { delivery_id: String, channel: String },
    /// A delivery ended in another way: it failed, expired, or nobody knows whether it was sent (`uncertain`).
    #[serde(rename = "DELIVERY_FAILED")]
    DeliveryFailed { delivery_id: String, channel: String, status: String, reason: String },
    #[serde(rename = "TOOL_INVOKED")]
    ToolInvoked { call_id: CallId, name: String, message_number: i64 },
    #[serde(rename = "TOOL_RESULT")]
    ToolResult { call_id: CallId, ok: bool, message_number: i64, bytes: usize },
    /// A guarded call was found half-way: nobody can know whether it took effect.
    #[serde(rename = "TOOL_FAILED_UNCERTAIN")]
    ToolFailedUncertain { call_id: CallId, name: String },
    #[serde(rename = "state_transition")]
    StateTransition {
        from_state: String,
        to_state: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    #[serde(rename = "context_update")]
    ContextUpdate { key: String, value: Value },
    /// Up to here the session can be folded from: the state is the blob with this hash.
    #[serde(rename = "checkpoint")]
    Checkpoint { step_number: i64, to_message_number: i64, lifecycle_state: String, state_sha256: String },
}

impl Event {
    /// The entry's type and payload as the journal stores them.
    pub fn to_row(&self) -> (String, Value) {
        let Ok(Value::Object(mut object)) = serde_json::to_value(self) else {
            unreachable!("an adjacently tagged enum with string keys serialises to an object");
        };
        let name = match object.remove("type") {
            Some(Value::String(name)) => name,
            _ => unreachable!("the tag of an adjacently tagged enum is a string"),
        };
        (name, object.remove("payload").unwrap_or(Value::Null))
    }

    /// Reads a journal row.
    ///
    /// # Errors
    /// When the type is unknown or the payload does not fit it.
    pub fn from_row(name: &str, payload: Value) -> Result<Event, serde_json::Error> {
        serde_json::from_value(serde_json::json!({ "type": name, "payload": payload }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_reads_back_from_its_row() {
        let event =
            Event::GenComplete { generation_id: "gen_1".into(), message_number: 7, reason: "stop".into() };
        let (name, payload) = event.to_row();
        assert_eq!(name, "GEN_COMPLETE");
        assert_eq!(Event::from_row(&name, payload).unwrap(), event);
    }

    #[test]
    fn an_unknown_type_is_an_error_and_no_guess() {
        assert!(Event::from_row("GEN_MAYBE", serde_json::json!({})).is_err());
    }
}
