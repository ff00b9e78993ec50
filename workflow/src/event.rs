//! The journal: one small entry for each thing that happened to a session, numbered in commit order.
//!
//! Entries point at messages and never copy them. Names in capitals follow the append-only session logs of
//! other agent harnesses. `state_transition`, `context_update` and `checkpoint` are the names of a replay
//! engine's journal.
//!
//! Streamed text (GEN_CHUNK in other systems) has no entry. Each chunk is a row of `generation_chunks` and a
//! frame of the live stream, without a journal number. Chunks are committed asynchronously and may be lost
//! with the server, and a journal number must never be used twice.
#![doc = include_str!("event.md")]

use crate::generation::Purpose;
use crate::id::{CallId, ConversationId, GenerationId, SessionId};
use crate::record::Usage;
use crate::session::SessionStatus;
use crate::strategy::Rebase;
use crate::workspace::Snapshot;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One journal entry, without its number and time, which the commit gives it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "payload")]
pub enum Event {
    /// The inbox accepted a message. The inbox row holds its text.
    #[serde(rename = "MESSAGE_RECEIVED")]
    MessageReceived { inbox_id: i64 },
    /// A trigger opened a new run, whose id is in the row's `run_id`.
    #[serde(rename = "trigger_event")]
    TriggerEvent {
        trigger_type: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        trigger_id: Option<String>,
    },
    /// A model call was made. Written when it ended, or when the next attempt found it interrupted.
    #[serde(rename = "LLM_CALLED")]
    LlmCalled {
        generation_id: GenerationId,
        model: String,
        attempt: i64,
        request_sha256: String,
        context_strategy: String,
        /// The request's tokens, as the provider counted them. `None` for a call that was interrupted.
        #[serde(default)]
        prompt_tokens: Option<i64>,
        /// How many changes the projection made to the request's copy of the transcript.
        #[serde(default)]
        repairs: i64,
        /// Length of the prefill, when the call resumed one that was interrupted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        prefill_bytes: Option<i64>,
        /// When the call began, by the database's clock. The entry's own time is the time of the commit.
        #[serde(default)]
        started_at: Option<String>,
        #[serde(default, skip_serializing_if = "Purpose::is_reply")]
        purpose: Purpose,
    },
    /// From this call on the context begins at another message, so the provider's prompt cache misses once.
    #[serde(rename = "CONTEXT_REBASED")]
    ContextRebased(Rebase),
    /// The model failed to write a summary. The context stays as it was.
    #[serde(rename = "COMPACTION_FAILED")]
    CompactionFailed {
        generation_id: GenerationId,
        reason: String,
        /// Failures since the last success or the beginning of the run.
        failures: i64,
    },
    #[serde(rename = "GEN_START")]
    GenStart { generation_id: GenerationId, stream: bool },
    /// An earlier attempt was interrupted and a later one takes its place.
    #[serde(rename = "GEN_RESUMED")]
    GenResumed {
        generation_id: GenerationId,
        /// `replace`: readers drop the earlier attempt's text. `resume`: the new attempt begins with that
        /// text.
        strategy: String,
        replaces: GenerationId,
        /// Number of the earlier attempt's last chunk, or -1 if it has none.
        #[serde(alias = "prior_chunks")]
        prior_seq: i64,
    },
    /// A call was interrupted and is not repeated: its run was cancelled or failed.
    #[serde(rename = "GEN_FAILED")]
    GenFailed {
        generation_id: GenerationId,
        reason: String,
        /// What a call that was cancelled has used: the tokens that were seen, and an estimate of the others. The session's
        /// totals have them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        estimated: Option<Usage>,
    },
    /// An attempt at the step failed and is repeated later. The call that failed gets its own entries when the next one
    /// ends.
    #[serde(rename = "ATTEMPT_FAILED")]
    AttemptFailed {
        /// `provider/model`.
        model: String,
        /// The fault's kind as one word.
        fault: String,
        reason: String,
        /// How many attempts of this step have failed since its last progress, this one included.
        attempt: i64,
        /// The run fails after so many attempts. `None`: the duration of the outage counts, not the number of attempts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attempts: Option<i64>,
        /// When the next attempt is made. `None`: when the provider's gate lets it through.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_in_ms: Option<i64>,
    },
    /// The model's reply is complete. The transcript has its text.
    #[serde(rename = "GEN_COMPLETE")]
    GenComplete { generation_id: GenerationId, message_number: i64, reason: String },
    /// A delivery was sent.
    #[serde(rename = "GEN_SENT")]
    GenSent { delivery_id: String, channel: String },
    /// A delivery failed, expired, or may have been sent (`uncertain`).
    #[serde(rename = "DELIVERY_FAILED")]
    DeliveryFailed { delivery_id: String, channel: String, status: String, reason: String },
    /// An operator queued an unsent delivery again.
    #[serde(rename = "DELIVERY_RESENT")]
    DeliveryResent {
        delivery_id: String,
        channel: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A delivery was sent and did not reach one of its recipients. `how`: the server refused this recipient (`refused`), or
    /// the message came back (`bounced`).
    #[serde(rename = "DELIVERY_BOUNCED")]
    DeliveryBounced {
        delivery_id: String,
        channel: String,
        recipient: String,
        how: String,
        /// The server's status code: `5.1.1`, or `550`.
        status: String,
        reason: String,
    },
    /// The workspace has changed, and this is what it holds now.
    #[serde(rename = "WORKSPACE_SNAPSHOT")]
    WorkspaceSnapshot(Snapshot),
    #[serde(rename = "TOOL_INVOKED")]
    ToolInvoked { call_id: CallId, name: String, message_number: i64 },
    #[serde(rename = "TOOL_RESULT")]
    ToolResult {
        call_id: CallId,
        ok: bool,
        message_number: i64,
        /// Size of the whole output.
        bytes: usize,
        /// The blob with the whole output, if the message has only its beginning and its end.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        output_sha256: Option<String>,
    },
    /// A guarded call was started and did not end, so it may have taken effect.
    #[serde(rename = "TOOL_FAILED_UNCERTAIN")]
    ToolFailedUncertain {
        call_id: CallId,
        name: String,
        /// What is known of its end: it took too long, it failed inside, or its run was cancelled. `None`: its worker died.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A person said what happened to an uncertain effect, or whether a call may run. `effect` is the id of a call or a delivery.
    #[serde(rename = "EFFECT_RESOLVED")]
    EffectResolved {
        effect: String,
        resolution: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The session was forked from another one and begins with that session's messages up to
    /// `at_message_number`. Always the first entry.
    #[serde(rename = "SESSION_FORKED")]
    SessionForked {
        parent_session_id: SessionId,
        parent_conversation_id: ConversationId,
        at_message_number: i64,
        /// The message at which the caller asked to fork.
        asked_message_number: i64,
        /// Why the fork begins at another message than the caller asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        moved: Option<String>,
        /// Hash of the fork request. A repeated request must have the same hash.
        request_sha256: String,
    },
    /// The person who waits for the run was told that it failed, or that it takes long. `channel`: by which channel a message
    /// of it leaves. `None`: this entry is the message, for readers of the stream.
    #[serde(rename = "PERSON_TOLD")]
    PersonTold {
        reason: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        channel: Option<String>,
        text: String,
    },
    /// The session was a task of Absurd. Always the first entry.
    #[serde(rename = "SESSION_IMPORTED")]
    SessionImported {
        /// `absurd:` and the queue's name.
        source: String,
        task_id: String,
        task_name: String,
        /// Absurd's word for what the task was doing.
        task_state: String,
        /// How its checkpoints were read.
        shape: String,
        /// How many checkpoints it had.
        checkpoints: i64,
    },
    /// A person or a program steered the session: retry, cancel, wake, archive, terminate, fork. The entries around
    /// it say what came of it.
    #[serde(rename = "SESSION_STEERED")]
    SessionSteered {
        verb: String,
        by: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A person ended the session for good.
    #[serde(rename = "SESSION_TERMINATED")]
    SessionTerminated {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    #[serde(rename = "state_transition")]
    StateTransition {
        from_state: String,
        to_state: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The run ended or paused. A checkpoint follows if the session could be read.
    #[serde(rename = "invocation_result")]
    InvocationResult {
        /// `false` if the session failed, was cancelled or terminated, or needs an operator.
        ok: bool,
        status: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    #[serde(rename = "context_update")]
    ContextUpdate {
        key: String,
        #[serde(flatten)]
        value: UpdateValue,
    },
    /// A starting point for a fold of the journal. The blob `state_sha256` holds the state at this entry.
    #[serde(rename = "checkpoint")]
    Checkpoint { step_number: i64, to_message_number: i64, lifecycle_state: String, state_sha256: String },
}

/// The value of an [`Event::ContextUpdate`]: inline, or a pointer to the blob that holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum UpdateValue {
    /// This variant must come first. A printed journal has both the pointer and the value, and then the value
    /// is read.
    Inline {
        value: Value,
    },
    Blob {
        value_sha256: String,
        bytes: usize,
    },
}

impl Event {
    /// Returns the entry for a run that ends or pauses with the session in `status`.
    pub fn invocation_result(status: SessionStatus, error: Option<&str>) -> Event {
        let ok = match status {
            SessionStatus::Failed
            | SessionStatus::Cancelled
            | SessionStatus::NeedsAttention
            | SessionStatus::Terminated => false,
            SessionStatus::Created
            | SessionStatus::Queued
            | SessionStatus::Running
            | SessionStatus::WaitingInput
            | SessionStatus::Completed
            | SessionStatus::Archived => true,
        };
        Event::InvocationResult { ok, status: status.as_str().to_owned(), error: error.map(str::to_owned) }
    }

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

    /// Like [`Self::to_row`], with the payload as JSON text. Each step commit writes several, so no tree is built for them.
    pub fn to_row_text(&self) -> (String, String) {
        let text = serde_json::to_string(self).unwrap_or_default();
        let parts = text
            .strip_prefix("{\"type\":\"")
            .and_then(|rest| rest.split_once("\",\"payload\":"))
            .and_then(|(name, rest)| Some((name.to_owned(), rest.strip_suffix('}')?.to_owned())));
        parts.unwrap_or_else(|| {
            let (name, payload) = self.to_row();
            (name, payload.to_string())
        })
    }

    /// Reads a journal row.
    ///
    /// # Errors
    /// When the type is unknown or the payload does not fit it.
    pub fn from_row(name: &str, mut payload: Value) -> Result<Event, serde_json::Error> {
        // Old entries store the number of chunks, and old chunks were numbered from 1. So the count equals
        // the last number, except for zero chunks.
        if let Some(prior_chunks) = payload.get_mut("prior_chunks").filter(|count| **count == 0) {
            *prior_chunks = Value::from(-1);
        }
        serde_json::from_value(serde_json::json!({ "type": name, "payload": payload }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_entry_reads_back_from_its_row() {
        let event =
            Event::GenComplete { generation_id: "gen_1".into(), message_number: 7, reason: "stop".into() };
        let (name, payload) = event.to_row();
        assert_eq!(name, "GEN_COMPLETE");
        let (same_name, text) = event.to_row_text();
        assert_eq!((same_name, serde_json::from_str(&text).unwrap()), (name.clone(), payload.clone()));
        assert_eq!(Event::from_row(&name, payload).unwrap(), event);
    }

    #[test]
    fn entries_of_before_a_field_was_added_still_read() {
        let old = json!({"generation_id": "gen_1", "model": "m", "attempt": 1, "request_sha256": "00",
            "context_strategy": "full"});
        let Event::LlmCalled { prompt_tokens, repairs, started_at, .. } =
            Event::from_row("LLM_CALLED", old).unwrap()
        else {
            panic!("another entry")
        };
        assert_eq!((prompt_tokens, repairs, started_at), (None, 0, None));
    }

    #[test]
    fn a_value_is_written_as_it_is_or_as_a_pointer() {
        let inline =
            Event::ContextUpdate { key: "k".into(), value: UpdateValue::Inline { value: Value::Null } };
        assert_eq!(inline.to_row().1, json!({"key": "k", "value": null}));
        let blob = Event::ContextUpdate {
            key: "\",\"payload\":{}".into(),
            value: UpdateValue::Blob { value_sha256: "00".into(), bytes: 9 },
        };
        let key = "\",\"payload\":{}";
        assert_eq!(blob.to_row().1, json!({"key": key, "value_sha256": "00", "bytes": 9}));
        for event in [inline, blob] {
            let (name, payload) = event.to_row();
            let (same_name, text) = event.to_row_text();
            assert_eq!((same_name, serde_json::from_str(&text).unwrap()), (name.clone(), payload.clone()));
            assert_eq!(Event::from_row(&name, payload).unwrap(), event);
        }
    }

    #[test]
    fn entries_of_old_are_still_read() {
        for (prior_chunks, last) in [(0, -1), (3, 3)] {
            let payload = serde_json::json!({
                "generation_id": "gen_2", "strategy": "replace", "replaces": "gen_1", "prior_chunks": prior_chunks,
            });
            let Event::GenResumed { prior_seq, .. } = Event::from_row("GEN_RESUMED", payload).unwrap() else {
                panic!("another type");
            };
            assert_eq!(prior_seq, last);
        }
    }

    #[test]
    fn an_unknown_type_is_an_error_and_no_guess() {
        assert!(Event::from_row("GEN_MAYBE", serde_json::json!({})).is_err());
    }
}
