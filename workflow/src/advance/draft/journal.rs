//! The draft's journal entries: model calls that were interrupted, changes of the state, and checkpoints.

use super::{Draft, INLINE_VALUE_BYTES};
use crate::agent::JournalLevel;
use crate::blob::Blob;
use crate::derive::StateUpdate;
use crate::event::{Event, UpdateValue};
use crate::generation::InterruptedCall;
use crate::id::GenerationId;
use crate::record::{ToolCall, Usage, without_nul};
use crate::session::SessionStatus;

impl Draft<'_> {
    /// Writes journal entries for the model calls that were interrupted, in the commit with which the step goes
    /// on. They must not be written earlier: the rows of those calls commit asynchronously and may be lost,
    /// and a journal number must never be used twice. Each entry names the attempt that follows. `after` says
    /// what follows the last one.
    pub(super) fn journal_interrupted(&mut self, after: &After<'_>) {
        let session = self.session;
        let attempts = &session.interrupted;
        for (index, attempt) in attempts.iter().enumerate() {
            if !attempt.purpose.is_reply() {
                // Readers never saw the text of a summary, so no entry tells them to drop it.
                let generation_id = attempt.generation_id.clone();
                let end = Event::GenFailed { generation_id, reason: "cut off".to_owned(), estimated: None };
                self.transition.events.extend([llm_called(attempt), end]);
                continue;
            }
            let resumed_by = |next: &GenerationId, resumes: Option<&GenerationId>| Event::GenResumed {
                generation_id: next.clone(),
                strategy: if resumes == Some(&attempt.generation_id) { "resume" } else { "replace" }
                    .to_owned(),
                replaces: attempt.generation_id.clone(),
                prior_seq: attempt.last_chunk,
            };
            let next = attempts[index + 1..].iter().find(|next| next.purpose.is_reply());
            let end = match (next, after) {
                (Some(next), _) => resumed_by(&next.generation_id, next.resumes.as_ref()),
                (None, After::Replied(generation_id, resumes)) => resumed_by(generation_id, *resumes),
                (None, After::Nothing(reason)) => Event::GenFailed {
                    generation_id: attempt.generation_id.clone(),
                    reason: (*reason).to_owned(),
                    estimated: None,
                },
            };
            self.transition.events.extend([
                llm_called(attempt),
                Event::GenStart { generation_id: attempt.generation_id.clone(), stream: true },
                end,
            ]);
        }
    }

    /// Says in the newest call's entry what it has used.
    pub(super) fn journal_cut_off(&mut self, cut_off: Option<Usage>) {
        if let Some(Event::GenFailed { estimated, .. }) = self.transition.events.last_mut() {
            *estimated = cut_off;
        }
    }

    pub(super) fn journal_update(&mut self, update: &StateUpdate) {
        let json = update.value.to_string();
        let value = if json.len() > INLINE_VALUE_BYTES {
            let blob = Blob::of(json.into_bytes());
            let pointer = UpdateValue::Blob { value_sha256: blob.sha256.clone(), bytes: blob.bytes.len() };
            self.transition.blobs.push(blob);
            pointer
        } else {
            UpdateValue::Inline { value: update.value.clone() }
        };
        self.transition.events.push(Event::ContextUpdate { key: update.key.clone(), value });
    }

    pub(super) fn journal_uncertain(&mut self, call: &ToolCall, reason: Option<String>) {
        let (call_id, name) = (call.call_id.clone(), call.name.clone());
        let reason = reason.map(without_nul);
        self.transition.events.push(Event::ToolFailedUncertain { call_id, name, reason });
    }

    /// Returns whether the state changed and no journal entry holds the change. Then the commit needs a
    /// checkpoint.
    pub(super) fn only_a_checkpoint_tells(&self) -> bool {
        self.policy.journal == JournalLevel::Checkpoint && !self.transition.state_updates.is_empty()
    }

    pub(super) fn moved_to(&self, status: SessionStatus, reason: Option<String>) -> Event {
        Event::StateTransition {
            from_state: self.session.status.as_str().to_owned(),
            to_state: status.as_str().to_owned(),
            reason,
        }
    }

    pub(super) fn checkpoint(&self, status: SessionStatus) -> (Event, Blob) {
        let snapshot = Blob::of_state(&self.state);
        let committed = match &self.transition.step {
            Some(step) => (self.transition.step_number, step.to_message_number),
            None => (self.session.last_step_number, self.session.to_message_number),
        };
        let event = Event::Checkpoint {
            step_number: committed.0,
            to_message_number: committed.1,
            lifecycle_state: status.as_str().to_owned(),
            state_sha256: snapshot.sha256.clone(),
        };
        (event, snapshot)
    }
}

/// How the step continues after the attempts that were interrupted.
pub(super) enum After<'a> {
    /// The generation that replied, and the attempt whose text it resumed, if it resumed one.
    Replied(&'a GenerationId, Option<&'a GenerationId>),
    /// No attempt replaces them, for this reason.
    Nothing(&'a str),
}

fn llm_called(attempt: &InterruptedCall) -> Event {
    Event::LlmCalled {
        generation_id: attempt.generation_id.clone(),
        model: attempt.model.clone(),
        attempt: attempt.attempt,
        request_sha256: attempt.request_sha256.clone(),
        context_strategy: attempt.context_strategy.clone(),
        prompt_tokens: None,
        repairs: attempt.repairs,
        prefill_bytes: None,
        started_at: Some(attempt.started_at.clone()),
        purpose: attempt.purpose,
    }
}
