//! The state of a session: small facts that stay when old messages leave the context. [`mod@crate::derive`]
//! folds them from tool results.

use serde_json::{Map, Value};

/// Facts by key. Each fact has its own key, so that an update never carries the whole state.
pub type State = Map<String, Value>;
