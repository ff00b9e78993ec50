//! `--space`: which space a command is about.
//!
//! The commands log in to the database with an operator's rights, which row-level security may not bind. So each verb
//! compares the space itself.

use wakeful_store::{Error, Store};
use wakeful_workflow::access::is_space;
use wakeful_workflow::id::{DEFAULT_SPACE, InvalidConversationId, conversation_id_in};

/// `--space` of a noun.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Space {
    /// Only this space: an id of another one is not found. Without it, ids and lists are of every space, and names
    /// of conversations and schedules are of the space `default`.
    #[arg(long = "space", value_name = "NAME", global = true, value_parser = named)]
    space: Option<String>,
}

fn named(name: &str) -> Result<String, &'static str> {
    let rule = "a space has 1 to 64 letters, digits, -, _ and .";
    if is_space(name) { Ok(name.to_owned()) } else { Err(rule) }
}

impl Space {
    /// The space that the command names.
    pub fn named(&self) -> Option<&str> {
        self.space.as_deref()
    }

    /// The space of what has a name and no id.
    pub fn of_names(&self) -> &str {
        self.named().unwrap_or(DEFAULT_SPACE)
    }

    /// A conversation's id as stored.
    ///
    /// # Errors
    /// For an id that cannot be one.
    pub fn conversation(&self, id: &str) -> Result<String, InvalidConversationId> {
        conversation_id_in(self.of_names(), id)
    }

    /// The same for a list, in which an id that cannot be one matches nothing.
    pub fn stored(&self, id: &str) -> String {
        format!("{}/{id}", self.of_names())
    }

    /// Checks that these sessions are of the space, if one is named.
    ///
    /// # Errors
    /// [`Error::NotFound`], as for an id that does not exist.
    pub async fn has(&self, store: &Store, sessions: &[&str]) -> Result<(), Error> {
        if let Some(space) = self.named() {
            for id in sessions {
                store.session(Some(space), id).await?;
            }
        }
        Ok(())
    }
}
