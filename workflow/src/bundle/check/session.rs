//! Checks the session's row: it matches the header, its words and numbers are valid, and its paths stay in
//! the workspace.

use super::fits::{CheckResult, MOST_NUMBER, times};
use super::{Open, scan};
use crate::bundle::SessionRow;
use crate::policy::SessionPolicy;

impl Open {
    pub(super) fn session(&mut self, row: &SessionRow) -> CheckResult {
        if self.session.is_some() {
            return Err("a second session".to_owned());
        }
        if row.session_id != self.header.session_id {
            return Err(format!("the session {:?} is not the header's", row.session_id));
        }
        let cut = self.header.cut;
        let newest = (row.last_message_number, row.last_step_number, row.last_event_seq);
        if newest != (cut.message_number, cut.step_number, cut.event_seq) {
            return Err("its numbers are not those of the header's cut".to_owned());
        }
        for (name, text) in [
            ("agent", Some(&row.agent)),
            ("model_id", Some(&row.model_id)),
            ("space_id", Some(&row.space_id)),
            ("mailbox_id", Some(&row.mailbox_id)),
            ("trigger_type", Some(&row.trigger_type)),
            ("trigger_id", Some(&row.trigger_id)),
            ("conversation_id", Some(&row.conversation_id)),
            ("parent_conversation_id", row.parent_conversation_id.as_ref()),
        ] {
            if text.is_some_and(|text| !scan::is_name(text)) {
                return Err(format!("{name}: 1 to 512 bytes without control characters"));
            }
        }
        for (name, id) in [
            ("parent_session_id", &row.parent_session_id),
            ("forked_from_message_id", &row.forked_from_message_id),
        ] {
            if id.as_ref().is_some_and(|id| !scan::is_id(id)) {
                return Err(format!("{name}: an id has letters, digits, _ and - only"));
            }
        }
        times(&[("started_at", Some(&row.started_at)), ("completed_at", row.completed_at.as_ref())])?;
        let numbers = [
            row.base_message_number,
            row.to_message_number,
            row.last_message_number,
            row.last_event_seq,
            row.base_step_number,
            row.last_step_number,
            row.forked_at_message_number.unwrap_or(0),
            i64::from(row.seed_message_count),
            i64::from(row.model_context_window),
        ];
        if numbers.into_iter().any(|number| !(0..=MOST_NUMBER).contains(&number)) {
            return Err("a number is negative or beyond reason".to_owned());
        }
        if row.to_message_number > row.last_message_number {
            return Err("the checkpoint lies beyond the last message".to_owned());
        }
        if i64::from(row.seed_message_count) != self.header.counts.seeds {
            return Err(format!(
                "it says {} seeds, the header {}",
                row.seed_message_count, self.header.counts.seeds
            ));
        }
        if let Some(policy) = &row.policy {
            let policy = serde_json::Value::Object(policy.clone());
            let policy: SessionPolicy =
                serde_json::from_value(policy).map_err(|error| format!("policy: {error}"))?;
            if !policy.tool_mode.is_live() && self.header.counts.deliveries > 0 {
                return Err("its tools are not live, and it has deliveries".to_owned());
            }
            if policy.replies_as.is_some_and(|word| !scan::is_name(&word)) {
                return Err("policy: replies_as: 1 to 512 bytes without control characters".to_owned());
            }
        }
        for key in row.state.keys().chain(row.initial_state.keys()) {
            if let Some(path) = key.strip_prefix(crate::derive::FILE_PREFIX)
                && !scan::is_path_within(path)
            {
                return Err(format!("state: {key:?} leads out of the workspace"));
            }
        }
        self.rows.session(row);
        self.logs.session(row.initial_state.clone());
        self.session = Some(Box::new(row.clone()));
        Ok(())
    }
}
