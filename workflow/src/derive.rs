//! Derives the state from tool results. A tool records what it did in its result's `details`, and the state
//! of the session is the fold of those. So the state can be rebuilt from the transcript alone.
//!
//! | `details.type` | recorded by | becomes |
//! |---|---|---|
//! | `sentEmail` | `compose_email` | `email/<call id>`: recipients and subject; and a delivery |
//! | `fileWritten` | `write_file` | `file/<path>`: size and hash |
//!
//! Other built-in tools record nothing, because they change nothing that a later turn must know. A failed
//! call never updates the state.

use crate::record::{Record, ToolResult};
use crate::state::State;
use serde_json::{Value, json};

/// Keys of files that the session wrote: `file/<path>`.
pub(crate) const FILE_PREFIX: &str = "file/";
/// Keys of emails that the session enqueued: `email/<call id>`.
const EMAIL_PREFIX: &str = "email/";
/// The channel that sends emails.
const EMAIL: &str = "email";

/// The types of details that act: of a mail to send, and of a file that was written.
const SENT: &str = "sentEmail";
const WRITTEN: &str = "fileWritten";

/// One fact of the state. A new value replaces the old one as a whole.
#[derive(Clone, Debug, PartialEq)]
pub struct StateUpdate {
    pub key: String,
    pub value: Value,
}

/// An outgoing message that a commit enqueues: one new row of `deliveries`.
#[derive(Clone, Debug, PartialEq)]
pub struct NewDelivery {
    /// Unique within the session and channel, so a step that is performed twice enqueues the message once.
    pub source_key: String,
    pub channel: String,
    pub content: Value,
}

/// Returns whether `details` would make a commit act although `tool` is not the tool that may return them. A commit sends the mail
/// and records the file that such details name, without a check of the recipients. So no other tool may return them: not a
/// program's own, and not one that passes on what a server said.
pub fn is_anothers(tool: &str, details: &Value) -> bool {
    match details["type"].as_str() {
        Some(SENT) => tool != "compose_email",
        Some(WRITTEN) => !matches!(tool, "write_file" | "edit_file"),
        Some(_) | None => false,
    }
}

/// Returns whether a tool result says that a mail was enqueued.
pub(crate) fn is_sent_mail(result: &ToolResult) -> bool {
    let kind = result.details.as_ref().and_then(|details| details["type"].as_str());
    !result.is_error && kind == Some(SENT)
}

/// Returns the state updates of one tool result. Unknown details give none.
pub fn updates(result: &ToolResult) -> Vec<StateUpdate> {
    if result.is_error {
        return Vec::new();
    }
    let Some(details) = &result.details else { return Vec::new() };
    match details["type"].as_str() {
        Some(SENT) => vec![StateUpdate {
            key: format!("{EMAIL_PREFIX}{}", result.call_id),
            value: json!({ "to": details["to"], "subject": details["subject"] }),
        }],
        Some(WRITTEN) => match details["path"].as_str() {
            Some(path) => vec![StateUpdate {
                key: format!("{FILE_PREFIX}{path}"),
                value: json!({ "bytes": details["bytes"], "sha256": details["sha256"] }),
            }],
            None => Vec::new(),
        },
        _ => Vec::new(),
    }
}

/// Returns the message that a tool result sends, if it sends one.
pub fn outgoing(result: &ToolResult) -> Option<NewDelivery> {
    if result.is_error {
        return None;
    }
    let details = result.details.as_ref()?;
    (details["type"] == SENT).then(|| NewDelivery {
        source_key: result.call_id.to_string(),
        channel: EMAIL.to_owned(),
        content: details.clone(),
    })
}

/// Returns whether this channel sends mail.
pub(crate) fn is_mail(channel: &str) -> bool {
    channel == EMAIL
}

/// Returns whether this tool result enqueued an email.
pub(crate) fn composes_email(result: &ToolResult) -> bool {
    outgoing(result).is_some_and(|outgoing| outgoing.channel == EMAIL)
}

/// Returns the updates of all results in `records`, in order.
pub fn derive<'a>(records: impl IntoIterator<Item = &'a Record>) -> impl Iterator<Item = StateUpdate> {
    records.into_iter().flat_map(Record::tool_results).flat_map(updates)
}

/// Applies `update` to `state`.
pub fn apply(state: &mut State, update: &StateUpdate) {
    state.insert(update.key.clone(), update.value.clone());
}

/// The state after `records`, starting from `initial`.
pub fn fold<'a>(initial: State, records: impl IntoIterator<Item = &'a Record>) -> State {
    let mut state = initial;
    for update in derive(records) {
        apply(&mut state, &update);
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(is_error: bool, details: Value) -> ToolResult {
        ToolResult {
            call_id: "call_1".into(),
            name: "t".into(),
            content: String::new(),
            is_error,
            details: Some(details),
            output: None,
        }
    }

    #[test]
    fn an_email_leaves_a_fact_without_its_body_and_one_delivery() {
        let sent = result(false, json!({"type":"sentEmail","to":["a@b.c"],"subject":"Hi","body":"long"}));
        assert_eq!(
            updates(&sent),
            [StateUpdate { key: "email/call_1".into(), value: json!({"to":["a@b.c"],"subject":"Hi"}) }]
        );
        assert_eq!(outgoing(&sent).unwrap().source_key, "call_1");
    }

    #[test]
    fn details_that_act_are_those_of_the_tools_that_send_and_write() {
        let is_anothers = |tool: &str, kind: &str| is_anothers(tool, &json!({ "type": kind }));
        assert!(
            is_anothers("lookup", SENT)
                && is_anothers("lookup", WRITTEN)
                && is_anothers("compose_email", WRITTEN)
        );
        let own =
            [("compose_email", SENT), ("write_file", WRITTEN), ("edit_file", WRITTEN), ("lookup", "charged")];
        assert!(own.iter().all(|(tool, kind)| !is_anothers(tool, kind)));
    }

    #[test]
    fn a_failed_call_changes_nothing() {
        let failed = result(true, json!({"type":"sentEmail","to":["a@b.c"],"subject":"Hi"}));
        assert!(updates(&failed).is_empty());
        assert!(outgoing(&failed).is_none());
    }

    #[test]
    fn details_that_nobody_knows_are_no_update() {
        assert!(updates(&result(false, json!({"type":"other"}))).is_empty());
        assert!(updates(&result(false, json!("text"))).is_empty());
    }
}
