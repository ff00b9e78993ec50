//! What a person is told when their run fails for good, or takes long.
//!
//! The notice leaves by the session's own way: as a delivery on its reply route, and as an entry of the journal, which readers
//! of a chat's stream get. Machines are told nothing: neither a mail's sender that may be one, nor a schedule, nor a
//! notice of another system.
#![deny(missing_docs)]

use crate::derive::NewDelivery;
use crate::event::Event;
use crate::policy::SessionPolicy;
use crate::record::without_nul;
use crate::reply;
use crate::trigger::{HERALD, TriggerSource};

/// The reason for a notice. A run gets at most one of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The run failed and is not repeated by itself.
    Failed,
    /// The run has taken longer than the agent's `on_delayed.after_s`.
    Delayed,
}

impl Reason {
    /// The word in the journal and in the delivery's key.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Failed => "failed",
            Reason::Delayed => "delayed",
        }
    }

    /// The beginning of the keys of this notice's deliveries. A second notice for the same run has the same keys, and the
    /// store drops it.
    pub fn key(self, run_id: &str) -> String {
        format!("told/{}/{run_id}", self.as_str())
    }
}

/// What one commit writes to tell a person.
#[derive(Clone, Debug, PartialEq)]
pub struct Notice {
    /// The journal's entry.
    pub event: Event,
    /// The messages: none if people read the session's replies in its stream.
    pub deliveries: Vec<NewDelivery>,
}

/// Returns whether a person waits for a reply of this session: it was begun by one, and its replies go out.
pub fn person_waits(policy: &SessionPolicy, trigger_type: &str) -> bool {
    let of_a_person = match TriggerSource::of(trigger_type) {
        TriggerSource::User => trigger_type != HERALD,
        TriggerSource::Webhook => true,
        TriggerSource::Schedule
        | TriggerSource::Api
        | TriggerSource::Fork
        | TriggerSource::Replay
        | TriggerSource::Import => false,
    };
    of_a_person && policy.tool_mode.is_live() && policy.loop_suspicion.is_empty()
}

/// Returns the notice with this `text`. `None`: no person waits for this session, or it must not write to one.
pub fn notice(
    policy: &SessionPolicy,
    trigger_type: &str,
    run_id: &str,
    reason: Reason,
    text: &str,
) -> Option<Notice> {
    if !person_waits(policy, trigger_type) || text.trim().is_empty() {
        return None;
    }
    let text = without_nul(text.to_owned());
    let deliveries = match &policy.reply {
        Some(route) => reply::outgoing(route, &reason.key(run_id), &text),
        None => Vec::new(),
    };
    let channel = policy.reply.as_ref().map(|route| route.channel.clone());
    Some(Notice {
        event: Event::PersonTold { reason: reason.as_str().to_owned(), channel, text },
        deliveries,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{ReplyRoute, ToolMode};
    use serde_json::json;

    fn routed() -> SessionPolicy {
        let route = ReplyRoute { channel: "slack".into(), to: json!({"channel": "C1"}), split_at: None };
        SessionPolicy { reply: Some(route), ..SessionPolicy::default() }
    }

    #[test]
    fn a_person_is_told_by_the_sessions_own_way() {
        let told = notice(&routed(), "message", "run_1", Reason::Failed, "Sorry.").unwrap();
        let keys: Vec<&str> = told.deliveries.iter().map(|one| one.source_key.as_str()).collect();
        assert_eq!(keys, ["told/failed/run_1/1"]);
        let chat = notice(&SessionPolicy::default(), "chat", "run_1", Reason::Delayed, "Soon.").unwrap();
        assert!(chat.deliveries.is_empty(), "a chat is read in its stream");
        let (kind, payload) = chat.event.to_row();
        assert_eq!(
            (kind.as_str(), &payload),
            ("PERSON_TOLD", &json!({"reason": "delayed", "text": "Soon."}))
        );
    }

    #[test]
    fn machines_and_rehearsals_are_told_nothing() {
        let told = |policy: &SessionPolicy, trigger: &str, text: &str| {
            notice(policy, trigger, "run_1", Reason::Failed, text).is_some()
        };
        assert!(told(&routed(), "email", "Sorry."));
        for trigger in ["cron", "herald", "fork", "replay", "import", "api"] {
            assert!(!told(&routed(), trigger, "Sorry."), "{trigger}");
        }
        let automatic = SessionPolicy { loop_suspicion: vec!["auto-submitted".into()], ..routed() };
        assert!(!told(&automatic, "email", "Sorry."));
        let dry = SessionPolicy { tool_mode: ToolMode::Dry, ..routed() };
        assert!(!told(&dry, "email", "Sorry."));
        assert!(!told(&routed(), "email", " "));
    }
}
