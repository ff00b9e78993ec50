//! Commits the steps of many sessions together.
//!
//! Postgres spends most of a commit on the statement and little on its rows. So the commits that wait at one
//! moment go into one statement. There are two lanes; each has a connection of its own. While no lane writes, a lane
//! takes the first commit that waits, and all others that wait already. It never waits for more, so a lone session
//! is committed at once. While one lane writes, the commits gather for its next statement: two statements at a time
//! would each have half of them, and cost more. The other lane takes them only if they fill half a statement, or if one has
//! waited for long, because the statement of the first lane waits for a lock or for the network.
//!
//! A lane that had nothing to write for a while gives its connection back, if the other lane has one. A lane that gets no
//! connection takes nothing and tries again later. If no lane has one, each commit is written alone.
//!
//! A lane only makes commits faster. Whatever goes wrong with a statement of several commits, nothing of it
//! was written, or its connection broke and the lane cannot tell. Then each commit is written alone, by its caller,
//! and its own fence tells what happened. So no commit can fail because of another one.
//!
//! A statement of many sessions locks several rows, in the order of the session ids. All other statements lock
//! the rows of one session at a time, or skip locked rows. Should two of them wait for each other all the
//! same, the lane's `lock_timeout` ends its statement, and its commits are written alone.

use super::rows::Rows;
use super::statement::{self, Written};
use crate::error::missed_fence;
use crate::pool::{Server, Use};
use sqlx::{Connection, PgConnection};
use std::collections::HashSet;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

const LANES: usize = 2;

/// Most sessions, and about most bytes, of one statement.
const SESSIONS: usize = 16;
const BYTES: usize = 1 << 20;

/// While one lane writes, the other takes commits when so many wait. Measured with 16 sessions at a time: with 8, the
/// lanes commit a quarter more steps a second than with 16, and the whole worker needs less CPU than with 1.
const ENOUGH: usize = SESSIONS / 2;

/// A commit that has waited this long goes to the other lane.
const PATIENCE: Duration = Duration::from_millis(20);

/// A lane that was idle for this long needs no connection while the other lane has one.
const KEPT_IDLE: Duration = Duration::from_secs(10);

/// Settings of a lane's connection. A wake that holds one session's row delays the others of its statement,
/// so the wait for a lock is short. The plans are made once, when the tables may still be empty: they must
/// be good for large tables too, and nested loops lock the rows in the order of the parameters.
const SETTINGS: [(&str, &str); 5] = [
    ("lock_timeout", "250ms"),
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
];

/// Clones share the lanes. The lanes end with the last clone.
#[derive(Clone, Debug)]
pub(crate) struct Committer(Arc<Owner>);

#[derive(Debug)]
struct Owner {
    waiting: Arc<Waiting>,
    server: Server,
    lanes: Mutex<Vec<JoinHandle<()>>>,
}

/// The commits that wait for a lane.
#[derive(Debug, Default)]
struct Waiting {
    queue: Mutex<Queue>,
    changed: Notify,
    closing: CancellationToken,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    /// How many lanes write.
    writing: usize,
    /// A commit has waited for long.
    late: bool,
    closed: bool,
    /// How many lanes wait for a connection.
    unable: usize,
    /// How many lanes have a connection.
    connected: usize,
}

#[derive(Debug)]
struct Request {
    rows: Arc<Rows>,
    report: oneshot::Sender<Reported>,
}

/// A commit in the queue. It waits for a statement, or a lane writes it.
#[derive(Debug)]
pub(super) struct Ticket {
    owner: Arc<Owner>,
    rows: Arc<Rows>,
    reported: oneshot::Receiver<Reported>,
}

impl Ticket {
    /// Takes the commit out of the queue. `false`: a lane has taken it.
    pub(super) fn withdraw(&mut self) -> bool {
        let mut queue = self.owner.waiting.lock();
        let waiting = queue.requests.len();
        queue.requests.retain(|request| !Arc::ptr_eq(&request.rows, &self.rows));
        queue.requests.len() < waiting
    }

