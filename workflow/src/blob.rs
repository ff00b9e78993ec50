//! Blobs: bytes that a journal entry, a message or a session's row points at by their hash.

use crate::state::State;
use sha2::Digest;

/// Bytes, named by their SHA-256.
#[derive(Clone, Debug, PartialEq)]
pub struct Blob {
    pub sha256: String,
    pub media_type: &'static str,
    pub bytes: Vec<u8>,
}

impl Blob {
    /// A state as JSON. Keys are sorted, so equal states give equal bytes.
    pub fn of_state(state: &State) -> Self {
        Blob::of(serde_json::to_vec(state).expect("a map of JSON values serialises"))
    }

    /// JSON bytes.
    pub fn of(bytes: Vec<u8>) -> Self {
        Blob::named("application/json", bytes)
    }

    /// Text.
    pub(crate) fn of_text(text: String) -> Self {
        Blob::named("text/plain; charset=utf-8", text.into_bytes())
    }

    fn named(media_type: &'static str, bytes: Vec<u8>) -> Self {
        Blob { sha256: hex::encode(sha2::Sha256::digest(&bytes)), media_type, bytes }
    }
}
