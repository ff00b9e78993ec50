//! What an erasure would take, what would stay, and why it would be refused. Writes nothing.

use super::{BY_CONVERSATION, BY_SESSION, Erasure, Subject, blobs, find, holds, keys};
use crate::export::taken;
use crate::{Error, Result, Store};
use sqlx::{AssertSqlSafe, PgConnection};

impl Store {
    /// Says what [`Store::erase`] would take, and why it would be refused. Writes nothing.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is nothing, [`Error::Database`].
    pub async fn plan_erasure(&self, space: &str, subject: &Subject) -> Result<Erasure> {
        let mut tx = self.pool.begin().await?;
        // It may read every log, as the erasure does.
        sqlx::query("set local statement_timeout = 0").execute(&mut *tx).await?;
        let mut erasure = find(&mut tx, space, subject).await?;
        let of_ids = |erasure: &Erasure| (erasure.conversations.clone(), erasure.sessions.clone());
        let (conversations, sessions) = of_ids(&erasure);
        let owned = BY_CONVERSATION.map(|table| (table, "conversation_id", &conversations));
        let by_session = BY_SESSION.map(|table| (table, "session_id", &sessions));
        let seeds = [("session_seed_messages", "session_id", &sessions)];
        for (table, column, ids) in owned.into_iter().chain(by_session).chain(seeds) {
            let count = format!("select count(*) from {table} where {column} = any($1)");
            let count: i64 = sqlx::query_scalar(AssertSqlSafe(count)).bind(ids).fetch_one(&mut *tx).await?;
            erasure.rows.insert(table.to_owned(), count);
        }
        erasure.rows.insert("conversation_counters".to_owned(), conversations.len() as i64);
        erasure.rows.insert("conversation_sessions".to_owned(), sessions.len() as i64);
        let blobs = blobs::candidates(&mut tx, &conversations, &sessions).await?;
        erasure.rows.insert("blobs".to_owned(), blobs.len() as i64);
        let keys = keys::only_of(&mut tx, &conversations).await?;
        if !keys.is_empty() {
            erasure.rows.insert("data_keys".to_owned(), keys.len() as i64);
        }
        erasure.takes(taken(&mut tx, &erasure.sessions).await?);
        erasure
            .stays
            .push("blobs that other conversations point at too: the number above counts them".to_owned());
        for hold in holds::standing(&mut tx, space, &conversations, subject).await? {
            erasure.refused.push(hold.to_string());
        }
        erasure.refused.extend(at_work(&mut tx, &conversations).await?);
        tx.rollback().await?;
        erasure.refused.extend(self.lacks_role().await?);
        Ok(erasure)
    }

    /// Says what is missing if this user of the database may not erase.
    async fn lacks_role(&self) -> Result<Option<String>> {
        let mut tx = match self.retention().await {
            Err(Error::NotErased { reason }) => return Ok(Some(reason)),
            tx => tx?,
        };
        // Another database of the server may have made the role, and here it has no rights yet.
        let seen = sqlx::query("select from erasures where false").execute(&mut *tx).await;
        match seen.map_err(|error| super::explained(error.into())) {
            Err(Error::NotErased { reason }) => return Ok(Some(reason)),
            seen => seen?,
        };
        tx.rollback().await?;
        Ok(None)
    }
}

/// The sessions and deliveries that an erasure would have to wait for.
async fn at_work(tx: &mut PgConnection, conversations: &[String]) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"select 'session ' || session_id || ' is at work' as "what!" from conversation_sessions
        where conversation_id = any($1) and status in ('queued', 'running')
        union all
        select distinct 'a message of ' || conversation_id || ' is being sent' from jobs
        where conversation_id = any($1) and kind = 'deliver' and lease is not null and run_at >= clock_timestamp()
        order by 1"#,
        conversations
    )
    .fetch_all(tx)
    .await?)
}
