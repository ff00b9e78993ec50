//! How a claimed job reaches apalis, and the offer: a free slot of this process that an incoming message fills.
//!
//! A message that opens a run inserts a job. If a queue of the same process has a free slot and no job waits for it, the
//! process would claim the new job a millisecond later, with a statement and a commit of its own. Instead the message's
//! statement claims it: the process offers the slot, and the job is inserted with the lease of that offer ([`Offer`]).
//!
//! The lease's token is known before the statement runs. If the statement's answer is lost, or its caller goes away, the
//! process gives back by that token what the statement may have inserted.

use super::claim::{new_token, until_released};
use super::notify::{JOBS, payload};
use super::{
    ClaimedRow, Hold, Holdings, Job, Kind, Lease, Place, ProviderOutage, Room, Settings, Slot, boottime_ms,
};
use crate::{Result, Store};
use futures::FutureExt as _;
use futures::future::join_all;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;
use wakeful_workflow::session::Session;

/// What the jobs of one queue need on their way.
#[derive(Debug)]
pub(super) struct Feed {
    pub store: Store,
    pub settings: Settings,
    pub worker_id: Arc<str>,
    pub holdings: Arc<Holdings>,
    pub room: Arc<Room>,
    /// Fires when a slot became free.
    pub freed: Arc<Notify>,
    pub jobs: mpsc::Sender<Job>,
}

impl Feed {
    /// Hands the jobs that a claim took to apalis. The claim wrote the liveness lock `lock` into them. The heartbeat knows all their
    /// leases before the first data key is asked for, so a slow key store ends no lease. A suspect has a place of its own, so it takes
    /// no slot from other jobs.
    pub async fn send_claimed(&self, rows: Vec<ClaimedRow>, ends_ms: u64, lock: Option<i32>) {
        if !rows.is_empty() {
            let age_s = rows.iter().find_map(|row| row.age_s);
            self.store.metrics.claimed(self.settings.kind, rows.len(), age_s);
        }
        let jobs: Vec<Job> = rows
            .into_iter()
            .map(|row| {
                let place = if row.suspect {
                    Place::Suspect
                } else {
                    Place::Slot(Arc::clone(&self.room.slots).try_acquire_owned().ok())
                };
                self.job(row, place, ends_ms, None)
            })
            .collect();
        self.holdings.written(&self.store, lock);
        join_all(jobs.into_iter().map(|job| self.send_to_apalis(job))).await;
    }

    async fn send_to_apalis(&self, mut job: Job) {
        job.last_error = self.store.reveal_some(job.session_id.as_deref(), job.last_error.take()).await;
        // If sending fails, the drain began during the claim, and the queue has closed the channel. Give the job back.
        if let Err(mpsc::error::SendError(job)) = self.jobs.send(job).await {
            hand_over(&self.store, &job.lease).await;
        }
    }

    fn job(&self, row: ClaimedRow, place: Place, ends_ms: u64, session: Option<Box<Session>>) -> Job {
        let hold = Arc::new(Hold {
            lost: CancellationToken::new(),
            commits: watch::Sender::new(0),
            ends_ms: AtomicU64::new(ends_ms),
            place: Mutex::new(place),
            freed: Arc::clone(&self.freed),
        });
        self.holdings.insert(row.job_id, row.token, Arc::clone(&hold));
        let slot = Slot {
            job_id: row.job_id,
            token: row.token,
            held: Arc::clone(&self.holdings),
            room: Arc::clone(&self.room),
            hold: Arc::clone(&hold),
        };
        Job {
            lease: Lease {
                job_id: row.job_id,
                token: row.token,
                worker_id: Arc::clone(&self.worker_id),
                trace_context: row.trace_context,
                hold,
            },
            kind: self.settings.kind,
            runner: Arc::clone(&self.settings.runner),
            conversation_id: row.conversation_id,
            session_id: row.session_id,
            step_number: row.step_number.unwrap_or(0),
            channel: row.channel,
            attempt: row.attempt,
            stuck: row.stuck,
            died: row.died,
            last_error: row.last_error,
            outage: ProviderOutage {
                faults: row.outage_faults.into(),
                lasted: row.outage_s.map(|s| Duration::from_secs_f64(s.max(0.0))),
            },
            gate_pass: row.gate_pass,
            pause_passes: row.pause_passes.unwrap_or_default(),
            session: Arc::new(Mutex::new(session)),
            slot: Arc::new(slot),
        }
    }

