//! The job queue: leases over the table `jobs`.
//!
//! A claim takes jobs for the length of a lease and gives their leases a token that no other claim has. Every
//! write under the lease updates or locks the job's row by (job, token) in the same statement. So a holder
//! that lost its lease writes nothing, however late it resumes. A crashed holder needs no cleanup: `run_at`
//! is the lease's end, and a job whose `run_at` is past can be claimed.
//!
//! `stuck` counts the claims of a job since its last progress (a committed message, a settled call, a step).
//! Each claim adds 1 when it begins, so a claim that `kill -9` ended counts too. A job that is ready with
//! `stuck >= 2` and a lease in its row is a suspect: its last holder never gave it back, so the job may have
//! killed that process. A job that was given back after a fault (a provider is down) has no lease in its row and
//! is not a suspect. A process holds at most one suspect. If it dies, no second suspect is blamed for that.
#![doc = include_str!("README.md")]

mod announce;
mod backend;
mod claim;
mod contact;
mod delay;
mod depth;
mod feed;
mod heartbeat;
mod holdings;
mod horizon;
mod left;
mod liveness;
mod notify;
mod proven;
mod readers;
mod room;
mod suspect;
mod turns;
mod workers;

pub use backend::Queue;
pub use delay::{delay, jittered};
pub use depth::{DeadlyStep, Depth, Faults, FaultyStep, WaitingSpace};
pub use feed::Offer;
pub(crate) use feed::Taken;
pub use heartbeat::Heartbeat;
pub use holdings::Holdings;
pub use left::{LACKS, LackedAgent, Served};
pub use liveness::Liveness;
pub(crate) use notify::{CANCEL, GATES, SESSIONS};
pub use notify::{EVERY_SESSION, News, Notifier, heard, heard_cancel};
pub use readers::{Audience, READS_EVERY};
pub use workers::{APPLICATION, Connections, WorkerCounts, WorkerView};

use crate::{Result, Store};
use claim::ClaimedRow;
use notify::JOBS;
use room::{Place, Room, Slot};
use rustix::time::{ClockId, clock_gettime};
use sqlx::PgExecutor;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use wakeful_workflow::session::Session;

/// How long a cancel waits for the next attempt of a step that failed meanwhile.
const CANCEL_WAITS: Duration = Duration::from_secs(1);

/// How long a claim that seems lost waits for the answer to its own commit.
const COMMIT_ANSWER: Duration = Duration::from_secs(5);

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
    /// The agents that this process has: it takes jobs that others left to those that have them.
    pub agents: Arc<[Served]>,
}

/// One claim of a job. Clones share it.
#[derive(Clone, Debug)]
pub struct Lease {
    pub job_id: i64,
    /// That of the claim. No other claim has it.
    pub token: i64,
    pub worker_id: Arc<str>,
    /// W3C traceparents, separated by spaces: of the request that enqueued the job and of the previous claim.
    /// A worker may add its own. The queue writes them back with the job, and to the jobs that the worker
    /// enqueues.
    pub trace_context: Option<String>,
    hold: Arc<Hold>,
}

/// A commit of a claim is under way.
#[derive(Debug)]
pub struct Committing(Arc<Hold>);

impl Drop for Committing {
    fn drop(&mut self) {
        self.0.commits.send_modify(|commits| *commits -= 1);
    }
}

/// The process's own view of its claim.
#[derive(Debug)]
struct Hold {
    lost: CancellationToken,
    /// How many commits of the claim wait for their answer.
    commits: watch::Sender<u32>,
    /// The earliest end of the lease, in milliseconds of `CLOCK_BOOTTIME`. That clock also runs while the
    /// machine is suspended.
    ends_ms: AtomicU64,
    place: Mutex<Place>,
    /// Fires when a slot of the queue became free.
    freed: Arc<Notify>,
}

impl Hold {
    fn has_left(&self) -> bool {
        matches!(*self.place.lock().unwrap_or_else(PoisonError::into_inner), Place::Left)
    }
}