    /// Waits until a lane has written the commit. If the caller goes away, the commit is made completely or not at all.
    pub(super) async fn reported(&mut self) -> Reported {
        let Ticket { owner, reported, .. } = self;
        if let Ok(reported) = tokio::time::timeout(PATIENCE, &mut *reported).await {
            // The lane ended without a report if its runtime ended.
            return reported.unwrap_or(Reported::Alone);
        }
        let waits = {
            let mut queue = owner.waiting.lock();
            // If the queue is empty, a lane writes this commit, and another lane has nothing to do.
            queue.late = !queue.requests.is_empty();
            queue.late
        };
        if waits {
            // The lanes may have ended with their runtime.
            owner.start_lanes(false);
            owner.waiting.changed.notify_last();
        }
        reported.await.unwrap_or(Reported::Alone)
    }
}

/// What a lane says of one commit.
#[derive(Debug)]
pub(super) enum Reported {
    Written(Written),
    /// The fence of this commit missed. Nothing was written.
    Missed(sqlx::Error),
    /// The commit was not written, or the lane cannot tell. Its caller writes it alone.
    Alone,
}

impl Committer {
    pub(crate) fn new(server: Server) -> Committer {
        Committer(Arc::new(Owner { waiting: Arc::default(), server, lanes: Mutex::default() }))
    }

    /// Commits `rows` in a lane. If the caller goes away, the commit is made completely or not at all.
    pub(super) async fn commit(&self, rows: Arc<Rows>) -> Reported {
        match self.enter(rows) {
            Some(mut ticket) => ticket.reported().await,
            None => Reported::Alone,
        }
    }

    /// Puts `rows` in the queue. `None`: no lane works, so the caller writes the commit alone.
    pub(super) fn enter(&self, rows: Arc<Rows>) -> Option<Ticket> {
        let (report, reported) = oneshot::channel();
        let waiting = &self.0.waiting;
        let is_due = {
            let mut queue = waiting.lock();
            if queue.closed || queue.unable >= LANES {
                return None;
            }
            queue.requests.push_back(Request { rows: Arc::clone(&rows), report });
            queue.is_due()
        };
        self.0.start_lanes(false);
        if is_due {
            // The lane that worked last has its connection; a second one is opened only for a second lane.
            waiting.changed.notify_last();
        }
        Some(Ticket { owner: Arc::clone(&self.0), rows, reported })
    }

    /// Returns whether a commit that enters now would wait for a statement to end.
    pub(super) fn is_busy(&self) -> bool {
        let queue = self.0.waiting.lock();
        queue.writing > 0 && !queue.late && queue.requests.len() + 1 < ENOUGH
    }

    /// Starts the lanes. The first one opens its connection at once.
    pub(crate) fn start(&self) {
        self.0.start_lanes(true);
    }

    /// Ends the lanes after the commits that they write now.
    pub(crate) async fn close(&self) {
        self.0.waiting.close();
        let lanes = std::mem::take(&mut *self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner));
        for lane in lanes {
            // A lane that panicked has ended too.
            let _ = lane.await;
        }
    }
}

