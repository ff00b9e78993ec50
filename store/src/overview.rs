//! What an operator looks at first: how many sessions there are in each open or troubled status, and how deep the queue
//! was over the last day.

use crate::{Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use wakeful_workflow::access::Reach;

/// Sessions of one status are counted up to this number.
pub const COUNTED: i64 = 1000;

/// How many sessions have a status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counted {
    pub status: String,
    /// At most [`COUNTED`].
    pub count: i64,
}

/// The queue as one reading found it; in a history, the highest readings of five minutes, at the time of the first of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueSample {
    pub at: DateTime<Utc>,
    pub ready: i64,
    pub leased: i64,
    pub delayed: i64,
    pub oldest_ready_s: f64,
}

/// The latest sessions that [`Store::recent_runs`] reads, and how many runs and steps of each.
const SESSIONS: i64 = 500;
const OF_EACH: i64 = 50;

/// The runs of a stretch of time, by when they were opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Runs {
    /// The hour. `None`: all of them.
    pub hour: Option<DateTime<Utc>>,
    pub runs: i64,
    pub completed: i64,
    pub failed: i64,
    pub cost_micros: i64,
    /// From the message until the first step was committed: 19 of 20 runs took no longer.
    pub first_reply_p95_ms: Option<i64>,
}

/// The runs of the last day.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Day {
    /// All of them.
    #[serde(flatten)]
    pub all: Runs,
    /// Each hour in which runs were opened, the oldest first.
    pub hours: Vec<Runs>,
    /// Only the latest sessions were read: there may be more runs.
    pub is_partial: bool,
}

impl Store {
    /// Counts the caller's sessions that are open or in trouble, without replays and imports. Each count ends at
    /// [`COUNTED`], so that a large number of failed sessions does not make the overview slow.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn count_sessions(&self, reach: &Reach) -> Result<Vec<Counted>> {
        let mut tx = self.pool.planned().await?;
        // Each status stands in a condition of its own, because the planner uses a partial index only for a status it sees.
        let counted = sqlx::query_as!(
            Counted,
            r#"
            select status as "status!", count(*) as "count!"
            from (
                (select status from conversation_sessions
                    where status = 'queued'
                        and ($1::text is null or space_id = $1) and ($2::text is null or agent = $2)
                        and trigger_type not in ('replay', 'import') limit $3)
                union all
                (select status from conversation_sessions
                    where status = 'running'
                        and ($1::text is null or space_id = $1) and ($2::text is null or agent = $2)
                        and trigger_type not in ('replay', 'import') limit $3)
                union all
                (select status from conversation_sessions
                    where status = 'waiting_input'
                        and ($1::text is null or space_id = $1) and ($2::text is null or agent = $2)
                        and trigger_type not in ('replay', 'import') limit $3)
                union all
                (select status from conversation_sessions
                    where status = 'needs_attention'
                        and ($1::text is null or space_id = $1) and ($2::text is null or agent = $2)
                        and trigger_type not in ('replay', 'import') limit $3)
                union all
                (select status from conversation_sessions
                    where status = 'failed'
                        and ($1::text is null or space_id = $1) and ($2::text is null or agent = $2)
                        and trigger_type not in ('replay', 'import') limit $3)
            ) counted
            group by status
            order by status
            "#,
            reach.space_id,
            reach.agent,
            COUNTED
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        Ok(counted)
    }

    /// The caller's runs of the last day, without replays and imports. It reads the latest 500 sessions and the newest 50 runs
    /// and steps of each, so that it costs the same in a large installation.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn recent_runs(&self, reach: &Reach) -> Result<Day> {
        let mut tx = self.pool.planned().await?;
        let found = sqlx::query!(
            r#"
            with latest as materialized (
                select session_id from conversation_sessions
                where ($1::text is null or space_id = $1) and ($2::text is null or agent = $2)
                    and trigger_type not in ('replay', 'import')
                order by session_id desc
                limit $3
            ), runs as (
                select r.status, date_bin('1 hour', r.created_at, timestamptz 'epoch') as hour, step.cost_micros,
                    -- The steps of an open run are counted when it ends. All that are found are the session's latest, so fewer of them
                    -- than were looked for are all that it has.
                    case
                        when step.found >= r.steps and (r.status <> 'running' or step.found < $4)
                            then extract(epoch from step.first_at - r.created_at) * 1000
                    end as first_ms
                from latest
                cross join lateral (
                    select run_id, status, steps, created_at from session_runs
                    where session_id = latest.session_id and created_at > now() - interval '1 day'
                    order by created_at desc
                    limit $4
                ) r
                left join lateral (
                    select sum(s.cost_micros) as cost_micros, min(s.committed_at) as first_at, count(*) as found
                    from (
                        select run_id, cost_micros, committed_at from session_steps
                        where session_id = latest.session_id
                        order by step_number desc
                        limit $4
                    ) s
                    where s.run_id = r.run_id
                ) step on true
            )
            select hour, count(*) as "runs!",
                count(*) filter (where status = 'completed') as "completed!",
                count(*) filter (where status = 'failed') as "failed!",
                coalesce(sum(cost_micros), 0)::bigint as "cost_micros!",
                percentile_disc(0.95) within group (order by first_ms)::bigint as first_reply_p95_ms,
                (select count(*) from latest) as "sessions!"
            from runs
            group by grouping sets ((hour), ())
            order by hour
            "#,
            reach.space_id,
            reach.agent,
            SESSIONS,
            OF_EACH
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        let mut day = Day::default();
        for row in found {
            day.is_partial = row.sessions >= SESSIONS;
            let runs = Runs {
                hour: row.hour,
                runs: row.runs,
                completed: row.completed,
                failed: row.failed,
                cost_micros: row.cost_micros,
                first_reply_p95_ms: row.first_reply_p95_ms,
            };
            if runs.hour.is_some() { day.hours.push(runs) } else { day.all = runs }
        }
        Ok(day)
    }

    /// Writes how deep the queue is, once a minute whichever process comes first, and forgets what is older than two days.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn sample_queue(&self) -> Result<()> {
        sqlx::query!(
            r#"
            with forgotten as (delete from queue_samples where at < now() - interval '2 days')
            insert into queue_samples (at, ready, leased, delayed, oldest_ready_s)
            select date_trunc('minute', now()),
                count(*) filter (where run_at <= now()),
                count(*) filter (where run_at > now() and lease is not null),
                count(*) filter (where run_at > now() and lease is null),
                coalesce(extract(epoch from now() - min(run_at) filter (where run_at <= now())), 0)::float8
            from jobs
            -- Nothing is counted if another process has written this minute.
            where runner = '' and not exists (select from queue_samples where at = date_trunc('minute', now()))
            on conflict (at) do nothing
            "#
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// The queue over the last day, oldest first, at most 288 samples: of each five minutes the
    /// highest reading of each number. What came and went between two readings is not in it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn queue_history(&self) -> Result<Vec<QueueSample>> {
        Ok(sqlx::query_as!(
            QueueSample,
            r#"
            select min(at) as "at!", max(ready) as "ready!", max(leased) as "leased!", max(delayed) as "delayed!",
                max(oldest_ready_s) as "oldest_ready_s!"
            from queue_samples
            where at > now() - interval '1 day'
            group by date_bin('5 minutes', at, 'epoch'::timestamptz)
            order by 1
            "#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}