    /// Gives back the jobs of a claim whose answer was lost. Its statement may still be under way, so this tries until its leases
    /// end.
    pub async fn give_back(&self, token: i64, ends_ms: u64) {
        until_released(ends_ms, || self.store.release_claim(&self.settings, token).boxed()).await;
    }

    /// Offers a free slot. The caller has seen that no other job waits for it.
    pub fn offer(self: &Arc<Feed>) -> Option<Offer> {
        if self.room.free() == 0 || self.jobs.is_closed() {
            return None;
        }
        let permit = Arc::clone(&self.room.slots).try_acquire_owned().ok()?;
        // The clock is read before the statement, so this value is never later than the lease's end in the database.
        let ends_ms = boottime_ms() + self.settings.lease.as_millis() as u64;
        let claim = Claim {
            token: new_token(),
            worker_id: Arc::clone(&self.worker_id),
            liveness_lock: self.holdings.lock(),
            lease: self.settings.lease,
        };
        Some(Offer { feed: Arc::clone(self), permit: Some(permit), ends_ms, claim, state: State::Unused })
    }
}

/// What the statement writes into the job's row.
#[derive(Debug)]
pub(crate) struct Claim {
    pub token: i64,
    pub worker_id: Arc<str>,
    pub liveness_lock: Option<i32>,
    pub lease: Duration,
}

/// A slot of this process for the job of a message. Dropping it frees the slot, and gives back a job that was not handed
/// over.
#[derive(Debug)]
pub struct Offer {
    feed: Arc<Feed>,
    permit: Option<OwnedSemaphorePermit>,
    ends_ms: u64,
    claim: Claim,
    state: State,
}

#[derive(Debug)]
enum State {
    /// No statement has used it.
    Unused,
    /// A statement for this session is under way, or nobody knows what became of it.
    Asked { session_id: String },
    /// The job is in the database, under this lease.
    Taken(Box<Taken>),
    /// The job is on its way.
    Over,
}

/// A job that a message inserted under the lease of an offer.
#[derive(Debug)]
pub(crate) struct Taken {
    pub job_id: i64,
    pub conversation_id: String,
    pub session_id: String,
    pub step_number: i64,
    pub trace_context: Option<String>,
    /// The session, if the statement made it.
    pub session: Option<Box<Session>>,
}

impl Offer {
    /// Returns what a statement for this session is to write into its job's row. Call this right before the statement runs, and
    /// [`Offer::taken`] or [`Offer::declined`] when its answer is known.
    pub(crate) fn ask(&mut self, session_id: &str) -> &Claim {
        self.state = State::Asked { session_id: session_id.to_owned() };
        &self.claim
    }

    /// The statement is committed.
    pub(crate) fn taken(&mut self, taken: Taken) {
        self.state = State::Taken(Box::new(taken));
    }

    /// The statement wrote nothing.
    pub(crate) fn declined(&mut self) {
        self.state = State::Unused;
    }

