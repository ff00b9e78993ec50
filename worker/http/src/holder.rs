//! Who holds places, room and disk of the process, where one caller may take only a part of them.

use crate::access::{Caller, Who};

/// A caller, by its token or as a user. All tokens of a user are one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Token(String),
    User { space_id: String, user_id: String },
}

impl Holder {
    /// The caller, and for a user also the token that asked for the user's token. Otherwise that token could take all places for
    /// users that it makes up. Empty for this machine and the configured token, which may take all.
    pub fn all(caller: &Caller) -> Vec<Holder> {
        let issuer = match &caller.who {
            Who::User { issuer, .. } => issuer.clone().map(Holder::Token),
            _ => None,
        };
        Holder::of(caller).into_iter().chain(issuer).collect()
    }

    /// `None`: this machine or the configured token, which may take all.
    pub fn of(caller: &Caller) -> Option<Holder> {
        match &caller.who {
            Who::ThisMachine | Who::Configuration => None,
            Who::Token { token_id, .. } => Some(Holder::Token(token_id.clone())),
            Who::User { user_id, .. } => {
                Some(Holder::User { space_id: caller.space().to_owned(), user_id: user_id.clone() })
            }
        }
    }
}
