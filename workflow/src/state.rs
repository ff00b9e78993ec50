//! The state of a session: small facts that stay when old messages leave the context. [`mod@crate::derive`]
//! folds them from tool results.

use serde_json::{Map, Value};

/// Facts by key. Each fact has its own key, so that an update never carries the whole state.
pub type State = Map<String, Value>;

/// Returns whether two states are equal, each value compared by [`same_value`].
pub fn same_state(a: &State, b: &State) -> bool {
    a.len() == b.len()
        && a.iter().all(|(key, value)| b.get(key).is_some_and(|other| same_value(value, other)))
}

/// Compares as the database does: `jsonb` keeps a number's value but not its spelling; a message's `json` keeps both.
pub fn same_value(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b))
        }
        (Value::Object(a), Value::Object(b)) => same_state(a, b),
        (a, b) => a == b,
    }
}
