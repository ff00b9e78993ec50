//! Which version of Absurd a database has, and whether it can be read.
//!
//! The tables decide, not the version's word: `main` says nothing of what it has, and a queue that is older than the last
//! migration of its schema may lack a column. The oldest version that can be read is 0.0.3, and each one since only added columns.

use super::source::Source;
use crate::{Error, Result};

/// The columns that are read here, or written by `take` and `back`: the kind of the table, and the column.
const NEEDED: [(&str, &str); 31] = [
    ("t", "task_id"),
    ("t", "task_name"),
    ("t", "params"),
    ("t", "cancellation"),
    ("t", "enqueue_at"),
    ("t", "first_started_at"),
    ("t", "state"),
    ("t", "attempts"),
    ("t", "last_attempt_run"),
    ("t", "completed_payload"),
    ("t", "cancelled_at"),
    ("r", "run_id"),
    ("r", "task_id"),
    ("r", "attempt"),
    ("r", "state"),
    ("r", "claimed_by"),
    ("r", "claim_expires_at"),
    ("r", "available_at"),
    ("r", "wake_event"),
    ("r", "event_payload"),
    ("r", "completed_at"),
    ("r", "failed_at"),
    ("r", "failure_reason"),
    ("c", "task_id"),
    ("c", "checkpoint_name"),
    ("c", "state"),
    ("c", "owner_run_id"),
    ("c", "updated_at"),
    ("e", "event_name"),
    ("e", "payload"),
    ("w", "step_name"),
];

impl Source {
    /// Finds the version, and what its tables have.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Schema`] if a column is missing that is needed.
    pub(super) async fn find_version(&mut self) -> Result<()> {
        let says: bool = sqlx::query_scalar(
            "select exists (select from pg_proc p join pg_namespace n on n.oid = p.pronamespace
                where n.nspname = $1 and p.proname = 'get_schema_version')",
        )
        .bind(self.schema)
        .fetch_one(&mut self.connection)
        .await?;
        self.version = match (self.schema, says) {
            ("durable", _) => "of its own".to_owned(),
            (_, true) => {
                sqlx::query_scalar("select absurd.get_schema_version()")
                    .fetch_one(&mut self.connection)
                    .await?
            }
            (_, false) => "0.1 or older".to_owned(),
        };
        // From the catalog, because the information schema leaves out what this role may not read.
        self.has_status = self.schema == "absurd";
        // Without the status, checkpoints that Absurd hides would count.
        let status = self.has_status.then_some(("c", "status"));
        let (kinds, columns): (Vec<&str>, Vec<&str>) = NEEDED.into_iter().chain(status).unzip();
        let queues = format!("select queue_name from {}.queues", self.schema);
        let missing = format!(
            "select c.relname || '.' || needed.column_name
            from ({queues}) q
            cross join unnest($2::text[], $3::text[]) as needed (kind, column_name)
            join pg_class c on c.relname = needed.kind || '_' || q.queue_name
            join pg_namespace n on n.oid = c.relnamespace and n.nspname = $1
            where not exists (select from pg_attribute a
                where a.attrelid = c.oid and a.attname = needed.column_name and not a.attisdropped)
            order by 1"
        );
        let missing: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(missing))
            .bind(self.schema)
            .bind(&kinds)
            .bind(&columns)
            .fetch_all(&mut self.connection)
            .await?;
        if !missing.is_empty() {
            return Err(Error::Schema(format!(
                "tables of {} (version {}) cannot be read, because they lack {}; Absurd 0.0.3 to 0.5 has these columns, and so \
                 has a queue that its migrations have reached",
                self.schema,
                self.version,
                missing.join(", ")
            )));
        }
        self.has_key = self.all_have("t", "idempotency_key").await?;
        Ok(())
    }

    /// Whether this table of every queue has the column.
    async fn all_have(&mut self, kind: &str, column: &str) -> Result<bool> {
        let sql = format!(
            "select not exists (select from {0}.queues q
                join pg_class c on c.relname = $1 || '_' || q.queue_name
                join pg_namespace n on n.oid = c.relnamespace and n.nspname = '{0}'
                where not exists (select from pg_attribute a
                    where a.attrelid = c.oid and a.attname = $2 and not a.attisdropped))",
            self.schema
        );
        let sql = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).bind(kind).bind(column);
        Ok(sql.fetch_one(&mut self.connection).await?)
    }
}
