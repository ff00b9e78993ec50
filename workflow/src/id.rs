//! Identifiers as newtypes, so that a run's id cannot be given where a session's is meant.
//!
//! Nothing here makes an id: that needs randomness, which the store and the worker have.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The id as it is stored.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Gives the stored text back.
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
    /// A conversation as it is stored: `space/id`, so that two spaces never share one.
    ConversationId
);
id!(
    /// A run, `run_…`.
    RunId
);
id!(
    /// One tool call, unique within its session. The provider's own id where that is unique there.
    CallId
);
id!(
    /// One attempt of a model call, `gen_…`. A retry has a new one.
    GenerationId
);

/// The space of conversations for which no space is named.
pub const DEFAULT_SPACE: &str = "default";

/// A text that names no conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a conversation id has 1 to 256 bytes and no control characters")]
pub struct InvalidConversationId;

/// Returns the id under which a conversation of the default space is stored.
///
/// # Errors
/// [`InvalidConversationId`] for an empty id, a long one, or one with control characters.
pub fn stored_conversation_id(id: &str) -> Result<String, InvalidConversationId> {
    if id.is_empty() || id.len() > 256 || id.chars().any(char::is_control) {
        return Err(InvalidConversationId);
    }
    Ok(format!("{DEFAULT_SPACE}/{id}"))
}
