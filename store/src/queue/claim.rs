//! The statement of a claim, and what becomes of one whose answer was lost.
//!
//! The process gives the claim its token before the statement runs. So if the answer is lost, the process gives back by the token
//! what the statement took. Otherwise those jobs would wait for the end of a lease that no process renews, and each would count one
//! death.

use super::turns::Turn;
use super::{Settings, boottime_ms, delay};
use crate::pool::{Lent, in_time};
use crate::{Error, Result};
use futures::future::BoxFuture;
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use sqlx::types::Json;
use std::time::Duration;
use tracing::debug;

/// A row that a claim took.
pub(super) struct ClaimedRow {
    pub job_id: i64,
    pub token: i64,
    pub suspect: bool,
    pub conversation_id: String,
    pub session_id: Option<String>,
    pub channel: Option<String>,
    pub step_number: Option<i64>,
    pub attempt: i32,
    pub stuck: i32,
    pub died: i32,
    pub last_error: Option<String>,
    pub outage_faults: i32,
    pub outage_s: Option<f64>,
    pub gate_pass: Option<i64>,
    pub pause_passes: Option<Vec<i64>>,
    pub trace_context: Option<String>,
    /// For how long the latest of the claimed jobs was ready.
    pub age_s: Option<f64>,
    /// Of a claim in turn: whose turn it was.
    pub turn: Option<Json<Turn>>,
}

/// What a claim asks for.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub settings: &'a Settings,
    pub worker_id: &'a str,
    /// The most jobs.
    pub limit: usize,
    /// The token of all leases of this claim: see [`new_token`].
    pub token: i64,
    pub liveness_lock: Option<i32>,
}

/// Returns whether a claim that ended so may have taken jobs. If the server refused the statement, it has taken none.
pub(super) fn may_have_claimed(error: &Error) -> bool {
    match error {
        Error::Database(sqlx::Error::Database(error)) => {
            matches!(
                error.downcast_ref::<PgDatabaseError>().severity(),
                PgSeverity::Fatal | PgSeverity::Panic
            )
        }
        _ => true,
    }
}

/// A token that no claim has used.
pub(super) fn new_token() -> i64 {
    // 62 of these bits are random. The tokens that the database makes are positive.
    let (_, random) = uuid::Uuid::now_v7().as_u64_pair();
    -1 - (random & (u64::MAX >> 2)) as i64
}

/// Claims ready jobs that are not suspects and that became ready within the last `reach`, and a suspect in addition if
/// `take_suspect`. Takes jobs whose lease has ended, suspects among them, only if `take_expired`. Concurrent claims never wait for
/// each other.
pub(super) async fn claim(
    lent: &mut Lent,
    wanted: &Wanted<'_>,
    take_suspect: bool,
    take_expired: bool,
    reach: Duration,
) -> Result<Vec<ClaimedRow>> {
    let Wanted { settings, worker_id, limit, token, liveness_lock } = *wanted;
    // The time is a subquery so that Postgres can use it as a bound of the index scan. `clock_timestamp()` itself
    // is volatile: Postgres would call it for every row, including leased and delayed ones.
    let claimed = sqlx::query_as!(
        ClaimedRow,
        r#"
        with ready as materialized (
            select job_id, run_at from jobs
            where kind = $1
                and runner = $6
                and run_at <= (select clock_timestamp())
                and run_at >= (select clock_timestamp() - make_interval(secs => $8))
                and (lease is null or (stuck < 2 and $10))
            order by run_at
            limit $2
            for update skip locked
        ), suspect as materialized (
            select job_id from jobs
            where kind = $1
                and runner = $6
                and run_at <= (select clock_timestamp())
                and stuck >= 2
                and lease is not null
            order by run_at
            limit $3
            for update skip locked
        )
        update jobs
        set lease = $9,
            worker_id = $4,
            liveness_lock = $7,
            run_at = clock_timestamp() + make_interval(secs => $5),
            stuck = stuck + 1,
            died = died + case when lease is not null and stuck > 0 then 1 else 0 end,
            attempt = attempt + 1,
            waits_for = null,
            held_by = null,
            -- While no worker looked, nobody knew how the provider did: that time is not a part of its outage.
            outage_since = case
                when run_at < clock_timestamp() - interval '1 minute' then outage_since + (clock_timestamp() - run_at)
                else outage_since
            end
        -- An array, not a join: Postgres may plan a join for an empty table and keep it when the table is full.
        where job_id = any (array(select job_id from ready union all select job_id from suspect))
        returning job_id, lease as "token!", job_id = any (array(select job_id from suspect)) as "suspect!",
            conversation_id, session_id, channel, step_number, attempt, stuck, died, last_error, trace_context,
            outage_faults, extract(epoch from clock_timestamp() - outage_since)::float8 as outage_s, gate_pass, pause_passes,
            extract(epoch from clock_timestamp() - (select max(run_at) from ready))::float8 as age_s,
            null::jsonb as "turn: _"
        "#,
        settings.kind.as_str(),
        limit as i64,
        i64::from(take_suspect && take_expired),
        worker_id,
        settings.lease.as_secs_f64(),
        &*settings.runner,
        liveness_lock,
        reach.as_secs_f64(),
        token,
        take_expired
    )
    .fetch_all(lent.sends());
    let rows = in_time(claimed).await;
    lent.answered(&rows);
    Ok(rows?)
}

