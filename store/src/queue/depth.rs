//! How many jobs there are, for people.

use crate::{Result, Store};

impl Store {
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
