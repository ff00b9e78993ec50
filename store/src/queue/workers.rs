//! The list of worker processes, read from their heartbeats.

use crate::{Result, Store};
use chrono::{DateTime, Utc};

/// The name that processes of the fleet have in `pg_stat_activity`.
pub const APPLICATION: &str = "wakeful";

/// One worker process as the CLI and the API show it.
#[derive(Clone, Debug, serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerView {
    pub worker_id: String,
    pub host: String,
    pub pid: i32,
    pub version: String,
    /// How many jobs of each kind the process works on at a time.
    pub concurrency: i32,
    pub started_at: DateTime<Utc>,
    /// Seconds since its last heartbeat, by the database's clock.
    pub beat_age_s: f64,
    /// Number of leases that the process holds now.
    pub leases: i64,
}

/// What the fleet wants of the server's connections.
#[derive(Clone, Copy, Debug)]
pub struct Connections {
    /// Workers with a recent heartbeat, and the most that they open together.
    pub workers: i64,
    pub wanted: i64,
    /// The server's `max_connections` without those that it keeps for administrators.
    pub limit: i64,
    /// Connections of other programs now.
    pub others: i64,
}

impl Connections {
    /// Says in words that the server has too few connections, and what helps. `None`: it has enough.
    pub fn shortage(&self) -> Option<(String, &'static str)> {
        let left = (self.limit - self.others).max(0);
        let said = format!(
            "{} workers want up to {} connections, and the server has {left} for them ({} in all, {} used by other \
             programs)",
            self.workers, self.wanted, self.limit, self.others
        );
        let remedy =
            "workers go on with fewer, slower: raise max_connections of the server, or run fewer processes";
        (self.wanted > left).then_some((said, remedy))
    }
}

impl Store {
    /// Compares what the workers want with what the server has. `own` is what a process wants that is not yet among
    /// the workers.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn fleet_connections(&self, own: Option<u32>) -> Result<Connections> {
        // A version before did not say what it wants.
        let row = sqlx::query!(
            r#"
            select count(*) as "workers!", coalesce(sum(coalesce(connections, 8)), 0)::bigint as "wanted!",
                current_setting('max_connections')::bigint
                    - current_setting('superuser_reserved_connections')::bigint
                    - coalesce(current_setting('reserved_connections', true)::bigint, 0) as "limit!",
                (
                    select count(*) from pg_stat_activity
                    where datid is not null
                        and coalesce(backend_type, 'client backend') = 'client backend'
                        and application_name is distinct from $1
                ) as "others!"
            from workers
            where beat_at > clock_timestamp() - interval '1 minute'
            "#,
            APPLICATION
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(Connections {
            workers: row.workers + i64::from(own.is_some()),
            wanted: row.wanted + i64::from(own.unwrap_or(0)),
            limit: row.limit,
            others: row.others,
        })
    }

    /// Returns the workers that sent a heartbeat within the last day, the latest first. A worker that shut
    /// down in order has removed its row. A killed worker's row stays, with an old heartbeat.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn workers(&self) -> Result<Vec<WorkerView>> {
        Ok(sqlx::query_as!(
            WorkerView,
            r#"
            select w.worker_id, w.host, w.pid, w.version, w.concurrency, w.started_at,
                extract(epoch from clock_timestamp() - w.beat_at)::float8 as "beat_age_s!",
                (
                    select count(*) from jobs
                    where jobs.worker_id = w.worker_id
                        and jobs.lease is not null
                        and jobs.run_at > clock_timestamp()
                ) as "leases!"
            from workers w
            where w.beat_at > clock_timestamp() - interval '1 day'
            order by w.beat_at desc
            limit 500
            "#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}
