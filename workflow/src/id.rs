//! Identifiers as newtypes, so that the compiler rejects a run's id in place of a session's.
//!
//! This module makes no new ids. That needs randomness, so the store and the worker do it.
#![deny(missing_docs)]

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The id as it is stored.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Returns the stored text.
            pub fn into_string(self) -> String {
                self.0
            }
        }

        impl From<String> for $name {
            fn from(id: String) -> Self {
                Self(id)
            }
        }

        impl From<&str> for $name {
            fn from(id: &str) -> Self {
                Self(id.to_owned())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// A session, `sess_…`.
    SessionId
);
id!(
    /// A conversation's id as it is stored: `space/id`, so that two spaces never share a conversation.
    ConversationId
);
id!(
    /// A run, `run_…`.
    RunId
);
id!(
    /// One tool call, unique within its session. Equal to the provider's id where that id is unique in the
    /// session.
    CallId
);
id!(
    /// One attempt of a model call, `gen_…`. A retry has a new one.
    GenerationId
);

/// The space of a conversation whose caller names no space.
pub const DEFAULT_SPACE: &str = "default";

/// The error for a text that is not a valid conversation id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a conversation id has 1 to 256 bytes and no control characters")]
pub struct InvalidConversationId;

/// Returns the id under which a conversation of the default space is stored.
///
/// # Errors
/// [`InvalidConversationId`] for an id that is empty, longer than 256 bytes, or has control characters.
pub fn stored_conversation_id(id: &str) -> Result<String, InvalidConversationId> {
    conversation_id_in(DEFAULT_SPACE, id)
}

/// Returns the id under which a conversation of `space` is stored.
///
/// # Errors
/// Those of [`stored_conversation_id`].
pub fn conversation_id_in(space: &str, id: &str) -> Result<String, InvalidConversationId> {
    if id.is_empty() || id.len() > 256 || id.chars().any(char::is_control) {
        return Err(InvalidConversationId);
    }
    Ok(format!("{space}/{id}"))
}

/// The space of a conversation's stored id. No space has a slash in its name.
pub fn space_of(stored: &str) -> &str {
    stored.split_once('/').map_or(DEFAULT_SPACE, |(space, _)| space)
}
