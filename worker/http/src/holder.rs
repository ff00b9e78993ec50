//! Who holds places, room and disk of the process, where one caller may take only a part of them.

use crate::access::{Caller, Who};

/// A caller, by its token or as a user. All tokens of a user are one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Token(String),
    User { space_id: String, user_id: String },
}

impl Holder {
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
