//! The chain of a conversation: the conversations that it was forked from, up to the first, and those that
//! were forked from it.

use crate::session::{SessionSummary, shown};
use crate::{Error, Result, Store};
use sqlx::PgConnection;

impl Store {
    /// Returns the sessions of the conversation and of its parents and children, newest first. `before` is
    /// the last session of the previous page.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a conversation that does not exist, [`Error::Database`].
    pub async fn chain(
        &self,
        conversation_id: &str,
        before: Option<&str>,
        limit: i64,
    ) -> Result<Vec<SessionSummary>> {
        let mut connection = self.pool.acquire().await?;
        let chain = chain(&mut connection, conversation_id).await?;
        if chain.is_empty() {
            return Err(Error::NotFound { what: "conversation", id: shown(conversation_id).to_owned() });
        }
        let page = sqlx::query_scalar!(
            "select session_id from conversation_sessions
            where conversation_id = any ($1)
                and ($2::text is null
                    or ordinal < (select ordinal from conversation_sessions where session_id = $2))
            order by ordinal desc
            limit $3",
            &chain,
            before,
            limit
        )
        .fetch_all(&mut *connection)
        .await?;
        drop(connection);
        let mut sessions = self.sessions_by_id(&page).await?;
        sessions.sort_by_key(|session| page.iter().position(|id| *id == session.session_id));
        Ok(sessions)
    }
}

/// Returns the ids of the conversation, of all its parents, and of all conversations that were forked from
/// it. Empty if the conversation does not exist. Ends even if someone edited the rows into a cycle.
pub(crate) async fn chain(connection: &mut PgConnection, conversation_id: &str) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"
        with recursive up as (
            select conversation_id, parent_conversation_id from conversation_counters where conversation_id = $1
            union
            select c.conversation_id, c.parent_conversation_id from up
            join conversation_counters c on c.conversation_id = up.parent_conversation_id
        ), down as (
            select conversation_id from conversation_counters where conversation_id = $1
            union
            select c.conversation_id from down
            join conversation_counters c on c.parent_conversation_id = down.conversation_id
        )
        select conversation_id as "conversation_id!" from up
        union
        select conversation_id from down
        "#,
        conversation_id
    )
    .fetch_all(connection)
    .await?)
}
