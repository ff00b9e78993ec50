//! Wake-ups across processes, as the processes that wait see them: LISTEN on a connection of its own, and the queues of this
//! process that claim. [`super::announce`] sends them. A notification is only a hint: every waiter also polls.
//!
//! A process with room for a new job announces the job only to itself. It tells the others if its
//! claim leaves jobs behind. A process that another one has named does the same, or tells the others at once that it has no room.

use super::announce::{self, Note, send_notes};
use super::feed::{Feed, Offer};
use super::proven::{Lost, ProvenListener};
use super::readers::{Audience, Readers};
use super::{Kind, Room};
use crate::Store;
use crate::pool::Use;
use crate::schedule;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub(super) const JOBS: &str = "wakeful_jobs";
/// A worker lacks an agent, and left its step to the others. Earlier versions ignore it.
pub(super) const LEFT: &str = "left";
pub(crate) const SESSIONS: &str = "wakeful_sessions";
/// A provider's gate shuts or opens.
pub(crate) const GATES: &str = "wakeful_gates";
/// Names all sessions.
pub const EVERY_SESSION: &str = "*";
/// Also what earlier versions send.
pub(super) const EVERY_JOB: &str = "";
/// Before the id of a session whose run someone cancels. [`heard`] ignores such a payload.
pub(crate) const CANCEL: &str = "!";
/// Before the id of a session that somebody reads live. Earlier versions ignore such a payload.
pub(super) const READ: &str = "?";

/// Tells other processes about commits. Clones share the task.
#[derive(Clone, Debug)]
pub struct Notifier {
    notes: mpsc::UnboundedSender<Note>,
    claimants: Claimants,
    readers: Readers,
}

impl Notifier {
    /// Starts the task. It ends when the last clone is dropped and the queues of `news` have ended.
    pub fn start(store: Store, news: &News) -> Notifier {
        let (notes, inbox) = mpsc::unbounded_channel();
        // The first notifier passes on what this process is told of and has no room for.
        let _ = news.claimants.0.notes.set(notes.downgrade());
        tokio::spawn(send_notes(store, Arc::downgrade(&news.claimants.0), inbox));
        Notifier { notes, claimants: news.claimants.clone(), readers: news.readers.clone() }
    }

    /// Announces a job of the deployed workers.
    pub fn job(&self, kind: Kind) {
        self.job_of(kind, "");
    }

    /// Announces a job of the pool `runner`.
    pub fn job_of(&self, kind: Kind, runner: &str) {
        let payload = payload(kind.as_str(), runner);
        if !self.claimants.tell_here(&payload, &self.notes) {
            // Runners are on no list of workers.
            self.send(if runner.is_empty() { Note::Job(kind) } else { Note::Jobs(payload) });
        }
    }

    /// Offers a free slot to the job of a message, if a queue of this process has one for which no job waits. `None`: announce the
    /// job.
    pub fn offer(&self, kind: Kind) -> Option<Offer> {
        let all = self.claimants.with_payload(&payload(kind.as_str(), ""));
        all.iter().find_map(|one| one.offer())
    }

    /// Announces work of any kind, to every pool.
    pub fn any_job(&self) {
        self.send(Note::Jobs(EVERY_JOB.to_owned()));
    }

    /// Announces that readers of a session have something new to read.
    pub fn session(&self, session_id: &str) {
        self.send(Note::Session(session_id.to_owned()));
    }

    /// Tells the workers that somebody reads a session live.
    pub fn reads(&self, session_id: &str) {
        // This process need not wait for LISTEN, which may be away.
        self.readers.note(session_id);
        self.send(Note::Session(format!("{READ}{session_id}")));
    }

    fn send(&self, note: Note) {
        // Sending fails only at shutdown. Other processes then find the work by polling.
        let _ = self.notes.send(note);
    }
}

/// What a notification says of a job. No runner has a colon before the first one.
pub(super) fn payload(kind: &str, runner: &str) -> String {
    format!("{kind}:{runner}")
}

