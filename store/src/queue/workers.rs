//! Who works: the heartbeats, read.

use crate::{Result, Store};
use chrono::{DateTime, Utc};

/// One worker process as it is shown.
#[derive(Clone, Debug, serde::Serialize)]
pub struct WorkerView {
    pub worker_id: String,
    pub host: String,
    pub pid: i32,
    pub version: String,
    /// Jobs of each kind that it takes at a time.
    pub concurrency: i32,
    pub started_at: DateTime<Utc>,
    /// Seconds since its last heartbeat, by the database's clock.
    pub beat_age_s: f64,
    /// Jobs whose leases it holds and that have not ended.
    pub leases: i64,
}

impl Store {
    /// The workers that beat within the last day, the latest first. One that ended in order has removed itself; one
    /// that was killed is still there and silent.
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
