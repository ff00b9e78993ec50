//! Which blobs an erasure takes: those that the erased rows point at, and no other row.

use crate::error::Outage;
use crate::{Error, Result, Store};
use sqlx::{AssertSqlSafe, PgConnection};
use std::time::Duration;

/// Returns the blobs that rows of these conversations and sessions name. A pointer is a SHA-256 in hex wherever it stands, so
/// a kind of pointer that this code does not know is found too.
pub(super) async fn candidates(
    tx: &mut PgConnection,
    conversations: &[String],
    sessions: &[String],
) -> Result<Vec<String>> {
    let found = sqlx::query_scalar!(
        r#"select distinct b.sha256 as "sha256!"
        from (
            select concat(content::text, details::text) as text from conversation_records where conversation_id = any($1)
            union all
            select content::text from deliveries where conversation_id = any($1)
            union all
            select payload::text from session_events where session_id = any($2)
            union all
            select attachments::text from session_inbox where session_id = any($2) and attachments is not null
            union all
            select concat(outcome::text, receipt::text) from tool_calls where session_id = any($2)
            union all
            select concat(prefix_sha256, state::text, initial_state::text) from conversation_sessions
            where session_id = any($2)
        ) rows
        cross join lateral regexp_matches(rows.text, '[0-9a-f]{64}', 'g') as named
        join blobs b on b.sha256 = named[1]
        union
        -- Packs whose commit never came.
        select b.sha256 from blobs b where b.stored_for = any($2)
        order by 1"#,
        conversations,
        sessions
    )
    .fetch_all(tx)
    .await?;
    Ok(found)
}

/// How long one attempt waits for the lock of a table. Meanwhile, writers that need a lock of the table wait behind it.
const ASK_MS: u64 = 100;

/// The pause before the next attempt, in which the others get their locks.
const PAUSE: Duration = Duration::from_millis(400);

/// Locks a table from those who write it, until the transaction ends.
///
/// A vacuum or the build of an index may keep it from us for hours. As long as we stand in line for it, every new conversation and
/// every end of a run stand behind us. So we ask for a moment, step back, and ask again.
pub(super) async fn lock_from_writers(tx: &mut PgConnection, table: &str) -> Result<()> {
    loop {
        let ask = format!(
            "savepoint ask; set local lock_timeout = {ASK_MS}; lock table {table} in share row exclusive mode; \
             set local lock_timeout = 0; release savepoint ask"
        );
        let Err(error) = sqlx::raw_sql(AssertSqlSafe(ask)).execute(&mut *tx).await else { return Ok(()) };
        let error = Error::from(error);
        if error.outage() != Some(Outage::Locked) {
            return Err(error);
        }
        sqlx::raw_sql("rollback to savepoint ask").execute(&mut *tx).await?;
        tokio::time::sleep(PAUSE).await;
    }
}

impl Store {
    /// Deletes those of `blobs` that no row of their space names any more, and returns how many. Reads every row that may name one, so
    /// it takes a time that grows with the database. It reads without a lock: the blobs are marked before, and who stores one of them again
    /// takes the mark away. The deletion waits for those who are storing blobs, and takes only what is still marked. What was
    /// stored a short time ago for a session that is not among `erased` gets no mark: the row that names it may be on its way.
    pub(super) async fn delete_unused_blobs(&self, blobs: &[String], erased: &[String]) -> Result<i64> {
        if blobs.is_empty() {
            return Ok(0);
        }
        let mut tx = self.retention().await?;
        lock_from_writers(&mut tx, "blobs").await?;
        // The prefix of a session is the agent's, which most sessions share: it gets no mark.
        let marked = sqlx::query!(
            r#"select name as "name!", space as "space!" from mark_blobs($1, $2)"#,
            blobs,
            erased
        );
        let marked = marked.fetch_all(&mut *tx).await?;
        tx.commit_part().await?;
        if marked.is_empty() {
            return Ok(0);
        }
        let (blobs, spaces): (Vec<String>, Vec<String>) =
            marked.into_iter().map(|row| (row.name, row.space)).unzip();
        let mut tx = self.retention().await?;
        let unused = sqlx::query!(
            r#"with found as materialized (
                -- Of these blobs alone: all names that the logs have would be too many to compare each blob with.
                select named[1] as sha256, rows.space_id
                from (
                    select space_id, concat(content::text, details::text) as text from conversation_records
                    union all
                    select space_id, content::text from deliveries
                    union all
                    select space_id, payload::text from session_events
                    union all
                    select space_id, attachments::text from session_inbox where attachments is not null
                    union all
                    select space_id, concat(outcome::text, receipt::text) from tool_calls
                    union all
                    select space_id, concat(prefix_sha256, state::text, initial_state::text) from conversation_sessions
                ) rows
                cross join lateral regexp_matches(rows.text, '[0-9a-f]{64}', 'g') as named
                where rows.space_id = any($2) and named[1] = any($1)
            )
            select b.sha256 as "sha256!", b.space_id as "space_id!"
            from unnest($1::text[], $2::text[]) as b (sha256, space_id)
            where not exists (select from found where found.sha256 = b.sha256 and found.space_id = b.space_id)"#,
            &blobs,
            &spaces
        )
        .fetch_all(&mut *tx)
        .await?;
        if unused.is_empty() {
            tx.rollback().await?;
            return Ok(0);
        }
        let (blobs, spaces): (Vec<String>, Vec<String>) =
            unused.into_iter().map(|row| (row.sha256, row.space_id)).unzip();
        lock_from_writers(&mut tx, "blobs").await?;
        // A new session uses its prefix without taking the mark away, so the statement looks for such sessions again.
        let deleted = sqlx::query!(
            // "offset 0" makes Postgres look for each blob by itself. Then it answers from the index of prefixes alone.
            "delete from blobs
            using unnest($1::text[], $2::text[]) as b (sha256, space_id)
            where blobs.sha256 = b.sha256 and blobs.space_id = b.space_id
                and blobs.touched_at = '-infinity'
                and not exists (
                    select from conversation_sessions s
                    where s.prefix_sha256 = blobs.sha256 and s.space_id = blobs.space_id offset 0
                )",
            &blobs,
            &spaces
        )
        .execute(&mut *tx)
        .await?;
        tx.commit_part().await?;
        Ok(deleted.rows_affected() as i64)
    }
}