impl Lease {
    /// Fires when another worker has the job, or the job is gone.
    pub fn lost(&self) -> &CancellationToken {
        &self.hold.lost
    }

    /// Leaves the job's slot to another job, and goes on without one: it waits for something that may never come. With its next
    /// progress it takes a slot again, if one is free. A suspect has no slot.
    pub fn leave_slot(&self) {
        let mut place = self.hold.place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Place::Slot(Some(_)) = *place {
            *place = Place::Left;
            self.hold.freed.notify_one();
        }
    }

    /// Call this before a commit that may end the job. Drop the guard when its answer is here.
    pub fn begin_commit(&self) -> Committing {
        self.hold.commits.send_modify(|commits| *commits += 1);
        Committing(Arc::clone(&self.hold))
    }

    /// Waits until the lease is lost and no commit of this claim waits for its answer. The heartbeat also
    /// finds the job gone when the claim's own commit has ended it. Waits for the answer for a few seconds only,
    /// because the connection may be dead.
    pub async fn lost_to_others(&self) {
        self.hold.lost.cancelled().await;
        let mut commits = self.hold.commits.subscribe();
        // An error is the time limit. The sender lives in `hold`.
        let _ = tokio::time::timeout(COMMIT_ANSWER, commits.wait_for(|commits| *commits == 0)).await;
    }

    /// Returns the lease's end as it is now. A later heartbeat does not change the returned value.
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
    /// Set on a step job, for logs and spans. A commit compares the row's column, not this copy.
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
    pub outage: ProviderOutage,
    /// The opening at which a provider's gate let this job through.
    pub gate_pass: Option<i64>,
    /// The pauses that let it go, by their numbers.
    pub pause_passes: Vec<i64>,
    /// The session as the message that began it wrote it, until it is taken.
    session: Arc<Mutex<Option<Box<Session>>>>,
    slot: Arc<Slot>,
}

impl Job {
    /// Takes the session, if the statement that claimed this job has made it. Then nothing has to be read: whatever changes
    /// the session later is noticed at the next commit.
    pub fn take_session(&self) -> Option<Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner).take().map(|session| *session)
    }

    /// Call this when a commit was progress. A suspect is a job like others from now on: it takes a slot, and its process may
    /// have another suspect. While no slot is free it keeps the place.
    pub fn made_progress(&self) {
        self.slot.clear();
    }

    /// Returns whether the process has no other job now, of any queue.
    pub fn is_alone(&self) -> bool {
        self.slot.held.len() <= 1
    }

    /// Returns whether the queue that claimed this job takes more jobs now. Then it claims every job that waits, so none
    /// has to wait for this one.
    pub fn has_room_beside(&self) -> bool {
        self.slot.room.free() > 0
    }
}

/// A provider's outage that holds up a step, as the claim found it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProviderOutage {
    /// How many calls of the step failed since its last progress.
    pub faults: i64,
    /// How long the outage had lasted at the claim. `None`: there was none.
    pub lasted: Option<Duration>,
}

pub(crate) fn boottime_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

