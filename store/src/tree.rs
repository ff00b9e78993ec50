//! The tree of forks that a session stands in.

use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;

/// At most so many sessions of a tree are shown.
pub const TREE_LIMIT: i64 = 5000;

/// A session in its tree.
#[derive(Clone, Debug, Serialize)]
pub struct Branch {
    pub session_id: String,
    /// As the API gives it: without the space.
    pub conversation_id: String,
    pub parent_session_id: Option<String>,
    /// How many forks it is away from the root.
    pub depth: i32,
    /// Where it was cut from its parent.
    pub forked_at_message_number: Option<i64>,
    pub forked_from_message_id: Option<String>,
    pub trigger_type: String,
    pub agent: String,
    pub model_id: String,
    pub status: String,
    pub to_message_number: i64,
    /// Its own: what its parent did is its parent's.
    pub total_turns: i32,
    pub total_cost_micros: i64,
    pub started_at: DateTime<Utc>,
}

impl Store {
    /// Every session of the tree that `session_id` stands in: each one is followed by its forks, oldest first. At most
    /// [`TREE_LIMIT`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn tree(&self, session_id: &str) -> Result<Vec<Branch>> {
        // Ids are ordered by time, so that paths are ordered as the tree is read. The bound of the depth is for rows that a
        // hand has tied into a ring.
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