/// Claims the oldest ready jobs of each space, up to `share` of each, for the spaces after `after` in the order of their names. Takes only
/// jobs without a lease that no pause or missing agent holds (`held_by`). So it takes no suspects and no jobs of dead workers. Fewer jobs than asked for: the last space has had its turn.
pub(super) async fn claim_in_turn(
    lent: &mut Lent,
    wanted: &Wanted<'_>,
    after: &str,
    share: usize,
    reach: Duration,
) -> Result<Vec<ClaimedRow>> {
    let Wanted { settings, worker_id, limit, token, liveness_lock } = *wanted;
    // Postgres evaluates a recursion as far as it is read, so the scan ends at the last job that is wanted.
    let claimed = sqlx::query_as!(
        ClaimedRow,
        r#"
        with recursive spaces as (
            (
                select space_id from jobs
                where kind = $1 and runner = $2 and lease is null and held_by is null
                    and space_id > $3
                    and run_at <= (select clock_timestamp())
                    and run_at >= (select clock_timestamp() - make_interval(secs => $4))
                order by space_id
                limit 1
            )
            union all
            select (
                select following.space_id from jobs following
                where following.kind = $1 and following.runner = $2
                    and following.lease is null and following.held_by is null
                    and following.space_id > spaces.space_id
                    -- The index has this column too, so entries of jobs that are over or delayed are passed without a look at their rows.
                    and following.run_at <= (select clock_timestamp())
                    and following.run_at >= (select clock_timestamp() - make_interval(secs => $4))
                order by following.space_id
                limit 1
            )
            from spaces
            where spaces.space_id is not null
        ), ready as materialized (
            select oldest.job_id, oldest.run_at, spaces.space_id
            from spaces
            cross join lateral (
                select jobs.job_id, jobs.run_at from jobs
                where jobs.kind = $1 and jobs.runner = $2
                    and jobs.lease is null and jobs.held_by is null
                    and jobs.space_id = spaces.space_id
                    and jobs.run_at <= (select clock_timestamp())
                    and jobs.run_at >= (select clock_timestamp() - make_interval(secs => $4))
                order by jobs.run_at
                limit $10
                for update skip locked
            ) oldest
            limit $5
        )
        update jobs
        set lease = $6,
            worker_id = $7,
            liveness_lock = $8,
            run_at = clock_timestamp() + make_interval(secs => $9),
            stuck = stuck + 1,
            attempt = attempt + 1,
            waits_for = null,
            -- As in a claim by age: the time in which no worker looked is not a part of the outage.
            outage_since = case
                when run_at < clock_timestamp() - interval '1 minute' then outage_since + (clock_timestamp() - run_at)
                else outage_since
            end
        where job_id = any (array(select job_id from ready))
        returning job_id, lease as "token!", false as "suspect!",
            conversation_id, session_id, channel, step_number, attempt, stuck, died, last_error, trace_context,
            outage_faults, extract(epoch from clock_timestamp() - outage_since)::float8 as outage_s, gate_pass, pause_passes,
            extract(epoch from clock_timestamp() - (select max(run_at) from ready))::float8 as age_s,
            (select jsonb_build_object('last_space', max(space_id), 'spaces', count(distinct space_id)) from ready) as "turn: _"
        "#,
        settings.kind.as_str(),
        &*settings.runner,
        after,
        reach.as_secs_f64(),
        limit as i64,
        token,
        worker_id,
        liveness_lock,
        settings.lease.as_secs_f64(),
        share as i64
    )
    .fetch_all(lent.sends());
    let rows = in_time(claimed).await;
    lent.answered(&rows);
    Ok(rows?)
}

/// Calls `release` until it returns true, which means that it found a lease to release, or until the lease ends at `ends_ms`.
pub(super) async fn until_released<'r>(ends_ms: u64, release: impl Fn() -> BoxFuture<'r, Result<bool>>) {
    for tries in 1..i32::MAX {
        match release().await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => debug!(%error, "A job was not given back; trying again"),
        }
        if boottime_ms() >= ends_ms {
            return;
        }
        tokio::time::sleep(delay(tries, None).min(Duration::from_secs(2))).await;
    }
}