impl Owner {
    /// Starts the lanes that do not run: at the first commit, and after the runtime that ran them has ended.
    fn start_lanes(&self, mut opens: bool) {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.retain(|lane| !lane.is_finished());
        while lanes.len() < LANES {
            let lane = Lane { waiting: Arc::clone(&self.waiting), server: self.server.clone() };
            lanes.push(tokio::spawn(lane.run(std::mem::take(&mut opens))));
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.waiting.close();
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        // Their callers write these commits alone.
        queue.requests.clear();
        self.changed.notify_waiters();
        self.closing.cancel();
    }

    /// Waits for commits and takes them. `None`: the committer is closed. Until the second value is dropped, the other
    /// lane leaves commits to the next statement of this lane.
    async fn next(&self) -> Option<(Vec<Request>, Writing<'_>)> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on `close` reaches this lane.
            changed.as_mut().enable();
            {
                let mut queue = self.lock();
                if queue.is_due() {
                    queue.late = false;
                    let taken = queue.take();
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
}

/// What a lane does next.
enum Next<'a> {
    Commits(Vec<Request>, Writing<'a>),
    /// It gives its connection back.
    Idle,
    Closed,
}

impl Waiting {
    /// Waits for commits of a lane that has a connection, or for the time at which it needs none any more.
    async fn next_of(&self, connected: &mut Connected<'_>) -> Next<'_> {
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
struct Connected<'a> {
    waiting: &'a Waiting,
    counts: bool,
}

impl Connected<'_> {
    fn new(waiting: &Waiting) -> Connected<'_> {
        waiting.lock().connected += 1;
        Connected { waiting, counts: true }
    }

    /// Returns whether the other lane has a connection too. Then this one counts no more, so that of two idle lanes one
    /// keeps its connection.
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
struct Writing<'a>(&'a Waiting);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // The same lane now takes what waits. If it ends, the next commit or a late one wakes another lane.
        self.0.lock().writing -= 1;
    }
}

impl Waiting {
    /// Waits until the server gives the lane a connection. `None`: the committer is closed.
    async fn without_connection(&self, server: &Server, error: sqlx::Error) -> Option<PgConnection> {
        warn!(%error, "A lane of the committer has no connection; commits are made with fewer lanes, or alone");
        let _unable = Unable::new(self);
        if self.lock().connected == 0 {
            server.links.lost(Use::Commits);
        }
        for faults in 1..=i32::MAX {
            let pause = crate::queue::delay(faults, None).min(Duration::from_secs(10));
            self.closing.run_until_cancelled(tokio::time::sleep(pause)).await?;
            if let Ok(open) = server.connect(&SETTINGS).await {
                server.links.back(Use::Commits);
                return Some(open);
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
    fn is_due(&self) -> bool {
        !self.requests.is_empty() && (self.writing == 0 || self.late || self.requests.len() >= ENOUGH)
    }

    /// Takes the first commits, each of another session, sorted by conversation and session: so statements of two
    /// processes lock rows in one order.
    fn take(&mut self) -> Vec<Request> {
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

struct Lane {
    waiting: Arc<Waiting>,
    server: Server,
}

impl Lane {
    /// Writes commits until the committer is closed.
    async fn run(self, opens: bool) {
        let waiting = &*self.waiting;
        let open = if opens { self.server.connect(&SETTINGS).await.ok() } else { None };
        let mut connection = open.map(|open| (open, Connected::new(waiting)));
        loop {
            let next = match &mut connection {
                Some((_, connected)) => waiting.next_of(connected).await,
                None => waiting
                    .next()
                    .await
                    .map_or(Next::Closed, |(requests, writing)| Next::Commits(requests, writing)),
            };
            let (requests, writing) = match next {
                Next::Commits(requests, writing) => (requests, writing),
                Next::Idle | Next::Closed => {
                    if let Some((open, _)) = connection.take() {
                        let _ = PgConnection::close(open).await;
                    }
                    if matches!(next, Next::Closed) {
                        return;
                    }
                    continue;
                }
            };
            let opened = match connection.take() {
                Some(open) => Ok(open),
                None => self.server.connect(&SETTINGS).await.map(|open| (open, Connected::new(waiting))),
            };
            match opened {
                Ok((open, connected)) => {
                    connection = self.write(open, requests).await.map(|open| (open, connected));
                    drop(writing);
                }
                Err(error) => {
                    for request in requests {
                        // A caller that went away finds no commit when it hydrates.
                        let _ = request.report.send(Reported::Alone);
                    }
                    // The other lane takes what waits.
                    drop(writing);
                    let open = waiting.without_connection(&self.server, error).await;
                    connection = open.map(|open| (open, Connected::new(waiting)));
                }
            }
        }
    }

    /// Writes the commits of `requests` as one statement. Returns the connection if it is sound.
    async fn write(&self, mut open: PgConnection, requests: Vec<Request>) -> Option<PgConnection> {
        let commits: Vec<&Rows> = requests.iter().map(|request| &*request.rows).collect();
        let error = match statement::write_all(&mut open, &commits, None).await {
            Ok(written) => {
                for (request, written) in requests.into_iter().zip(written) {
                    // A caller that went away finds its commit when it hydrates.
                    let _ = request.report.send(Reported::Written(written));
                }
                return Some(open);
            }
            Err(error) => error,
        };
        let sound = is_sound_after(&error);
        if !sound {
            self.server.breaks.note();
        }
        debug!(%error, commits = requests.len(), "Commits that were to be one are written alone");
        let lone = requests.len() == 1 && missed_fence(&error);
        let mut lone = lone.then_some(error);
        for request in requests {
            let _ = request.report.send(lone.take().map_or(Reported::Alone, Reported::Missed));
        }
        sound.then_some(open)
    }
}

/// After other errors the connection may be broken, or close to it.
fn is_sound_after(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| ["22", "23", "55", "40"].iter().any(|class| code.starts_with(class)))
}

#[cfg(test)]
mod tests;
