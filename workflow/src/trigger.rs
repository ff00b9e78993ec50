//! What created a session. Programs may add trigger types of their own; this file defines Wakeful's.

use serde::{Deserialize, Serialize};

/// The type of a session that restarts its conversation. The session is its own trigger.
pub const NEW: &str = "new";

/// The type of a schedule's firing.
pub const CRON: &str = "cron";

/// The type of a chat.
pub const CHAT: &str = "chat";

/// The type of another system's notice.
pub const HERALD: &str = "herald";

/// The type of a chat about a notice.
pub const HERALD_CHAT: &str = "herald-chat";

/// Wakeful's own types. A program's own routes may use others.
pub const OWN: [&str; 11] =
    [CHAT, "email", "message", CRON, HERALD, HERALD_CHAT, NEW, "api", "fork", "replay", "import"];

/// The type of the new session that a message opens next to its conversation's latest session. `None` if the
/// message continues the latest one. Replies to a notice go to its recipient. A person who then writes about
/// the notice in a chat reads the replies in the chat, so that chat is a session of its own.
pub fn opens_beside(latest: &str, arriving: &str) -> Option<&'static str> {
    (latest == HERALD && arriving == CHAT).then_some(HERALD_CHAT)
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

/// Whether sessions with this trigger type reply by mail. `herald-chat` does not: it is a chat about a
/// herald's notice, and its reader has that chat open.
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