    /// Begins the job that a message inserted under this offer's lease. `false`: the message inserted none under it, so the caller
    /// announces the message's job, if it has one.
    pub fn begin(mut self) -> bool {
        let taken = match std::mem::replace(&mut self.state, State::Over) {
            State::Taken(taken) => taken,
            other => {
                self.state = other;
                return false;
            }
        };
        let row = ClaimedRow {
            job_id: taken.job_id,
            token: self.claim.token,
            suspect: false,
            conversation_id: taken.conversation_id,
            session_id: Some(taken.session_id),
            channel: None,
            step_number: Some(taken.step_number),
            attempt: 1,
            stuck: 1,
            died: 0,
            last_error: None,
            outage_faults: 0,
            outage_s: None,
            gate_pass: None,
            pause_passes: None,
            trace_context: taken.trace_context,
            age_s: None,
            turn: None,
        };
        self.feed.store.metrics.claimed(self.feed.settings.kind, 1, Some(0.0));
        let job = self.feed.job(row, Place::Slot(self.permit.take()), self.ends_ms, taken.session);
        self.feed.holdings.written(&self.feed.store, self.claim.liveness_lock);
        // There is a place for the job of each slot, so this fails when the process drains. Then others take the job.
        if let Err(refused) = self.feed.jobs.try_send(job) {
            let (job, store) = (refused.into_inner(), self.feed.store.clone());
            tokio::spawn(async move { hand_over(&store, &job.lease).await });
        }
        true
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            drop(permit);
            self.feed.freed.notify_one();
        }
        let session_id = match std::mem::replace(&mut self.state, State::Over) {
            State::Unused | State::Over => return,
            State::Asked { session_id } => session_id,
            State::Taken(taken) => taken.session_id,
        };
        // Without a runtime the process ends, and its liveness lock is free.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (store, token, ends_ms) = (self.feed.store.clone(), self.claim.token, self.ends_ms);
            runtime.spawn(async move { give_back(&store, &session_id, token, ends_ms).await });
        }
    }
}

/// Gives a job that was not begun back to the other processes.
pub(super) async fn hand_over(store: &Store, lease: &Lease) {
    if let Err(error) = store.hand_over(lease).await {
        warn!(%error, "A job was not released; it is free when its lease ends");
    }
}

/// Gives a job back by its token. The statement that inserts it may still be under way, so this tries until the lease ends.
async fn give_back(store: &Store, session_id: &str, token: i64, ends_ms: u64) {
    until_released(ends_ms, || store.release_offered(session_id, token).boxed()).await;
}

impl Store {
    /// Gives back the jobs that this token holds, and tells all workers of them. `false`: it holds none.
    async fn release_claim(&self, settings: &Settings, token: i64) -> Result<bool> {
        let mut tx = self.pool.begin().await?;
        let released = sqlx::query!(
            "update jobs
            -- A suspect is one by its lease, and the next claim counts its last holder's death again.
            set lease = case when stuck > 2 then new_lease() end,
                died = case when stuck > 2 then greatest(died - 1, 0) else died end,
                worker_id = null, liveness_lock = null, run_at = clock_timestamp(),
                stuck = greatest(stuck - 1, 0), attempt = greatest(attempt - 1, 0)
            where kind = $1 and runner = $2 and lease = $3
                -- Claimed jobs are those whose time is within a lease from now.
                and run_at between (select clock_timestamp())
                    and (select clock_timestamp() + make_interval(secs => $4))",
            settings.kind.as_str(),
            &*settings.runner,
            token,
            settings.lease.as_secs_f64()
        )
        .execute(&mut *tx)
        .await?;
        let are_back = released.rows_affected() > 0;
        if are_back {
            let said = payload(settings.kind.as_str(), &settings.runner);
            sqlx::query!("select pg_notify($1, $2)", JOBS, said).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok(are_back)
    }

    /// Gives back the job that this token holds, and tells all workers of it: its message has not announced it, and no claim
    /// has seen it. `false`: the token holds none.
    async fn release_offered(&self, session_id: &str, token: i64) -> Result<bool> {
        let mut tx = self.pool.begin().await?;
        let released = sqlx::query!(
            "update jobs
            set lease = null, worker_id = null, run_at = clock_timestamp(),
                stuck = greatest(stuck - 1, 0), attempt = greatest(attempt - 1, 0)
            where session_id = $1 and kind = 'step' and lease = $2",
            session_id,
            token
        )
        .execute(&mut *tx)
        .await?;
        let is_back = released.rows_affected() == 1;
        if is_back {
            let said = payload(Kind::Step.as_str(), "");
            sqlx::query!("select pg_notify($1, $2)", JOBS, said).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok(is_back)
    }
}
