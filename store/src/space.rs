//! Which rows a task sees: those of one space, of all, or none.
//!
//! Row-level security compares each row with a setting of the connection (see `migrations/*_row_level_security.sql`). The edge
//! (a request, a command) says which space it is about, and runs the rest inside [`within`]. Every statement in there gets
//! a connection that sees that space. So no function between the two passes the space on, and a statement that forgets its
//! condition finds nothing of another space.
//!
//! A task outside of any [`within`] works for all spaces: the loop of a worker, the scheduler, a command of an operator. A
//! task that is spawned is outside too, so what it spawns for one space says so again.
//!
//! Superusers and roles with BYPASSRLS see everything whatever the setting says, so statements keep their conditions.

use std::sync::Arc;

/// The setting that the policies read.
pub(crate) const SETTING: &str = "wakeful.space";

/// Its value for all spaces. No space has this name.
pub(crate) const ALL: &str = "*";

/// What a task sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// No row of any space.
    Nothing,
    /// The rows of one space.
    Space(Arc<str>),
    /// The rows of all spaces.
    All,
}

tokio::task_local! {
    static SCOPE: Scope;
}

impl Scope {
    /// The space of this name.
    pub fn of(space: &str) -> Scope {
        Scope::Space(space.into())
    }

    /// The value of the setting.
    pub(crate) fn setting(&self) -> &str {
        match self {
            Scope::Nothing => "",
            // No space has the name that means all spaces.
            Scope::Space(name) if **name == *ALL => "",
            Scope::Space(name) => name,
            Scope::All => ALL,
        }
    }

    /// The statement that tells the server.
    pub(crate) fn told(&self) -> String {
        // In a quoted text only the quote is special.
        format!("select set_config('{SETTING}', '{}', false)", self.setting().replace('\'', "''"))
    }
}

/// Runs `work` in a scope.
pub async fn within<W: Future>(scope: Scope, work: W) -> W::Output {
    SCOPE.scope(scope, work).await
}

/// Polls something in a scope, such as the body of an answer, which outlives the task that made it.
pub fn polled<T>(scope: &Scope, poll: impl FnOnce() -> T) -> T {
    SCOPE.sync_scope(scope.clone(), poll)
}

/// What this task sees.
pub(crate) fn current() -> Scope {
    SCOPE.try_with(Clone::clone).unwrap_or(Scope::All)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_innermost_scope_holds_and_a_spawned_task_has_none() {
        assert_eq!(current(), Scope::All);
        within(Scope::Nothing, async {
            assert_eq!(current(), Scope::Nothing);
            within(Scope::of("acme"), async { assert_eq!(current(), Scope::of("acme")) }).await;
            assert_eq!(current(), Scope::Nothing);
            assert_eq!(tokio::spawn(async { current() }).await.unwrap(), Scope::All);
        })
        .await;
        assert_eq!(polled(&Scope::of("acme"), current), Scope::of("acme"));
    }

    #[test]
    fn a_name_is_no_sql_and_no_name_means_all() {
        assert_eq!(Scope::of("a'b").told(), "select set_config('wakeful.space', 'a''b', false)");
        assert_eq!(Scope::of(ALL).setting(), "");
    }
}
