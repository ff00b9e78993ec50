//! The job queue: leases over the table `jobs`.
//!
//! A claim takes a job for the length of a lease and gives the lease a token that is never used again. Every
//! write under the lease updates or locks the job's row by (job, token) in the same statement. So a holder
//! that lost its lease writes nothing, however late it resumes. A crashed holder needs no cleanup: `run_at`
//! is the lease's end, and a job whose `run_at` is past can be claimed.
//!
//! `stuck` counts claims since the last progress (a committed message, a settled call, a step), including claims that
//! `kill -9` ended. A job is a suspect if at least two claims in a row made no progress and the last holder
//! did not give it back. A process holds at most one suspect, so if it kills the process, no other
//! suspect is blamed for that death. A job that was given back after a fault, for example because a provider is down, is
//! not a suspect.
#![doc = include_str!("README.md")]

mod backend;
mod delay;
mod heartbeat;
mod notify;
mod workers;

pub use backend::Queue;
pub use delay::{delay, jittered};
pub use heartbeat::Heartbeat;
pub use notify::{News, Notifier, heard};
pub use workers::WorkerView;

use crate::{Result, Store};
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio_util::sync::CancellationToken;

/// The kind of work that a job stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The open step of a session. Its holder also performs the steps after it, while it keeps the lease.
    Step,
    /// The deliveries of one channel of one conversation.
    Deliver,
}

impl Kind {
    /// The word that the database stores and the CLI shows.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Step => "step",
            Kind::Deliver => "deliver",
        }
    }
}

/// Settings of one queue.
#[derive(Clone, Debug)]
pub struct Settings {
    pub kind: Kind,
    /// The pool whose jobs are claimed. Empty: the deployed workers' pool. A replay has a pool of its own.
    pub runner: Arc<str>,
    /// How many jobs the process works on at a time.
    pub concurrency: usize,
    pub lease: Duration,
    /// How often the queue looks for work when no notification comes.
    pub poll: Duration,
}

/// One claim of a job. Clones share it.
#[derive(Clone, Debug)]
pub struct Lease {
    pub job_id: i64,
    /// Never used twice.
    pub token: i64,
    pub worker_id: Arc<str>,
    /// W3C traceparents, separated by spaces: of the request that enqueued the job and of the previous claim.
    /// A worker may add its own. The queue writes them back with the job, and to the jobs that the worker
    /// enqueues.
    pub trace_context: Option<String>,
    hold: Arc<Hold>,
}

/// The process's own view of its claim.
#[derive(Debug)]
struct Hold {
    lost: CancellationToken,
    /// The earliest end of the lease, in milliseconds of `CLOCK_BOOTTIME`. That clock also runs while the
    /// machine is suspended.
    ends_ms: AtomicU64,
}

impl Lease {
    /// Fires when another worker has the job, or the job is gone.
    pub fn lost(&self) -> &CancellationToken {
        &self.hold.lost
    }

    /// Returns the lease's end as known now. A later heartbeat does not change the returned value.
    pub fn term(&self) -> Term {
        Term(self.hold.ends_ms.load(Ordering::Acquire))
    }

    /// Returns whether the lease certainly has not ended. An effect may start only then.
    pub fn is_live(&self) -> bool {
        !self.hold.lost.is_cancelled() && boottime_ms() < self.hold.ends_ms.load(Ordering::Acquire)
    }
}

/// The earliest moment at which a lease may end.
#[derive(Clone, Copy, Debug)]
pub struct Term(u64);

impl Term {
    /// Returns whether that moment is still in the future.
    pub fn is_ahead(self) -> bool {
        boottime_ms() < self.0
    }
}

/// A claimed job. Its slot becomes free when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Job {
    pub lease: Lease,
    pub kind: Kind,
    /// [`Settings::runner`] of the claim.
    pub runner: Arc<str>,
    pub conversation_id: String,
    /// Set on a step job.
    pub session_id: Option<String>,
    /// Set on a step job, as a hint. The session's row has the right number.
    pub step_number: i64,
    /// Set on a deliver job.
    pub channel: Option<String>,
    /// Number of claims of this step, this one included.
    pub attempt: i32,
    /// Number of claims since the last progress, this one included.
    pub stuck: i32,
    /// How many earlier claims were never given back, because their process died or its heartbeat stopped.
    pub died: i32,
    pub last_error: Option<String>,
    _slot: Arc<Slot>,
}

#[derive(Debug)]
struct Slot {
    job_id: i64,
    token: i64,
    suspect: bool,
    held: Arc<Holdings>,
    freed: Arc<Notify>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.held.remove(self.job_id, self.token);
        if self.suspect {
            self.held.suspect.store(false, Ordering::Release);
        }
        // Free the slot before the claimer is notified. Otherwise it finds no free slot and waits for its
        // next poll.
        drop(self.permit.take());
        self.freed.notify_one();
    }
}

/// Every lease that this process holds. The heartbeat renews these.
#[derive(Debug, Default)]
pub struct Holdings {
    leases: Mutex<HashMap<(i64, i64), Arc<Hold>>>,
    suspect: AtomicBool,
}

