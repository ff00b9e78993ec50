//! The tree of forks that contains a session.

use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;

/// Maximum number of sessions of a tree that are shown.
pub const TREE_LIMIT: i64 = 5000;

/// A session in its tree of forks.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Branch {
    pub session_id: String,
    /// Without the space, as in the API.
    pub conversation_id: String,
    pub parent_session_id: Option<String>,
    /// Number of forks from the root to this session.
    pub depth: i32,
    /// The parent's message after which it was cut.
    pub forked_at_message_number: Option<i64>,
    pub forked_from_message_id: Option<String>,
    pub trigger_type: String,
    pub agent: String,
    pub model_id: String,
    pub status: String,
    pub to_message_number: i64,
    /// Of this session only, without its parent's turns.
    pub total_turns: i32,
    pub total_cost_micros: i64,
    pub started_at: DateTime<Utc>,
}

impl Store {
    /// All sessions of the tree that contains `session_id`. Each one is followed by its forks, oldest first.
    /// At most [`TREE_LIMIT`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn tree(&self, session_id: &str) -> Result<Vec<Branch>> {
        // Ids are ordered by time, so sorting by path gives the order of the tree. The depth limit protects
        // against rows that someone edited into a cycle.
        let branches = sqlx::query_as!(
            Branch,
            r#"
            with recursive up as (
                select session_id, parent_session_id, 0 as height
                from conversation_sessions
                where session_id = $1
                union all
                select p.session_id, p.parent_session_id, up.height + 1
                from up
                join conversation_sessions p on p.session_id = up.parent_session_id
                where up.height < 1000
            ), down as (
                (
                    select session_id, 0 as depth, array[session_id] as path
                    from up
                    order by height desc
                    limit 1
                )
                union all
                select c.session_id, down.depth + 1, down.path || c.session_id
                from down
                join conversation_sessions c on c.parent_session_id = down.session_id
                where down.depth < 1000
            )
            select s.session_id, substr(s.conversation_id, strpos(s.conversation_id, '/') + 1) as "conversation_id!",
                s.parent_session_id,
                down.depth as "depth!", s.forked_at_message_number, s.forked_from_message_id, s.trigger_type, s.agent,
                s.model_id, s.status, s.to_message_number, s.total_turns, s.total_cost_micros, s.started_at
            from down
            join conversation_sessions s on s.session_id = down.session_id
            order by down.path collate "C"
            limit $2
            "#,
            session_id,
            TREE_LIMIT
        )
        .fetch_all(&self.pool)
        .await?;
        if branches.is_empty() {
            return Err(Error::NotFound { what: "session", id: session_id.to_owned() });
        }
        Ok(branches)
    }
}
