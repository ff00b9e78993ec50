//! The conversation's state: small facts that outlive the context, folded out of tool results by
//! [`mod@crate::derive`].

use serde_json::{Map, Value};

/// Facts by key. Each fact has its own key, so that an update never carries the whole state.
pub type State = Map<String, Value>;
