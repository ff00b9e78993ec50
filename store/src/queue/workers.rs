//! The list of worker processes, read from their heartbeats.

use crate::{Result, Store};
use chrono::{DateTime, Utc};

/// One worker process as the CLI and the API show it.
#[derive(Clone, Debug, serde::Serialize)]
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

impl Store {
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