impl Store {
    /// Gives a job back after a fault. Workers can claim it again after `delay`. The claim counts as one
    /// without progress, even if it made progress before the fault.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn retry_later(&self, lease: &Lease, delay: Duration, error: &str) -> Result<()> {
        self.give_back(lease, delay, error, true).await
    }

    /// Gives a job back because it has to wait. Workers can claim it again after `delay`. Nothing went wrong,
    /// so the claim does not count.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn postpone(&self, lease: &Lease, delay: Duration, reason: &str) -> Result<()> {
        self.give_back(lease, delay, reason, false).await
    }

    async fn give_back(&self, lease: &Lease, delay: Duration, text: &str, counts: bool) -> Result<()> {
        let text = self.sealed_for_job(lease.job_id, text).await?;
        let given_back = give_back(&self.pool, lease, delay, &text, counts).await?;
        if given_back && counts && delay > CANCEL_WAITS {
            // A cancel that came during the claim found no waiting job. The statement above may have waited for it, so only a
            // later one sees it. It is not carried out at once, because carrying it out may be what failed.
            sqlx::query!(
                "update jobs set run_at = clock_timestamp() + make_interval(secs => $2)
                where job_id = $1 and lease is null and run_at > clock_timestamp()
                    and exists (select from conversation_sessions s
                        where s.session_id = jobs.session_id and s.cancel_requested)",
                lease.job_id,
                CANCEL_WAITS.as_secs_f64()
            )
            .execute(&self.pool)
            .await?;
        }
        Ok(())
    }

    /// Gives a job back at once, because other jobs wait or the process drains. The claim does not count.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn release(&self, lease: &Lease) -> Result<()> {
        free(&self.pool, lease).await?;
        Ok(())
    }

    /// Gives a job back that this process will not begin or end, and tells the others in the same transaction: this process
    /// may be gone before its [`Notifier`] sends.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn hand_over(&self, lease: &Lease) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        if let Some(said) = free(&mut *tx, lease).await? {
            sqlx::query!("select pg_notify($1, $2)", JOBS, said).execute(&mut *tx).await?;
        }
        Ok(tx.commit().await?)
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

    /// How many jobs this process's connections can commit in time, if the server gives it fewer than it wants. The queues take no
    /// more.
    pub fn most_jobs(&self) -> Option<usize> {
        room::most_jobs(&self.pool)
    }

    /// Returns whether a job waits for a slot of the queue that claimed this one. Looks as far back as a claim of that queue. Leaves
    /// out what such a claim puts into no slot: suspects and, after an outage, claimed jobs.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn others_wait(&self, job: &Job) -> Result<bool> {
        let now = boottime_ms();
        Ok(sqlx::query_scalar!(
            r#"select exists (
                select from jobs where kind = $1 and runner = $2 and run_at <= (select clock_timestamp())
                    and run_at >= (select clock_timestamp() - make_interval(secs => $3))
                    and (lease is null or (stuck < 2 and $4))
            ) as "waiting!""#,
            job.kind.as_str(),
            &*job.runner,
            job.slot.room.reach(now).as_secs_f64(),
            job.slot.held.may_take_expired(now)
        )
        .fetch_one(&self.pool)
        .await?)
    }
}

/// Gives a job back; others can claim it after `delay`. `text` is already sealed. Returns whether the lease was held. See
/// [`Store::retry_later`] and [`Store::postpone`].
pub(crate) async fn give_back(
    executor: impl PgExecutor<'_>,
    lease: &Lease,
    delay: Duration,
    text: &str,
    counts: bool,
) -> sqlx::Result<bool> {
    let given_back = sqlx::query!(
        "update jobs
            set lease = null, worker_id = null, last_error = $3,
                stuck = case when $6 then greatest(stuck, 1) else greatest(stuck - 1, 0) end,
                attempt = case when $6 then attempt else greatest(attempt - 1, 0) end,
                -- A delivery whose worker lived to give it back has killed none of those in a row.
                died = case when kind = 'deliver' then 0 else died end,
                run_at = clock_timestamp() + make_interval(secs => $4),
                trace_context = $5
            where job_id = $1 and lease = $2",
        lease.job_id,
        lease.token,
        text,
        delay.as_secs_f64(),
        lease.trace_context.as_deref(),
        counts
    )
    .execute(executor)
    .await?;
    Ok(given_back.rows_affected() == 1)
}

/// Gives a job back, and returns what a notification says of it. `None`: the lease is lost, and nothing changed.
async fn free(executor: impl PgExecutor<'_>, lease: &Lease) -> sqlx::Result<Option<String>> {
    let freed = sqlx::query!(
        "update jobs
        set lease = null, worker_id = null, run_at = clock_timestamp(),
            stuck = greatest(stuck - 1, 0), attempt = greatest(attempt - 1, 0),
            trace_context = $3
        where job_id = $1 and lease = $2
        returning kind, runner",
        lease.job_id,
        lease.token,
        lease.trace_context.as_deref()
    )
    .fetch_optional(executor)
    .await?;
    Ok(freed.map(|job| notify::payload(&job.kind, &job.runner)))
}
