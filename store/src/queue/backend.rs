//! The queue as a backend of apalis: a stream of claimed jobs.
//!
//! A separate task claims jobs. It waits for free slots and notifications and feeds a channel, so a slow
//! statement never blocks apalis' dispatch loop. While the database is unreachable the stream yields no jobs,
//! but it does not end.

use super::claim::{ClaimedRow, Wanted, claim, claim_in_turn, may_have_claimed, new_token};
use super::feed::Feed;
use super::horizon::{self, Horizon};
use super::left::claim_left;
use super::notify::Claimant;
use super::turns::Turns;
use super::{Holdings, Job, News, Room, Settings, boottime_ms};
use crate::{Error, Store};
use apalis_core::backend::{Backend, BackendConfig, finalize::Ephemeral};
use apalis_core::task::{Task, builder::TaskBuilder};
use apalis_core::worker::context::WorkerContext;
use futures::FutureExt;
use futures::future::BoxFuture;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// While jobs wait, a claim waits until one in [`ENOUGH`] slots is free, but for [`GATHER`] at most: a claim of one job costs as
/// much as a claim of several. The other slots work meanwhile, and the jobs have already waited longer than that for a slot.
const ENOUGH: usize = 4;
const GATHER: Duration = Duration::from_millis(30);
/// How often a worker looks for steps that others left, if it hears of none.
const LEFT_EVERY: Duration = Duration::from_secs(30);

/// The table `jobs` as a backend of apalis.
pub struct Queue {
    settings: Settings,
    store: Store,
    unbegun: Arc<Unbegun>,
    draining: CancellationToken,
    closing: Option<BoxFuture<'static, ()>>,
}

impl Queue {
    /// Starts claiming for `worker_id`, until `draining` fires.
    pub fn start(
        store: Store,
        settings: Settings,
        worker_id: Arc<str>,
        holdings: Arc<Holdings>,
        news: &News,
        draining: CancellationToken,
    ) -> Queue {
        let (sender, jobs) = mpsc::channel(settings.concurrency + 1);
        let room = Arc::new(Room {
            slots: Arc::new(Semaphore::new(settings.concurrency)),
            pool: store.pool.clone(),
            held: Arc::clone(&holdings),
            clear_before: AtomicI64::new(horizon::NEVER),
        });
        let feed = Arc::new(Feed {
            store: store.clone(),
            settings: settings.clone(),
            worker_id,
            holdings,
            room,
            freed: Arc::new(Notify::new()),
            jobs: sender,
        });
        let unbegun = Arc::new(Unbegun(Mutex::new(jobs)));
        let claimer = Claimer { news: news.register(&feed), feed, unbegun: Arc::clone(&unbegun) };
        tokio::spawn(claimer.run(draining.clone()));
        Queue { settings, store, unbegun, draining, closing: None }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // The claimer ends and gives back what is left.
        self.unbegun.receiver().close();
    }
}

/// The jobs that are claimed and not begun.
struct Unbegun(Mutex<mpsc::Receiver<Job>>);

impl Unbegun {
    fn receiver(&self) -> MutexGuard<'_, mpsc::Receiver<Job>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no more jobs, and gives back those that are left.
    async fn hand_over(&self, store: &Store) {
        let mut left = Vec::new();
        {
            let mut jobs = self.receiver();
            jobs.close();
            while let Ok(job) = jobs.try_recv() {
                left.push(job);
            }
        }
        for job in left {
            super::feed::hand_over(store, &job.lease).await;
        }
    }
}

impl Backend for Queue {
    type Task = Task<Job>;
    type Error = Error;

    fn poll_ready(&mut self, _: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        _: &WorkerContext,
    ) -> Poll<Option<Result<Task<Job>, Error>>> {
        self.unbegun.receiver().poll_recv(cx).map(|job| job.map(|job| Ok(TaskBuilder::new(job).build())))
    }

    /// Gives back the jobs that were claimed but not begun, and tells the other processes. They need not wait for the end of the
    /// leases. apalis calls it when the last job that runs has ended, so the claimer does the same as soon as the drain begins.
    fn poll_close(&mut self, cx: &mut Context<'_>, _: &WorkerContext) -> Poll<Result<(), Error>> {
        self.draining.cancel();
        let closing = self.closing.get_or_insert_with(|| {
            let (store, unbegun) = (self.store.clone(), Arc::clone(&self.unbegun));
            async move { unbegun.hand_over(&store).await }.boxed()
        });
        closing.poll_unpin(cx).map(Ok)
    }
}

impl BackendConfig for Queue {
    type Args = Job;
    type Id = i64;
    type Kind = Ephemeral;
    type Config = Settings;
    type Layer = tower_layer::Identity;

    fn config(&self) -> &Settings {
        &self.settings
    }

    fn middleware(&mut self, _: &mut WorkerContext) -> tower_layer::Identity {
        tower_layer::Identity::new()
    }
}