/// The queues of this process that claim jobs. Clones share them.
#[derive(Clone, Debug, Default)]
struct Claimants(Arc<Here>);

/// The claiming side of this process.
#[derive(Debug, Default)]
pub(super) struct Here {
    queues: Mutex<Vec<Weak<Claimant>>>,
    /// The names that its queues have, or had before they ended: others may name this process while it drains.
    worker_ids: Mutex<BTreeSet<String>>,
    /// The way to the other processes, once there is a notifier.
    notes: OnceLock<mpsc::WeakUnboundedSender<Note>>,
}

impl Here {
    fn queues(&self) -> Vec<Arc<Claimant>> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|one| one.strong_count() > 0);
        queues.iter().filter_map(Weak::upgrade).collect()
    }

    /// The workers that this process is.
    pub(super) fn worker_ids(&self) -> Vec<String> {
        self.worker_ids.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl Claimants {
    fn with_payload(&self, said: &str) -> Vec<Arc<Claimant>> {
        let mut all = self.0.queues();
        all.retain(|one| said == EVERY_JOB || one.payload == said);
        all
    }

    /// Returns whether a queue of this process has room and claims the job.
    fn tell_here(&self, payload: &str, notes: &mpsc::UnboundedSender<Note>) -> bool {
        let Some(one) = self.with_payload(payload).into_iter().find(|one| one.room.free() > 0) else {
            return false;
        };
        *one.only_here.lock().unwrap_or_else(PoisonError::into_inner) = Some(notes.clone());
        one.ready.notify_one();
        // If the queue closed before the line above, it does not claim any more.
        !one.closed.load(Ordering::SeqCst)
    }

    /// Another process has named a worker. If it is this one, it claims the job, or tells all others that it cannot.
    fn named(&self, worker_id: &str, payload: &str) {
        if !self.0.worker_ids.lock().unwrap_or_else(PoisonError::into_inner).contains(worker_id) {
            return;
        }
        // Without a notifier, all others hear of the job from the process that named this one.
        if let Some(notes) = self.0.notes.get().and_then(mpsc::WeakUnboundedSender::upgrade)
            && !self.tell_here(payload, &notes)
        {
            let _ = notes.send(Note::Jobs(payload.to_owned()));
        }
    }
}

/// A queue of this process, as notifications see it.
#[derive(Debug)]
pub(super) struct Claimant {
    payload: String,
    room: Arc<Room>,
    feed: Weak<Feed>,
    /// Whether the queue has taken all jobs that waited.
    rests: AtomicBool,
    /// Fires when there may be new work.
    pub(super) ready: Notify,
    /// Set while a job was announced to this queue and to no other process.
    only_here: Mutex<Option<mpsc::UnboundedSender<Note>>>,
    closed: AtomicBool,
    /// Whether another worker may have left a step to those that have its agent.
    pub(super) left: AtomicBool,
}

impl Claimant {
    /// Says that the queue waits for work, until the value is dropped.
    pub(super) fn rests(&self, rests: bool) -> Resting<'_> {
        self.rests.store(rests, Ordering::Release);
        Resting(self)
    }

    /// Offers a slot for a job that was not announced. Jobs that wait go first, so only a queue for which none waits offers one.
    fn offer(&self) -> Option<Offer> {
        if !self.rests.load(Ordering::Acquire) {
            return None;
        }
        self.feed.upgrade()?.offer()
    }

    /// Call this before a claim. The claim sees every job that was announced so far. Returns what to do if
    /// it leaves jobs behind.
    pub(super) fn begin_claim(&self) -> OnlyHere<'_> {
        let _ = futures::FutureExt::now_or_never(self.ready.notified());
        let notes = self.only_here.lock().unwrap_or_else(PoisonError::into_inner).take();
        OnlyHere { claimant: self, notes }
    }

    /// Call this after the last claim.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.begin_claim().tell_others();
    }
}

/// A queue waits for work.
pub(super) struct Resting<'a>(&'a Claimant);

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        self.0.rests.store(false, Ordering::Release);
    }
}

