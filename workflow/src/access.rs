//! Who may do what: the scopes of tokens, and which sessions a caller reaches.
#![deny(missing_docs)]

use crate::mail::thread::MAIL;
use serde::{Deserialize, Serialize};

/// What a token allows. Each scope includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// To look.
    Read,
    /// To change sessions, schedules and deliveries.
    Operate,
    /// To make tokens and to read the audit.
    Admin,
}

impl Scope {
    /// All scopes, the smallest first.
    pub const ALL: [Scope; 3] = [Scope::Read, Scope::Operate, Scope::Admin];

    /// The scope's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Operate => "operate",
            Scope::Admin => "admin",
        }
    }

    /// Reads a scope's name.
    pub fn parse(word: &str) -> Option<Scope> {
        Scope::ALL.into_iter().find(|scope| scope.as_str() == word)
    }
}

/// Which sessions a caller sees and changes. What is outside does not exist for the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reach {
    /// Only sessions of this space.
    pub space_id: Option<String>,
    /// Only sessions of this agent.
    pub agent: Option<String>,
    /// Only sessions in conversations of this user.
    pub user_id: Option<String>,
}

/// In whose name a message comes. A trigger that has none of these (a messenger, a schedule, a mail) writes only in
/// conversations that belong to no user: else a user could claim a conversation before the trigger uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Speaker {
    /// The application itself, or the sender of a mail who proved that the thread is his. It writes in every conversation.
    Application,
    /// A user that the application names. The first one is the conversation's.
    User {
        /// As the application names people.
        user_id: String,
        /// Other users may write in the conversation too.
        shared: bool,
    },
    /// A user's own token. A conversation of anyone else does not exist for it.
    OwnToken {
        /// As the application names people.
        user_id: String,
    },
    /// A notice for a person, named in the words of its sender. So the conversation does not become that person's.
    NoticeFor {
        /// As the sender names people.
        user_id: String,
    },
}

/// Whether a speaker may write in a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is the speaker's, or it is shared.
    Admitted,
    /// It is not anyone's yet. From now on it is the speaker's.
    Claims,
    /// It is another user's.
    OfAnother,
    /// It is a user's, and the message speaks for no user, or for another one.
    OfAUser,
    /// The speaker does not even learn that it exists.
    Unknown,
}

impl Speaker {
    /// The user that a message speaks for.
    pub fn user_id(&self) -> Option<&str> {
        match self {
            Speaker::Application => None,
            Speaker::User { user_id, .. }
            | Speaker::OwnToken { user_id }
            | Speaker::NoticeFor { user_id } => Some(user_id),
        }
    }

    /// The user that gets a conversation that this message begins.
    pub fn claims(&self) -> Option<&str> {
        match self {
            Speaker::User { user_id, .. } | Speaker::OwnToken { user_id } => Some(user_id),
            Speaker::Application | Speaker::NoticeFor { .. } => None,
        }
    }
}

/// Decides about a message in an existing conversation of `owner`.
pub fn admission(speaker: Option<&Speaker>, owner: Option<&str>) -> Admission {
    match (speaker, owner) {
        (Some(Speaker::Application), _) => Admission::Admitted,
        (Some(speaker), Some(owner)) if speaker.user_id() == Some(owner) => Admission::Admitted,
        (Some(Speaker::OwnToken { .. }), _) => Admission::Unknown,
        (Some(Speaker::User { .. }), None) => Admission::Claims,
        (Some(Speaker::User { shared: true, .. }), Some(_)) => Admission::Admitted,
        (Some(Speaker::User { shared: false, .. }), Some(_)) => Admission::OfAnother,
        (Some(Speaker::NoticeFor { .. }) | None, None) => Admission::Admitted,
        (Some(Speaker::NoticeFor { .. }) | None, Some(_)) => Admission::OfAUser,
    }
}

/// How ids of conversations begin that Wakeful's own triggers make: messengers, mails, schedules and notices.
const OF_TRIGGERS: [&str; 6] = ["slack/", "telegram/", "webhook/", MAIL, "schedule-", "herald-"];
/// How those of tasks begin that an application spawns as in Absurd.
const OF_TASKS: &str = "absurd-";

/// Returns whether a trigger of Wakeful's own may make a conversation of this id (without its space).
pub fn is_of_a_trigger(id: &str) -> bool {
    OF_TRIGGERS.iter().any(|begin| id.starts_with(begin))
}

/// Returns whether a trigger or an application's task may make a conversation of this id (without its space). A caller that reaches
/// only one agent or one user must not be there first.
pub fn is_reserved(id: &str) -> bool {
    is_of_a_trigger(id) || id.starts_with(OF_TASKS)
}

/// Whether this can be the name of a space: it is part of stored ids, before a slash.
pub fn is_space(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    (1..=64).contains(&name.len()) && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scope_includes_those_before_it() {
        assert!(Scope::Read < Scope::Operate && Scope::Operate < Scope::Admin);
        assert!(Scope::ALL.into_iter().all(|scope| Scope::parse(scope.as_str()) == Some(scope)));
        assert_eq!(Scope::parse("Admin"), None);
    }

    #[test]
    fn the_first_user_has_the_conversation_and_a_users_token_sees_no_other() {
        let ann = || "ann".to_owned();
        let user = |shared| Some(Speaker::User { user_id: ann(), shared });
        let own_token = Some(Speaker::OwnToken { user_id: ann() });
        let notice = Some(Speaker::NoticeFor { user_id: ann() });
        use Admission::{Admitted, Claims, OfAUser, OfAnother, Unknown};
        for (speaker, of_ann, of_nobody, of_bob) in [
            (user(false), Admitted, Claims, OfAnother),
            (user(true), Admitted, Claims, Admitted),
            (own_token, Admitted, Unknown, Unknown),
            (notice, Admitted, Admitted, OfAUser),
            (Some(Speaker::Application), Admitted, Admitted, Admitted),
            (None, OfAUser, Admitted, OfAUser),
        ] {
            let got = [Some("ann"), None, Some("bob")].map(|owner| admission(speaker.as_ref(), owner));
            assert_eq!(got, [of_ann, of_nobody, of_bob], "{speaker:?}");
        }
    }

    #[test]
    fn ids_that_triggers_make_are_told_from_others() {
        for id in ["telegram/99/42", "slack/T1/C1", "webhook/w1", "mail-abc", "schedule-report", "herald-0"] {
            assert!(is_of_a_trigger(id), "{id}");
        }
        for id in ["c1", "user/1", "telegram", "my-schedule-1", "herald"] {
            assert!(!is_of_a_trigger(id), "{id}");
        }
    }

    #[test]
    fn a_space_has_no_slash() {
        assert!(is_space("acme-1.eu"));
        assert!(["", "a/b", "a b", "ä", &"x".repeat(65)].iter().all(|name| !is_space(name)));
    }
}
