//! Who may do what: the scopes of tokens, and which sessions a caller reaches.
#![deny(missing_docs)]

use serde::{Deserialize, Serialize};

/// What a token allows. Each scope includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// The user that a message speaks for. The first one is the conversation's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Speaker {
    /// The user, as the application names people.
    pub user_id: String,
    /// Other users may write in the conversation too.
    pub shared: bool,
    /// The user's own token brought the message: a conversation of anyone else does not exist for it.
    pub own_token: bool,
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
    /// The speaker does not even learn that it exists.
    Unknown,
}

impl Speaker {
    /// Decides about an existing conversation of `owner`.
    pub fn admission(&self, owner: Option<&str>) -> Admission {
        match owner {
            Some(owner) if owner == self.user_id => Admission::Admitted,
            Some(_) | None if self.own_token => Admission::Unknown,
            Some(_) if self.shared => Admission::Admitted,
            Some(_) => Admission::OfAnother,
            None => Admission::Claims,
        }
    }
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
        let speaker = |shared, own_token| Speaker { user_id: "ann".to_owned(), shared, own_token };
        for (shared, own_token, owner, admission) in [
            (false, false, Some("ann"), Admission::Admitted),
            (false, false, None, Admission::Claims),
            (false, false, Some("bob"), Admission::OfAnother),
            (true, false, Some("bob"), Admission::Admitted),
            (true, true, Some("bob"), Admission::Unknown),
            (false, true, Some("ann"), Admission::Admitted),
            (false, true, None, Admission::Unknown),
        ] {
            assert_eq!(
                speaker(shared, own_token).admission(owner),
                admission,
                "{shared} {own_token} {owner:?}"
            );
        }
    }

    #[test]
    fn a_space_has_no_slash() {
        assert!(is_space("acme-1.eu"));
        assert!(["", "a/b", "a b", "ä", &"x".repeat(65)].iter().all(|name| !is_space(name)));
    }
}
