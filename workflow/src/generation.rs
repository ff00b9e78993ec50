//! Model calls in flight: their purpose, and the rows that remain of a call when its worker dies.

use crate::id::GenerationId;
use serde::{Deserialize, Serialize};

/// A model call that a worker began and did not finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterruptedCall {
    pub generation_id: GenerationId,
    pub attempt: i64,
    pub model: String,
    /// Hash of the bytes that were sent.
    pub request_sha256: String,
    /// When the call began, by the database's clock.
    pub started_at: String,
    /// Hash of the same request without its prefill. `None` if the worker did not store it.
    pub base_sha256: Option<String>,
    /// What the projection changed in the request.
    pub repairs: i64,
    /// Number of the last chunk that readers may have seen; -1 without chunks.
    pub last_chunk: i64,
    /// The attempt whose text this one resumed.
    pub resumes: Option<GenerationId>,
    /// Its chunks hold its whole output, and the provider has not refused to resume from it.
    pub resumable: bool,
    pub purpose: Purpose,
    /// How its context was selected.
    pub context_strategy: String,
}

/// What a model call is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// The reply of the session's turn.
    #[default]
    Reply,
    /// A summary of the context. It is not streamed to readers.
    Compaction,
}

impl Purpose {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Purpose::Reply => "reply",
            Purpose::Compaction => "compaction",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<Purpose> {
        [Purpose::Reply, Purpose::Compaction].into_iter().find(|purpose| purpose.as_str() == word)
    }

    /// Returns whether the call produces the reply of a turn.
    pub fn is_reply(&self) -> bool {
        *self == Purpose::Reply
    }
}
