//! The commits that wait, and when a lane takes them.

use super::{BYTES, ENOUGH, KEPT_IDLE, LANES, PATIENCE, Reported, SESSIONS, YIELDS};
use crate::pool::{Server, Use};
use crate::step::rows::Rows;
use sqlx::PgConnection;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// The commits that wait for a lane.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    queue: Mutex<Queue>,
    pub changed: Notify,
    closing: CancellationToken,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    pub requests: VecDeque<Request>,
    /// How many lanes write.
    pub writing: usize,
    /// A commit has waited for long.
    pub late: bool,
    pub closed: bool,
    /// How many lanes wait for a connection.
    pub unable: usize,
    /// How many lanes have a connection.
    pub connected: usize,
}

#[derive(Debug)]
pub(super) struct Request {
    pub rows: Arc<Rows>,
    pub report: oneshot::Sender<Reported>,
    since: Instant,
}

impl Request {
    pub fn new(rows: Arc<Rows>, report: oneshot::Sender<Reported>) -> Request {
        Request { rows, report, since: Instant::now() }
    }
}

impl Waiting {
    pub fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        // Their callers write these commits alone.
        queue.requests.clear();
        self.changed.notify_waiters();
        self.closing.cancel();
    }

    /// Waits for commits and takes them. `None`: the committer is closed. Until the second value is dropped, the other
    /// lane leaves commits to the next statement of this lane.
    pub async fn next(&self) -> Option<(Vec<Request>, Writing<'_>)> {
        let mut yields = 0;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on `close` reaches this lane.
            changed.as_mut().enable();
            {
                if self.gathers(yields) {
                    yields += 1;
                    tokio::task::yield_now().await;
                    continue;
                }
                let mut queue = self.lock();
                if queue.is_due() {
                    let taken = queue.take();
                    // One that found no place is late still.
                    queue.late =
                        queue.requests.front().is_some_and(|first| first.since.elapsed() >= PATIENCE);
                    if !taken.is_empty() {
                        queue.writing += 1;
                        if queue.is_due() {
                            self.changed.notify_last();
                        }
                        return Some((taken, Writing(self)));
                    }
                }
                if queue.closed {
                    return None;
                }
            }
            changed.await;
        }
    }

    /// Returns whether a lane lets others join what it is about to write: there is room for them, and it has not done so often
    /// enough.
    fn gathers(&self, yields: u32) -> bool {
        let queue = self.lock();
        yields < YIELDS && queue.is_due() && queue.requests.len() < SESSIONS
    }
}

/// What a lane does next.
pub(super) enum Next<'a> {
    Commits(Vec<Request>, Writing<'a>),
    /// It gives its connection back.
    Idle,
    Closed,
}

impl Waiting {
    /// Waits for commits of a lane that has a connection, or for the time at which it needs none any more.
    pub async fn next_of(&self, connected: &mut Connected<'_>) -> Next<'_> {
        loop {
            match tokio::time::timeout(KEPT_IDLE, self.next()).await {
                Ok(Some((requests, writing))) => return Next::Commits(requests, writing),
                Ok(None) => return Next::Closed,
                Err(_) if connected.is_spare() => return Next::Idle,
                Err(_) => {}
            }
        }
    }
}

/// A lane has a connection.
pub(super) struct Connected<'a> {
    waiting: &'a Waiting,
    counts: bool,
}

impl Connected<'_> {
    pub fn new(waiting: &Waiting) -> Connected<'_> {
        waiting.lock().connected += 1;
        Connected { waiting, counts: true }
    }

    /// Returns whether the other lane has a connection too. Then this one is counted no more, so that two idle lanes do not both
    /// give their connections back.
    fn is_spare(&mut self) -> bool {
        let mut queue = self.waiting.lock();
        if queue.connected < LANES {
            return false;
        }
        queue.connected -= 1;
        self.counts = false;
        true
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        if self.counts {
            self.waiting.lock().connected -= 1;
        }
    }
}

/// A lane writes.
pub(super) struct Writing<'a>(&'a Waiting);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // The same lane now takes what waits. If it ends, the next commit or a late one wakes another lane.
        self.0.lock().writing -= 1;
    }
}

impl Waiting {
    /// Opens a connection for a lane.
    pub async fn connect(&self, server: &Server) -> Result<(PgConnection, Connected<'_>), sqlx::Error> {
        let open = server.connect(&super::SETTINGS).await?;
        server.links.back(Use::Commits);
        Ok((open, Connected::new(self)))
    }

    /// Waits until the server gives the lane a connection. `None`: the committer is closed.
    pub async fn without_connection(
        &self,
        server: &Server,
        error: sqlx::Error,
    ) -> Option<(PgConnection, Connected<'_>)> {
        warn!(%error, "A lane of the committer has no connection; commits are made with fewer lanes, or alone");
        let _unable = Unable::new(self);
        for faults in 1..=i32::MAX {
            // The other lane may have lost its connection since, or may notice only now.
            if self.lock().connected == 0 {
                server.links.lost(Use::Commits);
            }
            let pause = crate::queue::delay(faults, None).min(Duration::from_secs(10));
            self.closing.run_until_cancelled(tokio::time::sleep(pause)).await?;
            if let Ok(connected) = self.connect(server).await {
                return Some(connected);
            }
        }
        None
    }
}

/// A lane that waits for a connection.
struct Unable<'a>(&'a Waiting);

impl Unable<'_> {
    fn new(waiting: &Waiting) -> Unable<'_> {
        let mut queue = waiting.lock();
        queue.unable += 1;
        if queue.unable >= LANES {
            // Their callers write these commits alone.
            queue.requests.clear();
        } else {
            waiting.changed.notify_last();
        }
        Unable(waiting)
    }
}

impl Drop for Unable<'_> {
    fn drop(&mut self) {
        self.0.lock().unable -= 1;
    }
}

impl Queue {
    /// Returns whether a lane that does not write takes what waits.
    pub fn is_due(&self) -> bool {
        !self.requests.is_empty() && (self.writing == 0 || self.late || self.requests.len() >= ENOUGH)
    }

    /// Takes the first commits, each of another session, sorted by conversation and session: so statements of two
    /// processes lock rows in one order.
    pub fn take(&mut self) -> Vec<Request> {
        let (mut taken, mut left, mut sessions, mut bytes) = (Vec::new(), VecDeque::new(), HashSet::new(), 0);
        while let Some(request) = self.requests.pop_front() {
            if request.report.is_closed() {
                continue;
            }
            let more = request.rows.bytes();
            if taken.len() == SESSIONS || (!taken.is_empty() && bytes + more > BYTES) {
                left.push_back(request);
                break;
            }
            if !sessions.insert(request.rows.session_id.clone()) {
                left.push_back(request);
                continue;
            }
            bytes += more;
            taken.push(request);
        }
        left.append(&mut self.requests);
        self.requests = left;
        taken.sort_unstable_by(|a, b| {
            let [a, b] = [a, b].map(|request| (&request.rows.conversation_id, &request.rows.session_id));
            a.cmp(&b)
        });
        taken
    }
}
