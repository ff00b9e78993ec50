//! What people see of the jobs: how many there are, and what interrupts one.

use super::Lease;
use crate::{Result, Store};

impl Store {
    /// Records on a job's row what interrupts its claim, which goes on.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn note_fault(&self, lease: &Lease, error: &str) -> Result<()> {
        sqlx::query!(
            "update jobs set last_error = $3 where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token,
            crate::error::bounded(error)
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Counts the deployed workers' jobs by kind: ready, leased, delayed, and for how many seconds the oldest
    /// ready job has been ready. Leaves out jobs of replays, because only their own process runs them.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn queue_depth(&self) -> Result<Vec<Depth>> {
        Ok(sqlx::query_as!(
            Depth,
            r#"
            select kind,
                count(*) filter (where run_at <= clock_timestamp()) as "ready!",
                count(*) filter (where run_at > clock_timestamp() and lease is not null) as "leased!",
                count(*) filter (where run_at > clock_timestamp() and lease is null) as "delayed!",
                coalesce(extract(epoch from clock_timestamp()
                    - min(run_at) filter (where run_at <= clock_timestamp())), 0)::float8 as "oldest_ready_s!"
            from jobs
            where runner = ''
            group by kind
            order by kind
            "#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

/// Number of jobs of one kind.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Depth {
    pub kind: String,
    pub ready: i64,
    pub leased: i64,
    pub delayed: i64,
    pub oldest_ready_s: f64,
}
