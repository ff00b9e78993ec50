//! What people see of the jobs: how many there are, and what interrupts one.

use super::Lease;
use crate::{Result, Store};

impl Store {
    /// Records on a job's row that the database failed its step. Touches no other table, so it works where the step's own
    /// statement does not. Returns how often that happened since the last progress, and for how many seconds. `None`: the lease
    /// is lost.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn note_fault(&self, lease: &Lease, error: &str) -> Result<Option<Faults>> {
        // Only a process with [encryption] asks another table, for the key.
        let error = self.sealed_for_job(lease.job_id, error).await?;
        Ok(sqlx::query_as!(
            Faults,
            r#"update jobs
            set last_error = $3, faults = faults + 1, fault_since = coalesce(fault_since, clock_timestamp())
            where job_id = $1 and lease = $2
            returning faults as "times", extract(epoch from clock_timestamp() - fault_since)::float8 as "lasted_s!""#,
            lease.job_id,
            lease.token,
            error
        )
        .fetch_optional(&self.pool)
        .await?)
    }

    /// Returns the steps at which two workers died or more, without progress between; at most 100.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn deadly_steps(&self) -> Result<Vec<DeadlyStep>> {
        Ok(sqlx::query_as!(
            DeadlyStep,
            r#"select j.session_id as "session_id!", j.died,
                array(
                    select c.name from tool_calls c
                    where c.session_id = j.session_id and c.result_message_number is null
                    order by c.call_id
                    limit 10
                ) as "tools!"
            from jobs j
            where j.kind = 'step' and j.died > 1 and j.session_id is not null
            order by j.died desc
            limit 100"#
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Returns the steps that the database has failed more than once without progress between, the oldest first; at most 100.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn faulty_steps(&self) -> Result<Vec<FaultyStep>> {
        let mut steps = sqlx::query_as!(
            FaultyStep,
            r#"select session_id as "session_id!", faults as "times",
                extract(epoch from clock_timestamp() - fault_since)::float8 as "lasted_s!",
                coalesce(last_error, '') as "last_error!"
            from jobs
            where fault_since is not null and faults > 1 and session_id is not null
            order by fault_since
            limit 100"#
        )
        .fetch_all(&self.pool)
        .await?;
        for step in &mut steps {
            let error = std::mem::take(&mut step.last_error);
            step.last_error = self.reveal(Some(&step.session_id), error).await;
        }
        Ok(steps)
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

    /// Returns the spaces whose jobs are ready and wait for a slot of a deployed worker, those with the most jobs first; at most ten.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn waiting_spaces(&self) -> Result<Vec<WaitingSpace>> {
        Ok(sqlx::query_as!(
            WaitingSpace,
            r#"
            select space_id, count(*) as "ready!",
                extract(epoch from clock_timestamp() - min(run_at))::float8 as "oldest_ready_s!"
            from jobs
            where runner = '' and lease is null and held_by is null and run_at <= (select clock_timestamp())
            group by space_id
            order by count(*) desc, space_id
            limit 10
            "#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

/// A step at which workers died one after the other.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DeadlyStep {
    pub session_id: String,
    pub died: i32,
    /// The tools of its calls that have no result.
    pub tools: Vec<String>,
}

/// How often the database failed a step without progress between, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    pub times: i32,
    pub lasted_s: f64,
}

/// A step that the database fails again and again.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FaultyStep {
    pub session_id: String,
    pub times: i32,
    pub lasted_s: f64,
    pub last_error: String,
}

/// Number of jobs of one kind.
#[derive(Clone, Debug, serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Depth {
    pub kind: String,
    pub ready: i64,
    pub leased: i64,
    pub delayed: i64,
    pub oldest_ready_s: f64,
}

/// A space whose jobs wait for a slot.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WaitingSpace {
    pub space_id: String,
    pub ready: i64,
    pub oldest_ready_s: f64,
}