/// What a claim found.
struct Claimed {
    rows: Vec<ClaimedRow>,
    /// When its statement began, in milliseconds of `CLOCK_BOOTTIME`.
    began_ms: u64,
    /// How far back it looked.
    reach: Duration,
}

/// What the claimer does after a look.
enum Next {
    /// More jobs wait: it looks again.
    Look,
    /// It waits for a free slot.
    Slot,
    /// No job waits that this process could take. It waits for news.
    News,
    /// The look failed. It looks again after this time.
    Pause(Duration),
}

/// What the claimer knows from its earlier looks.
#[derive(Default)]
struct Course {
    /// How often in a row the look failed.
    faults: i32,
    horizon: Horizon,
    turns: Turns,
    /// The last claim by age found as many jobs as it asked for.
    backlog: bool,
    /// When it last looked for suspects. `None`: it is to look at once.
    looked: Option<Instant>,
    looked_for_left: Option<Instant>,
}

struct Claimer {
    feed: Arc<Feed>,
    news: Arc<Claimant>,
    unbegun: Arc<Unbegun>,
}

impl Claimer {
    async fn run(self, draining: CancellationToken) {
        let Feed { store, settings, holdings, freed, jobs, .. } = &*self.feed;
        let mut course = Course::default();
        let mut departures = holdings.suspect.departures();
        while !draining.is_cancelled() && !jobs.is_closed() {
            // Slots that the last turn left free are not kept waiting for more.
            if course.backlog && !course.turns.left_slots() {
                self.gather().await;
            }
            let only_here = self.news.begin_claim();
            if departures.has_changed().unwrap_or(false) {
                departures.mark_unchanged();
                course.looked = None;
            }
            self.take_left(&mut course.looked_for_left).await;
            let next = self.claim_for_free_slots(&mut course).await;
            if !matches!(next, Next::News) {
                only_here.tell_others();
            }
            let wait = match next {
                Next::Look => continue,
                Next::Slot | Next::News => settings.poll,
                Next::Pause(pause) => pause,
            };
            let for_slot = matches!(next, Next::Slot);
            let rests = self.news.rests(matches!(next, Next::News));
            tokio::select! {
                () = draining.cancelled() => {}
                () = jobs.closed() => {}
                () = freed.notified(), if for_slot => {}
                () = self.news.ready.notified(), if !for_slot => {}
                // The process had a suspect, and there may be another one.
                _ = departures.changed() => course.looked = None,
                () = tokio::time::sleep(wait) => {}
            }
            drop(rests);
        }
        self.news.close();
        self.unbegun.hand_over(store).await;
    }

    /// Claims jobs for the free slots. All queues of a process together may hold one suspect, which takes no slot: so a full queue
    /// looks for suspects too, as often as for work of which it does not hear.
    async fn claim_for_free_slots(&self, course: &mut Course) -> Next {
        let Feed { settings, holdings, room, .. } = &*self.feed;
        let free = room.free();
        if free > 0
            && course.backlog
            && let Some(after) = course.turns.after(boottime_ms())
        {
            let after = after.to_owned();
            return self.claim_in_turn(course, &after, free).await;
        }
        let is_due = course.looked.is_none_or(|at| at.elapsed() >= settings.poll);
        let looking = if free > 0 || is_due { holdings.suspect.look().await } else { None };
        if free == 0 && looking.is_none() {
            return Next::Slot;
        }
        course.looked = Some(Instant::now());
        let (take_suspect, lock) = (looking.is_some(), holdings.lock());
        let claimed = self.claim(free, take_suspect, lock, &course.horizon).await;
        if let Some(looking) = looking
            && claimed.as_ref().is_ok_and(|claimed| claimed.rows.iter().any(|row| row.suspect))
        {
            looking.found();
        }
        let Claimed { rows, began_ms, reach } = match claimed {
            Ok(claimed) => claimed,
            Err(error) => return self.failed(course, &error, lock),
        };
        course.faults = 0;
        if free > 0 {
            // Fewer than asked for means that no job is left.
            course.backlog = rows.iter().filter(|row| !row.suspect).count() == free;
            let age = rows.iter().find_map(|row| row.age_s).unwrap_or_default();
            // A clock that was set back gives a negative age.
            let left = course.backlog.then(|| Duration::try_from_secs_f64(age).unwrap_or_default());
            course.horizon.claimed(began_ms, reach, boottime_ms(), left);
            room.clear_before.store(course.horizon.clear_before, Ordering::Relaxed);
        }
        self.feed.send_claimed(rows, self.ends_ms(began_ms), lock).await;
        match (free, course.backlog) {
            (0, _) => Next::Slot,
            (_, true) => Next::Look,
            (_, false) => Next::News,
        }
    }

