//! What is stored as JSON: written as text, and read back. What cannot be read is corrupt, and the error says what it was.

use crate::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::corrupt("message", error))
}

/// `what` is what the text is of, for the error.
pub(crate) fn from_text<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::corrupt(what, error))
}

/// Like [`from_text`].
pub(crate) fn from_bytes<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::corrupt(what, error))
}
