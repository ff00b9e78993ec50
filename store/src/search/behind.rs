//! How far the search is behind.

use crate::{Result, Store};
use serde::Serialize;

/// How far the search is behind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Behind {
    /// Sessions with messages that may not be found yet.
    pub waiting: i64,
    /// For how long the oldest of them has waited, in seconds.
    pub behind_s: f64,
}

impl Store {
    /// How far the search is behind.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn search_behind(&self) -> Result<Behind> {
        Ok(sqlx::query_as!(
            Behind,
            r#"select count(*) as "waiting!",
                coalesce(extract(epoch from clock_timestamp() - min(h.due_at)), 0)::float8 as "behind_s!"
            from search_sessions h
            join conversation_sessions s using (session_id)
            where h.due_at <= (select clock_timestamp())"#
        )
        .fetch_one(&self.pool)
        .await?)
    }
}
