//! Rebuilds the state from a journal: the newest checkpoint, and the entries after it applied in order.
//!
//! Only `state_transition` and `context_update` change the state. Recovery only counts all other entries, of
//! known and unknown types. It never repeats their effects.

use crate::state::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The lifecycle state before the first entry.
const CREATED: &str = "created";

/// The result of a recovery.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovered {
    pub context_state: State,
    pub lifecycle_state: String,
    /// Type of the last entry that was replayed. Empty if none was, for example because the newest entry is
    /// the checkpoint.
    pub last_entry_type: String,
    /// Entries after the checkpoint.
    pub entries_replayed: usize,
}

/// The state that a checkpoint entry refers to.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Number of the entry.
    pub seq: i64,
    pub context_state: State,
    pub lifecycle_state: String,
}

/// A journal entry as recovery reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    kind: String,
    change: Change,
}

#[derive(Clone, Debug, PartialEq)]
enum Change {
    None,
    Lifecycle(String),
    Context { key: String, value: Value },
}

/// An entry that changes the state but lacks the new value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the payload of this {kind} has no {missing}")]
pub struct Unreadable {
    pub kind: String,
    pub missing: &'static str,
}

impl Entry {
    /// Reads an entry. If its value is stored as a blob, the caller must have put it into `value`.
    ///
    /// # Errors
    /// [`Unreadable`] if a `state_transition` or `context_update` lacks a field.
    pub fn read(kind: &str, payload: &Value) -> Result<Entry, Unreadable> {
        let unreadable = |missing| Unreadable { kind: kind.to_owned(), missing };
        let text = |key: &'static str| payload[key].as_str().map(str::to_owned).ok_or(unreadable(key));
        let change = match kind {
            "state_transition" => Change::Lifecycle(text("to_state")?),
            "context_update" => {
                let value = payload.get("value").cloned().ok_or(unreadable("value"))?;
                Change::Context { key: text("key")?, value }
            }
            _ => Change::None,
        };
        Ok(Entry { kind: kind.to_owned(), change })
    }
}

impl Checkpoint {
    /// Reads a checkpoint's payload with its state in it.
    ///
    /// # Errors
    /// [`Unreadable`] if a field is missing, also if the state is still a reference to a blob.
    pub fn read(seq: i64, payload: &Value) -> Result<Checkpoint, Unreadable> {
        let unreadable = |missing| Unreadable { kind: "checkpoint".to_owned(), missing };
        let state = payload["context_state"].as_object().ok_or(unreadable("context_state"))?;
        let lifecycle = payload["lifecycle_state"].as_str().ok_or(unreadable("lifecycle_state"))?;
        Ok(Checkpoint { seq, context_state: state.clone(), lifecycle_state: lifecycle.to_owned() })
    }
}