/// Whether the jobs of a claim were announced to this process only.
pub(super) struct OnlyHere<'a> {
    claimant: &'a Claimant,
    notes: Option<mpsc::UnboundedSender<Note>>,
}

impl OnlyHere<'_> {
    /// Announces the jobs that are left to the other processes.
    pub(super) fn tell_others(self) {
        if let Some(notes) = self.notes {
            let _ = notes.send(Note::Jobs(self.claimant.payload.clone()));
        }
    }
}

/// Receives notifications of other processes. Clones share the connection.
#[derive(Clone, Debug)]
pub struct News {
    claimants: Claimants,
    sessions: broadcast::Sender<Arc<str>>,
    schedules: broadcast::Sender<()>,
    gates: broadcast::Sender<()>,
    readers: Readers,
}

/// Waits for a notification of one session. Returns early if notifications were missed, since one of them may have
/// been for this session.
pub async fn heard(news: &mut broadcast::Receiver<Arc<str>>, session_id: &str) {
    loop {
        match news.recv().await {
            Ok(id) if &*id == session_id || &*id == EVERY_SESSION => return,
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => return,
            // The sender is gone, so no notification will come. The caller also has a timer.
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// Waits until someone cancels a run of a session that `waits` accepts. Returns early if notifications were missed,
/// since one of them may have been such a cancel.
pub async fn heard_cancel(news: &mut broadcast::Receiver<Arc<str>>, waits: impl Fn(&str) -> bool) {
    loop {
        match news.recv().await {
            Ok(id) if &*id == EVERY_SESSION || id.strip_prefix(CANCEL).is_some_and(&waits) => return,
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => return,
            // The sender is gone, so no notification will come. The caller also has a timer.
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

impl News {
    /// Starts listening, until `stop`. After a lost connection it connects again and wakes every waiter.
    pub fn listen(store: &Store, stop: CancellationToken) -> News {
        let news = News {
            claimants: Claimants::default(),
            sessions: broadcast::channel(1024).0,
            schedules: broadcast::channel(16).0,
            gates: broadcast::channel(16).0,
            readers: Readers::default(),
        };
        tokio::spawn(news.clone().run(store.clone(), stop));
        news
    }

    /// Registers a queue of this process, until it is dropped.
    pub(super) fn register(&self, feed: &Arc<Feed>) -> Arc<Claimant> {
        let claimant = Arc::new(Claimant {
            payload: payload(feed.settings.kind.as_str(), &feed.settings.runner),
            room: Arc::clone(&feed.room),
            feed: Arc::downgrade(feed),
            rests: AtomicBool::new(false),
            ready: Notify::new(),
            only_here: Mutex::default(),
            closed: AtomicBool::new(false),
            left: AtomicBool::new(true),
        });
        let Claimants(here) = &self.claimants;
        here.queues.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&claimant));
        here.worker_ids.lock().unwrap_or_else(PoisonError::into_inner).insert(feed.worker_id.to_string());
        claimant
    }

    /// Receives ids of sessions with something new; `*` means all sessions.
    pub fn sessions(&self) -> broadcast::Receiver<Arc<str>> {
        self.sessions.subscribe()
    }

    /// The live readers of a session, in all processes.
    pub fn audience(&self, session_id: &str) -> Audience {
        self.readers.of(session_id)
    }

    /// Fires when a schedule changed.
    pub fn schedules(&self) -> broadcast::Receiver<()> {
        self.schedules.subscribe()
    }

    /// Fires when a provider's gate shuts or opens.
    pub fn gates(&self) -> broadcast::Receiver<()> {
        self.gates.subscribe()
    }

    async fn run(self, store: Store, stop: CancellationToken) {
        let mut faults = 0;
        while !stop.is_cancelled() {
            tokio::select! {
                () = stop.cancelled() => {}
                lost = self.receive(&store, &mut faults) => {
                    store.server.links.lost(Use::Notifications);
                    faults += 1;
                    if faults == 1 {
                        warn!(?lost, "Nothing listens for notifications; work is found by polling until it does");
                    }
                    tokio::time::sleep(super::delay(faults + 1, None).min(Duration::from_secs(5))).await;
                }
            }
        }
    }

    async fn receive(&self, store: &Store, faults: &mut i32) -> Lost {
        match self.try_receive(store, faults).await {
            Ok(never) => match never {},
            Err(lost) => lost,
        }
    }

    async fn try_receive(&self, store: &Store, faults: &mut i32) -> Result<Infallible, Lost> {
        let mut listener =
            ProvenListener::connect(store, &[JOBS, SESSIONS, GATES, schedule::CHANNEL]).await?;
        *faults = 0;
        store.server.links.back(Use::Notifications);
        // Postgres does not repeat notifications that were sent while we did not listen. So wake every waiter once.
        self.tell(JOBS, LEFT);
        self.tell(SESSIONS, EVERY_SESSION);
        self.tell(GATES, "");
        self.tell(schedule::CHANNEL, "");
        loop {
            let notification = listener.recv().await?;
            self.tell(notification.channel(), notification.payload());
        }
    }

    fn tell(&self, channel: &str, payload: &str) {
        // An error only means that there is no subscriber.
        if channel == JOBS
            && let Some((worker_id, payload)) = announce::named(payload)
        {
            self.claimants.named(worker_id, payload);
        } else if channel == JOBS {
            let left = payload == LEFT;
            for claimant in self.claimants.with_payload(if left { EVERY_JOB } else { payload }) {
                claimant.left.fetch_or(left, Ordering::AcqRel);
                claimant.ready.notify_one();
            }
        } else if channel == schedule::CHANNEL {
            let _ = self.schedules.send(());
        } else if channel == GATES {
            let _ = self.gates.send(());
        } else {
            for session_id in payload.split(',') {
                match session_id.strip_prefix(READ) {
                    Some(session_id) => self.readers.note(session_id),
                    None => {
                        let _ = self.sessions.send(Arc::from(session_id));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Holdings;
    use super::*;
    use crate::pool::{Pool, Server};
    use tokio::sync::Semaphore;

    #[tokio::test]
    async fn a_job_is_announced_here_only_while_a_slot_is_free() {
        let (notes, mut sent) = mpsc::unbounded_channel();
        let (claimants, slots) = (Claimants::default(), Arc::new(Semaphore::new(1)));
        let (pool, _) = Pool::new(Server::new("postgres://nowhere", "test").unwrap(), 1);
        let claimant = Arc::new(Claimant {
            payload: payload(Kind::Step.as_str(), ""),
            room: Arc::new(Room {
                slots: Arc::clone(&slots),
                pool,
                held: Arc::new(Holdings::default()),
                clear_before: crate::queue::horizon::NEVER.into(),
            }),
            feed: Weak::new(),
            rests: AtomicBool::new(false),
            ready: Notify::new(),
            only_here: Mutex::default(),
            closed: AtomicBool::new(false),
            left: AtomicBool::new(false),
        });
        claimants.0.queues.lock().unwrap().push(Arc::downgrade(&claimant));
        assert!(!claimants.tell_here("deliver:", &notes), "no queue of this kind");
        assert!(!claimants.tell_here("step:other", &notes), "no queue of this pool");
        assert!(claimants.tell_here("step:", &notes));
        claimant.ready.notified().await;

        // The claim takes as many as it asked for: the others hear of the rest, once.
        claimant.begin_claim().tell_others();
        claimant.begin_claim().tell_others();
        assert!(matches!(sent.try_recv(), Ok(Note::Jobs(said)) if said == "step:"));
        assert!(sent.try_recv().is_err());

        let taken = slots.try_acquire().unwrap();
        assert!(!claimants.tell_here("step:", &notes), "no slot is free");
        drop(taken);
        claimant.close();
        assert!(!claimants.tell_here("step:", &notes), "it claims no more");
    }
}