impl Holdings {
    fn insert(&self, job_id: i64, token: i64, hold: Arc<Hold>) {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).insert((job_id, token), hold);
    }

    fn remove(&self, job_id: i64, token: i64) {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).remove(&(job_id, token));
    }

    fn all(&self) -> Vec<((i64, i64), Arc<Hold>)> {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.iter().map(|(key, hold)| (*key, Arc::clone(hold))).collect()
    }

    /// How many leases are held.
    pub fn len(&self) -> usize {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns whether the process holds no lease.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

pub(crate) fn boottime_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// A row that a claim took.
struct ClaimedRow {
    job_id: i64,
    token: i64,
    suspect: bool,
    conversation_id: String,
    session_id: Option<String>,
    channel: Option<String>,
    step_number: Option<i64>,
    attempt: i32,
    stuck: i32,
    died: i32,
    last_error: Option<String>,
    trace_context: Option<String>,
}

impl Store {
    /// Claims up to `limit` ready jobs, and one suspect in addition if `take_suspect`. Concurrent claims
    /// never wait for each other.
    async fn claim(
        &self,
        settings: &Settings,
        worker_id: &str,
        limit: usize,
        take_suspect: bool,
    ) -> Result<Vec<ClaimedRow>> {
        // The time is a subquery so that Postgres can use it as a bound of the index scan. `clock_timestamp()` itself
        // is volatile: Postgres would call it for every row, including leased and delayed ones.
        Ok(sqlx::query_as!(
            ClaimedRow,
            r#"
            with ready as materialized (
                select job_id from jobs
                where kind = $1
                    and runner = $6
                    and run_at <= (select clock_timestamp())
                    and (stuck < 2 or lease is null)
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
            ), taken as (
                select job_id, false as suspect from ready
                union all
                select job_id, true from suspect
            )
            update jobs
            set lease = nextval('leases'),
                worker_id = $4,
                run_at = clock_timestamp() + make_interval(secs => $5),
                stuck = stuck + 1,
                died = died + case when lease is not null and stuck > 0 then 1 else 0 end,
                attempt = attempt + 1
            from taken
            where jobs.job_id = taken.job_id
            returning jobs.job_id, jobs.lease as "token!", taken.suspect as "suspect!", jobs.conversation_id,
                jobs.session_id, jobs.channel, jobs.step_number, jobs.attempt, jobs.stuck, jobs.died,
                jobs.last_error, jobs.trace_context
            "#,
            settings.kind.as_str(),
            limit as i64,
            i64::from(take_suspect),
            worker_id,
            settings.lease.as_secs_f64(),
            &*settings.runner
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Gives a job back after a fault. Workers can claim it again after `delay`. The claim counts as one
    /// without progress, even if it made progress before the fault.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn retry_later(&self, lease: &Lease, delay: Duration, error: &str) -> Result<()> {
        sqlx::query!(
            "update jobs
            set lease = null, worker_id = null, last_error = $3, stuck = greatest(stuck, 1),
                -- A delivery whose worker lived to give it back has killed none of those in a row.
                died = case when kind = 'deliver' then 0 else died end,
                run_at = clock_timestamp() + make_interval(secs => $4),
                trace_context = $5
            where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token,
            crate::error::bounded(error),
            delay.as_secs_f64(),
            lease.trace_context.as_deref()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives a job back because it has to wait. Workers can claim it again after `delay`. Nothing went wrong,
    /// so the claim does not count.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn postpone(&self, lease: &Lease, delay: Duration, reason: &str) -> Result<()> {
        sqlx::query!(
            "update jobs
            set lease = null, worker_id = null, last_error = $3,
                stuck = greatest(stuck - 1, 0), attempt = greatest(attempt - 1, 0),
                died = case when kind = 'deliver' then 0 else died end,
                run_at = clock_timestamp() + make_interval(secs => $4),
                trace_context = $5
            where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token,
            crate::error::bounded(reason),
            delay.as_secs_f64(),
            lease.trace_context.as_deref()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives a job back at once: on shutdown, or because other jobs wait. The claim does not count.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn release(&self, lease: &Lease) -> Result<()> {
        sqlx::query!(
            "update jobs
            set lease = null, worker_id = null, run_at = clock_timestamp(),
                stuck = greatest(stuck - 1, 0), attempt = greatest(attempt - 1, 0),
                trace_context = $3
            where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token,
            lease.trace_context.as_deref()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Deletes a job that has nothing left to do.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn end_job(&self, lease: &Lease) -> Result<()> {
        sqlx::query!("delete from jobs where job_id = $1 and lease = $2", lease.job_id, lease.token)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// Returns whether a job of this kind and runner is ready to be claimed.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn others_wait(&self, kind: Kind, runner: &str) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (
                select from jobs where kind = $1 and runner = $2 and run_at <= (select clock_timestamp())
            ) as "waiting!""#,
            kind.as_str(),
            runner
        )
        .fetch_one(&self.pool)
        .await?)
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