/// Applies `entries` in order. They must be the entries after `checkpoint`. Without a checkpoint, the state
/// starts as `{}` and the lifecycle as `created`.
pub fn recover(checkpoint: Option<Checkpoint>, entries: impl IntoIterator<Item = Entry>) -> Recovered {
    let mut recovered = match checkpoint {
        Some(Checkpoint { seq: _, context_state, lifecycle_state }) => {
            Recovered { context_state, lifecycle_state, last_entry_type: String::new(), entries_replayed: 0 }
        }
        None => Recovered {
            context_state: State::new(),
            lifecycle_state: CREATED.to_owned(),
            last_entry_type: String::new(),
            entries_replayed: 0,
        },
    };
    for entry in entries {
        match entry.change {
            Change::None => {}
            Change::Lifecycle(to_state) => recovered.lifecycle_state = to_state,
            Change::Context { key, value } => {
                recovered.context_state.insert(key, value);
            }
        }
        recovered.last_entry_type = entry.kind;
        recovered.entries_replayed += 1;
    }
    recovered
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(kind: &str, payload: Value) -> Entry {
        Entry::read(kind, &payload).unwrap()
    }

    fn shown(recovered: &Recovered) -> Value {
        serde_json::to_value(recovered).unwrap()
    }

    #[test]
    fn scenario_1_a_crash_after_several_invocations() {
        let checkpoint =
            Checkpoint::read(5, &json!({"context_state": {"check_count": 10}, "lifecycle_state": "running"}));
        let recovered = recover(
            Some(checkpoint.unwrap()),
            [
                entry("trigger_event", json!({"trigger_type": "cron"})),
                entry("context_update", json!({"key": "check_count", "value": 11})),
                entry("invocation_result", json!({"ok": true})),
            ],
        );
        assert_eq!(
            shown(&recovered),
            json!({"context_state": {"check_count": 11}, "lifecycle_state": "running",
                "last_entry_type": "invocation_result", "entries_replayed": 3})
        );
    }

    #[test]
    fn scenario_2_a_crash_with_no_checkpoint() {
        let recovered = recover(
            None,
            [
                entry("state_transition", json!({"from_state": "created", "to_state": "starting"})),
                entry("state_transition", json!({"from_state": "starting", "to_state": "running"})),
                entry("context_update", json!({"key": "pipeline_status", "value": "degraded"})),
            ],
        );
        assert_eq!(
            shown(&recovered),
            json!({"context_state": {"pipeline_status": "degraded"}, "lifecycle_state": "running",
                "last_entry_type": "context_update", "entries_replayed": 3})
        );
    }

    #[test]
    fn scenario_3_no_journal_entries() {
        assert_eq!(
            shown(&recover(None, [])),
            json!({"context_state": {}, "lifecycle_state": "created", "last_entry_type": "",
                "entries_replayed": 0})
        );
    }

    #[test]
    fn the_data_watcher_comes_back_with_seven_entries() {
        let checkpoint = Checkpoint::read(
            9,
            &json!({"context_state": {"pipeline_status": "healthy", "check_count": 40},
                "lifecycle_state": "running"}),
        );
        let update = |key: &str, value: Value| entry("context_update", json!({"key": key, "value": value}));
        let recovered = recover(
            Some(checkpoint.unwrap()),
            [
                entry("trigger_event", json!({})),
                update("check_count", json!(41)),
                entry("invocation_result", json!({})),
                entry("trigger_event", json!({})),
                update("check_count", json!(42)),
                update("pipeline_status", json!("degraded")),
                entry("invocation_result", json!({})),
            ],
        );
        assert_eq!(
            shown(&recovered),
            json!({"context_state": {"pipeline_status": "degraded", "check_count": 42},
                "lifecycle_state": "running", "last_entry_type": "invocation_result", "entries_replayed": 7})
        );
    }

    #[test]
    fn a_checkpoint_that_is_the_newest_entry_leaves_nothing_to_replay() {
        let checkpoint =
            Checkpoint::read(8, &json!({"context_state": {"a": 1}, "lifecycle_state": "completed"}));
        let recovered = recover(Some(checkpoint.unwrap()), []);
        assert_eq!((recovered.entries_replayed, recovered.last_entry_type.as_str()), (0, ""));
        assert_eq!(recovered.lifecycle_state, "completed");
    }

    #[test]
    fn what_an_unknown_entry_says_changes_nothing() {
        let odd = json!({"to_state": "terminated", "key": "a", "value": 1});
        let recovered = recover(None, [entry("GEN_MAYBE", odd.clone()), entry("TOOL_RESULT", odd)]);
        assert_eq!(
            (recovered.context_state, recovered.lifecycle_state),
            (State::new(), "created".to_owned())
        );
        assert_eq!((recovered.entries_replayed, recovered.last_entry_type.as_str()), (2, "TOOL_RESULT"));
    }

    #[test]
    fn an_update_to_null_is_an_update_and_one_without_a_value_is_none() {
        let recovered = recover(None, [entry("context_update", json!({"key": "a", "value": null}))]);
        assert_eq!(recovered.context_state["a"], Value::Null);
        let pointer = json!({"key": "a", "value_sha256": "00", "bytes": 4000});
        let error = Entry::read("context_update", &pointer).unwrap_err();
        assert_eq!(error.to_string(), "the payload of this context_update has no value");
        assert!(Entry::read("state_transition", &json!({})).is_err());
        let by_pointer = json!({"state_sha256": "00", "lifecycle_state": "running"});
        assert_eq!(Checkpoint::read(1, &by_pointer).unwrap_err().missing, "context_state");
    }
}
