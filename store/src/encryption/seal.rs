//! Seals before a write, and opens after a read.

use super::fields;
use super::token::{DataKey, Kind};
use crate::Result;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::Arc;
use wakeful_workflow::event::Event;

/// What stands in a row of the installation, or of several conversations, in place of words of an encrypted one.
pub(crate) const SEALED: &str = "[sealed]";

/// The error of a run that was cancelled. Statements look for it.
const CANCELLED: &str = "cancelled";

/// Seals and opens the texts of one conversation. The default leaves all as it is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seal(pub(super) Option<Arc<DataKey>>);

impl Seal {
    /// Returns whether the texts are sealed.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The id of the data key.
    pub fn key_id(&self) -> Option<&str> {
        self.0.as_ref().map(|key| key.id.as_str())
    }

    /// Seals a text.
    pub fn text<'t>(&self, text: &'t str) -> Cow<'t, str> {
        match &self.0 {
            Some(key) => Cow::Owned(key.seal(Kind::Text, text)),
            None => Cow::Borrowed(text),
        }
    }

    /// Seals the texts within a row's JSON: see [`fields`].
    pub fn value(&self, value: &mut Value) {
        if let Some(key) = &self.0 {
            fields::seal(key, value);
        }
    }

    /// Like [`Seal::value`], for JSON as text.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is not JSON.
    pub fn json(&self, json: String) -> Result<String> {
        if self.0.is_none() {
            return Ok(json);
        }
        let mut value: Value = crate::json::from_text("message", &json)?;
        self.value(&mut value);
        Ok(value.to_string())
    }

    /// Seals why a run, a session or an attempt failed.
    pub fn error<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if text == CANCELLED { Cow::Borrowed(text) } else { self.text(text) }
    }

    /// The words of an encrypted conversation in a row that does not belong to it.
    pub fn elsewhere<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.is_on() { Cow::Borrowed(SEALED) } else { Cow::Borrowed(text) }
    }

    /// Seals the words of a receipt, of what did not arrive, or of a person's decision.
    pub fn reasons(&self, value: &mut Value) {
        if let Some(key) = &self.0 {
            fields::reasons(key, value);
        }
    }

    /// Seals every text of a receipt, except types and hashes.
    pub fn receipt(&self, mut receipt: Value) -> Value {
        if let Some(key) = &self.0 {
            fields::leaves(key, &mut receipt);
        }
        receipt
    }

    /// Like [`Seal::reasons`], for a value.
    pub fn with_reasons(&self, mut value: Value) -> Value {
        self.reasons(&mut value);
        value
    }

    /// Seals the names and the values of a state.
    pub fn state(&self, state: Map<String, Value>) -> Map<String, Value> {
        match &self.0 {
            Some(key) => fields::state(key, state),
            None => state,
        }
    }

    /// The type and the payload of a journal entry, as they are stored.
    pub fn entry(&self, event: &Event) -> (String, String) {
        if self.0.is_none() {
            return event.to_row_text();
        }
        let (kind, mut payload) = event.to_row();
        self.payload(&kind, &mut payload);
        (kind, payload.to_string())
    }

    /// Seals the words of a journal entry.
    pub fn payload(&self, kind: &str, payload: &mut Value) {
        if let Some(key) = &self.0 {
            fields::entry(key, kind, payload);
        }
    }

    /// The hash that a repeated message is compared with.
    pub fn hash(&self, sha256: String) -> String {
        match &self.0 {
            Some(key) => key.mac(&sha256),
            None => sha256,
        }
    }

    /// Seals bytes.
    pub fn bytes(&self, bytes: &[u8]) -> Vec<u8> {
        self.0.as_ref().map_or_else(|| bytes.to_vec(), |key| key.seal_bytes(bytes))
    }

    /// Opens bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn open_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match &self.0 {
            Some(key) => key.open_bytes(&bytes),
            None => Ok(bytes),
        }
    }

    /// Opens the sealed values within a text.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for one that was changed or cut.
    pub fn open(&self, text: String) -> Result<String> {
        match &self.0 {
            Some(key) => Ok(key.open_within(&text, false)?.unwrap_or(text)),
            None => Ok(text),
        }
    }

    /// Like [`Seal::open`], for a text that may be missing.
    ///
    /// # Errors
    /// Those of [`Seal::open`].
    pub fn open_some(&self, text: Option<String>) -> Result<Option<String>> {
        text.map(|text| self.open(text)).transpose()
    }

    /// Opens the sealed values within JSON as text.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for one that was changed or cut.
    pub fn open_json(&self, json: String) -> Result<String> {
        match &self.0 {
            Some(key) => Ok(key.open_within(&json, true)?.unwrap_or(json)),
            None => Ok(json),
        }
    }

    /// Opens the sealed values within a value.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for one that was changed or cut.
    pub fn open_value(&self, value: Value) -> Result<Value> {
        if self.0.is_none() {
            return Ok(value);
        }
        crate::json::from_text("sealed value", &self.open_json(value.to_string())?)
    }
}
