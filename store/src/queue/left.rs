//! Steps of agents that some workers lack, as in a rolling deploy of a configuration.
//!
//! A worker that claims a step and lacks its agent leaves it to the others: the job is held under the agent's name, out of the way
//! of every ordinary claim, and its waiting costs nothing. Workers that have the agent claim it with a statement of their own, when
//! they hear of it and every half minute. So no two workers hand a job to and fro.

use super::claim::{ClaimedRow, Wanted};
use super::notify::{JOBS, LEFT, payload};
use super::{Kind, Lease};
use crate::pool::{Lent, in_time};
use crate::{Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::time::Duration;

/// Before the agent's name in `jobs.held_by`.
pub const LACKS: &str = "lacks:";

/// An agent that a process has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    pub agent: String,
    /// `None`: for every space.
    pub space_id: Option<String>,
}

impl Served {
    /// As the list of workers shows it.
    pub fn shown(&self) -> String {
        match &self.space_id {
            Some(space_id) => format!("{space_id}/{}", self.agent),
            None => self.agent.clone(),
        }
    }
}

/// An agent that sessions wait for.
#[derive(Clone, Debug, Serialize)]
pub struct LackedAgent {
    pub agent: String,
    pub space_id: String,
    pub sessions: i64,
    /// Since when the first of them waits.
    pub since: Option<DateTime<Utc>>,
}

/// Claims steps that other workers left because they lack the agent.
pub(super) async fn claim_left(lent: &mut Lent, wanted: &Wanted<'_>) -> Result<Vec<ClaimedRow>> {
    let Wanted { settings, worker_id, limit, token, liveness_lock } = *wanted;
    let held: Vec<String> = settings.agents.iter().map(|one| format!("{LACKS}{}", one.agent)).collect();
    let spaces: Vec<Option<String>> = settings.agents.iter().map(|one| one.space_id.clone()).collect();
    let claimed = sqlx::query_as!(
        ClaimedRow,
        r#"
        with mine as materialized (
            select job_id from jobs
            where held_by = any ($1::text[])
                and kind = $5
                and runner = $6
                and lease is null
                and exists (
                    select from unnest($1::text[], $2::text[]) as served (held_by, space_id)
                    where served.held_by = jobs.held_by
                        and (served.space_id is null or served.space_id = jobs.space_id)
                )
            order by held_since
            limit $3
            for update skip locked
        )
        update jobs
        set lease = $9,
            worker_id = $4,
            liveness_lock = $8,
            run_at = clock_timestamp() + make_interval(secs => $7),
            stuck = stuck + 1,
            attempt = attempt + 1,
            waits_for = null,
            held_by = null,
            held_since = null
        where job_id = any (array(select job_id from mine))
        returning job_id, lease as "token!", false as "suspect!",
            conversation_id, session_id, channel, step_number, attempt, stuck, died, last_error, trace_context,
            outage_faults, extract(epoch from clock_timestamp() - outage_since)::float8 as outage_s, gate_pass, pause_passes,
            null::float8 as age_s, null::jsonb as "turn: _"
        "#,
        &held,
        &spaces as &[Option<String>],
        limit as i64,
        worker_id,
        settings.kind.as_str(),
        &*settings.runner,
        settings.lease.as_secs_f64(),
        liveness_lock,
        token
    )
    .fetch_all(lent.sends());
    let rows = in_time(claimed).await;
    lent.answered(&rows);
    Ok(rows?)
}

impl Store {
    /// Gives back a step whose agent this process lacks. Only workers that have the agent claim it, and any worker once `look` has passed.
    /// The claim does not count.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn leave(&self, lease: &Lease, agent: &str, look: Duration) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        let left_first = sqlx::query_scalar!(
            r#"update jobs
            set lease = null, worker_id = null, stuck = greatest(stuck - 1, 0), attempt = greatest(attempt - 1, 0),
                held_by = $3, held_since = coalesce(held_since, now()),
                -- One that is to be cancelled is any worker's.
                run_at = clock_timestamp() + make_interval(secs => case when exists (
                    select from conversation_sessions s where s.session_id = jobs.session_id and s.cancel_requested
                -- Each look comes after twice the time of the one before, and after an hour at most.
                ) then 0.1 else least(
                    greatest($4::float8, coalesce(extract(epoch from clock_timestamp() - held_since)::float8, 0)), 3600
                ) end),
                fault_since = null, faults = 0, trace_context = $5
            where job_id = $1 and lease = $2
            returning held_since = now() as "first!""#,
            lease.job_id,
            lease.token,
            format!("{LACKS}{agent}"),
            look.as_secs_f64(),
            lease.trace_context.as_deref()
        )
        .fetch_optional(&mut *tx)
        .await?;
        // The statement above may have waited for a cancel, which found no waiting job.
        let cancelled = sqlx::query!(
            "update jobs set run_at = clock_timestamp(), held_by = null, held_since = null
            where job_id = $1 and lease is null
                and exists (select from conversation_sessions s
                    where s.session_id = jobs.session_id and s.cancel_requested)",
            lease.job_id
        )
        .execute(&mut *tx)
        .await?;
        let told = if cancelled.rows_affected() > 0 {
            Some(payload(Kind::Step.as_str(), ""))
        } else {
            // A look that found nothing new needs no other worker to look.
            left_first.filter(|first| *first).map(|_| LEFT.to_owned())
        };
        if let Some(told) = told {
            sqlx::query!("select pg_notify($1, $2)", JOBS, told).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// The agents that sessions wait for, because the workers that claimed their steps lack them.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn lacked_agents(&self) -> Result<Vec<LackedAgent>> {
        Ok(sqlx::query_as!(
            LackedAgent,
            // A range of texts depends on how the database sorts them, so each name is asked for what it begins with. The index gives
            // one name after the other: few names hold many jobs.
            r#"with recursive names (held_by) as (
                (select held_by from jobs where held_by is not null order by held_by limit 1)
                union all
                select (select held_by from jobs where held_by > names.held_by order by held_by limit 1)
                from names
                where names.held_by is not null
            )
            select substr(held_by, 7) as "agent!", space_id as "space_id!", count(*) as "sessions!", min(held_since) as since
            from (
                select held.* from names
                cross join lateral (
                    select held_by, space_id, held_since from jobs where held_by = names.held_by and lease is null
                ) held
                where starts_with(names.held_by, 'lacks:')
                limit 100000
            ) held
            group by held_by, space_id
            order by held_by, space_id
            limit 100"#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}
