//! Trigger types: the words for what created a session. This file defines Wakeful's own; programs may add others.

use serde::{Deserialize, Serialize};

/// The type of a session that restarts its conversation. Such a session is its own trigger.
pub const NEW: &str = "new";

/// The type of a session that a schedule started.
pub const CRON: &str = "cron";

/// The type of a chat.
pub const CHAT: &str = "chat";

/// The type of a session that another system's notice started.
pub const HERALD: &str = "herald";

/// The type of a chat about a notice.
const HERALD_CHAT: &str = "herald-chat";

/// Wakeful's own types. A program's own routes may use others.
pub const OWN: [&str; 11] =
    [CHAT, "email", "message", CRON, HERALD, HERALD_CHAT, NEW, "api", "fork", "replay", "import"];

/// The herald rule. A session of a notice replies by mail, but a person who writes in the chat reads replies
/// there. So if the conversation's latest session is a notice's, a chat message opens a session of its own,
/// of the returned type. `None`: the message goes to the latest session.
pub fn separate_session_type(latest: &str, arriving: &str) -> Option<&'static str> {
    (latest == HERALD && arriving == CHAT).then_some(HERALD_CHAT)
}

/// Returns whether a session must now copy the texts of the notice's session as seeds. It does so when its
/// first run starts, because the notice's run may still be working before that.
pub fn copies_notice_texts(trigger_type: &str, had_run: bool) -> bool {
    trigger_type == HERALD_CHAT && !had_run
}

/// Returns whether a restarted conversation keeps the reply rules of this trigger type. It does if a person,
/// a webhook or a program made the session and the type does not reply by mail. People read a restarted
/// conversation where they restarted it.
pub fn answers_in_place(trigger_type: &str) -> bool {
    match TriggerSource::of(trigger_type) {
        TriggerSource::User | TriggerSource::Webhook | TriggerSource::Api => {
            trigger_type != NEW && !replies_by_mail(trigger_type)
        }
        TriggerSource::Schedule | TriggerSource::Fork | TriggerSource::Replay | TriggerSource::Import => {
            false
        }
    }
}

/// Who or what created a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TriggerSource {
    /// A person wrote.
    User,
    /// Another system called.
    Webhook,
    Schedule,
    /// A program that uses the library.
    Api,
    Fork,
    Replay,
    Import,
}

impl TriggerSource {
    /// Returns the source of a trigger type. An unknown type belongs to a program's own route and counts as a
    /// webhook.
    pub fn of(trigger_type: &str) -> TriggerSource {
        match trigger_type {
            "chat" | "email" | "message" | "herald" | "herald-chat" | NEW => TriggerSource::User,
            "cron" | "schedule" => TriggerSource::Schedule,
            "api" => TriggerSource::Api,
            "fork" => TriggerSource::Fork,
            "replay" => TriggerSource::Replay,
            "import" => TriggerSource::Import,
            _ => TriggerSource::Webhook,
        }
    }

    /// The word that is shown.
    pub fn as_str(self) -> &'static str {
        match self {
            TriggerSource::User => "user",
            TriggerSource::Webhook => "webhook",
            TriggerSource::Schedule => "schedule",
            TriggerSource::Api => "api",
            TriggerSource::Fork => "fork",
            TriggerSource::Replay => "replay",
            TriggerSource::Import => "import",
        }
    }
}

/// Returns whether sessions of this trigger type reply by mail. `herald-chat` does not, because people read
/// it in the chat.
pub fn replies_by_mail(trigger_type: &str) -> bool {
    matches!(trigger_type, "email" | "cron" | "herald")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_wakefuls_own_is_known() {
        for own in OWN {
            assert_ne!(TriggerSource::of(own), TriggerSource::Webhook, "{own}");
        }
    }

    #[test]
    fn only_a_chat_on_a_notice_opens_a_session_beside_it() {
        assert_eq!(separate_session_type("herald", "chat"), Some("herald-chat"));
        for (latest, arriving) in [
            ("herald-chat", "chat"),
            ("chat", "chat"),
            ("fork", "chat"),
            ("herald", "message"),
            (NEW, "chat"),
        ] {
            assert_eq!(separate_session_type(latest, arriving), None, "{latest} {arriving}");
        }
    }

    #[test]
    fn only_the_first_run_of_a_chat_about_a_notice_takes_over_its_texts() {
        for own in OWN {
            assert_eq!(copies_notice_texts(own, false), own == HERALD_CHAT, "{own}");
            assert!(!copies_notice_texts(own, true), "{own}");
        }
    }

    #[test]
    fn a_restarted_conversation_replies_where_it_is_read() {
        let answers: Vec<&str> = OWN.into_iter().filter(|own| answers_in_place(own)).collect();
        assert_eq!(answers, [CHAT, "message", HERALD_CHAT, "api"]);
        assert!(answers_in_place("a-route-of-ones-own"));
    }

    #[test]
    fn every_type_of_trigger_has_its_source() {
        for (trigger_type, source, by_mail) in [
            ("chat", "user", false),
            ("email", "user", true),
            ("message", "user", false),
            ("herald", "user", true),
            ("herald-chat", "user", false),
            (NEW, "user", false),
            ("cron", "schedule", true),
            ("webhook", "webhook", false),
            ("a-route-of-ones-own", "webhook", false),
            ("api", "api", false),
            ("fork", "fork", false),
            ("replay", "replay", false),
            ("import", "import", false),
        ] {
            assert_eq!(TriggerSource::of(trigger_type).as_str(), source, "{trigger_type}");
            assert_eq!(replies_by_mail(trigger_type), by_mail, "{trigger_type}");
        }
    }
}
