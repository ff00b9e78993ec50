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

/// The queue at one minute.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueSample {
    pub at: DateTime<Utc>,
    pub ready: i64,
    pub leased: i64,
    pub delayed: i64,
    pub oldest_ready_s: f64,
}

impl Store {
    /// Counts the caller's sessions that are open or in trouble, without replays and imports. Each count ends at
    /// [`COUNTED`], so that a large number of failed sessions does not make the overview slow.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn count_sessions(&self, reach: &Reach) -> Result<Vec<Counted>> {
        // Each status stands in a condition of its own, because the planner uses a partial index only for a status it sees.
        Ok(sqlx::query_as!(
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
        .fetch_all(&self.pool)
        .await?)
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
            where runner = ''
            on conflict (at) do nothing
            "#
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// The queue over the last day, oldest first, at most 288 samples: of each five minutes the deepest.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn queue_history(&self) -> Result<Vec<QueueSample>> {
        Ok(sqlx::query_as!(
            QueueSample,
            r#"
            select date_bin('5 minutes', at, 'epoch'::timestamptz) as "at!", max(ready) as "ready!", max(leased) as "leased!",
                max(delayed) as "delayed!", max(oldest_ready_s) as "oldest_ready_s!"
            from queue_samples
            where at > now() - interval '1 day'
            group by 1
            order by 1
            "#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}
