//! Seeds: what the model sees before a session's first record.

use crate::record::Role;
use serde::{Deserialize, Serialize};

/// One message that the session begins with: written once, never changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seed {
    /// `system`, `user` or `assistant`.
    pub role: Role,
    pub content: String,
    /// New since the conversation's last session.
    pub is_new: bool,
}