    /// Claims jobs of the next spaces that wait, for up to `free` slots.
    async fn claim_in_turn(&self, course: &mut Course, after: &str, free: usize) -> Next {
        let lock = self.feed.holdings.lock();
        let claimed = async {
            let mut lent = self.feed.store.pool.acquire().await?;
            let (began_ms, wanted) = (boottime_ms(), self.wanted(free, lock));
            let reach = course.horizon.nearest(began_ms);
            let rows = claim_in_turn(&mut lent, &wanted, after, course.turns.share(free), reach).await;
            drop(lent);
            self.give_back_if_lost(rows, &wanted, began_ms).map(|rows| (rows, began_ms))
        };
        match claimed.await {
            Ok((rows, began_ms)) => {
                course.faults = 0;
                let turn = rows.first().and_then(|row| row.turn.as_ref()).map(|turn| turn.0.clone());
                course.turns.claimed(turn, rows.len() >= free, began_ms, boottime_ms());
                self.feed.send_claimed(rows, self.ends_ms(began_ms), lock).await;
                Next::Look
            }
            Err(error) => self.failed(course, &error, lock),
        }
    }

    /// A claim failed, which wrote the liveness lock `lock` into the jobs that it may have taken.
    fn failed(&self, course: &mut Course, error: &Error, lock: Option<i32>) -> Next {
        (course.faults, course.backlog) = (course.faults + 1, false);
        course.horizon.failed();
        self.feed.holdings.written(&self.feed.store, lock);
        warn!(%error, "Claiming failed; trying again");
        Next::Pause(super::delay(course.faults, None).min(Duration::from_secs(5)))
    }

    /// When the leases end that a statement takes, if it began at `began_ms`.
    fn ends_ms(&self, began_ms: u64) -> u64 {
        began_ms + self.feed.settings.lease.as_millis() as u64
    }

    /// Claims up to `free` jobs.
    async fn claim(
        &self,
        free: usize,
        take_suspect: bool,
        lock: Option<i32>,
        horizon: &Horizon,
    ) -> Result<Claimed, Error> {
        let mut lent = self.feed.store.pool.acquire().await?;
        // Read the clock before the statement, so that the lease's end in this process is never later than in the database. And
        // after the wait for a connection, which says nothing of how long a look takes or how far back it must go.
        let began_ms = boottime_ms();
        let (reach, take_expired) = (horizon.reach(began_ms), self.feed.holdings.may_take_expired(began_ms));
        let wanted = self.wanted(free, lock);
        let rows = claim(&mut lent, &wanted, take_suspect, take_expired, reach).await;
        drop(lent);
        self.give_back_if_lost(rows, &wanted, began_ms).map(|rows| Claimed { rows, began_ms, reach })
    }

    fn wanted(&self, limit: usize, liveness_lock: Option<i32>) -> Wanted<'_> {
        let Feed { settings, worker_id, .. } = &*self.feed;
        Wanted { settings, worker_id, limit, token: new_token(), liveness_lock }
    }

    /// If the answer of a claim was lost, gives back what it took.
    fn give_back_if_lost(
        &self,
        rows: Result<Vec<ClaimedRow>, Error>,
        wanted: &Wanted<'_>,
        began_ms: u64,
    ) -> Result<Vec<ClaimedRow>, Error> {
        if rows.as_ref().is_err_and(may_have_claimed) {
            let (feed, token, ends_ms) = (Arc::clone(&self.feed), wanted.token, self.ends_ms(began_ms));
            tokio::spawn(async move { feed.give_back(token, ends_ms).await });
        }
        rows
    }

    /// Takes the steps that others left, if this process has agents that others may lack.
    async fn take_left(&self, looked: &mut Option<Instant>) {
        let free = self.feed.room.free();
        if self.feed.settings.agents.is_empty() || self.feed.settings.kind != super::Kind::Step || free == 0 {
            return;
        }
        let is_due = looked.is_none_or(|at| at.elapsed() > LEFT_EVERY);
        if !self.news.left.swap(false, Ordering::AcqRel) && !is_due {
            return;
        }
        *looked = Some(Instant::now());
        let lock = self.feed.holdings.lock();
        let claimed = async {
            let mut lent = self.feed.store.pool.acquire().await?;
            let (began_ms, wanted) = (boottime_ms(), self.wanted(free, lock));
            let rows = claim_left(&mut lent, &wanted).await;
            drop(lent);
            self.give_back_if_lost(rows, &wanted, began_ms).map(|rows| (rows, self.ends_ms(began_ms)))
        };
        match claimed.await {
            Ok((rows, ends_ms)) => {
                // There may be more.
                self.news.left.fetch_or(rows.len() == free, Ordering::AcqRel);
                self.feed.send_claimed(rows, ends_ms, lock).await;
            }
            Err(error) => {
                self.news.left.store(true, Ordering::Release);
                self.feed.holdings.written(&self.feed.store, lock);
                warn!(%error, "Steps that other workers left were not claimed; trying again");
            }
        }
    }

    /// Waits until several slots are free, but not for long.
    async fn gather(&self) {
        let several = async {
            while self.feed.room.slots.available_permits() * ENOUGH < self.feed.settings.concurrency {
                self.feed.freed.notified().await;
            }
        };
        // An error is the time limit.
        let _ = tokio::time::timeout(GATHER, several).await;
    }
}
