//! What created a session. Programs may add trigger types of their own; this file defines Wakeful's.

use serde::{Deserialize, Serialize};

/// The type of a session that restarts its conversation: it is its own trigger.
pub const NEW: &str = "new";

/// The type of a schedule's firing.
pub const CRON: &str = "cron";

/// The type of a chat.
pub const CHAT: &str = "chat";

/// The type of another system's notice.
pub const HERALD: &str = "herald";

/// The type of a chat about a notice.
const HERALD_CHAT: &str = "herald-chat";

/// Wakeful's own types. A program's own routes may use others.
pub const OWN: [&str; 11] =
    [CHAT, "email", "message", CRON, HERALD, HERALD_CHAT, NEW, "api", "fork", "replay", "import"];

/// The herald rule. A chat message in a conversation whose latest session is a herald's notice opens a session of its own,
/// of the returned type: the replies to a notice go to its receiver by mail, and the chat's reader reads replies in the chat.
/// `None`: the message goes to the latest session.
pub fn opens_beside(latest: &str, arriving: &str) -> Option<&'static str> {
    (latest == HERALD && arriving == CHAT).then_some(HERALD_CHAT)
}

/// Whether a session gets the texts of the session beside which it was opened, as seeds. It gets them when its first run
/// begins and not before: the other session's run may still be working until then.
pub fn takes_over(trigger_type: &str, started: bool) -> bool {
    trigger_type == HERALD_CHAT && !started
}

/// Whether a restarted conversation goes on replying as this trigger's type. A person or a system must be behind the type,
/// and the type must not reply by mail: a person reads the restarted conversation where they restarted it.
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

/// Who or what created a session, by whatever route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// The source behind a trigger type. An unknown type belongs to a program's own route and counts as a
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

/// Whether sessions of this trigger type reply by mail. Not `herald-chat`: its reader has the chat open.
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
        assert_eq!(opens_beside("herald", "chat"), Some("herald-chat"));
        for (latest, arriving) in [
            ("herald-chat", "chat"),
            ("chat", "chat"),
            ("fork", "chat"),
            ("herald", "message"),
            (NEW, "chat"),
        ] {
            assert_eq!(opens_beside(latest, arriving), None, "{latest} {arriving}");
        }
    }

    #[test]
    fn only_the_first_run_of_a_chat_about_a_notice_takes_over_its_texts() {
        for own in OWN {
            assert_eq!(takes_over(own, false), own == HERALD_CHAT, "{own}");
            assert!(!takes_over(own, true), "{own}");
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
