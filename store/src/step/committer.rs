//! Commits the steps of many sessions together.
//!
//! Postgres spends most of a commit on the statement and little on its rows. So the commits that wait at one
//! moment go into one statement. There are two lanes; each has a connection of its own. While no lane writes, a lane
//! takes the first commit that waits, and all others that wait already. Before it does, the tasks that can run go first, twice
//! ([`YIELDS`]): those that are about to commit join the statement. It waits for nothing else, so a lone session is committed at
//! once. While one lane writes, the commits gather for its next statement: two statements at a time
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
//! A statement of many sessions locks several rows, in the order of the conversations and then of the session
//! ids. All other statements lock the rows of one session at a time, or skip locked rows. But a close that takes locks first
//! also holds the row of the conversation's next session. If two of them wait for each other all the same, the lane's
//! `lock_timeout` ends its statement, and its commits are written alone.

mod waiting;

use super::rows::Rows;
use super::statement::{self, Written};
use crate::error::missed_fence;
use crate::metrics::Metrics;
use crate::pool::Server;
use sqlx::{Connection, PgConnection};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::debug;
use waiting::{Next, Request, Waiting};

const LANES: usize = 2;

/// Most sessions, and about most bytes, of one statement.
const SESSIONS: usize = 16;
const BYTES: usize = 1 << 20;

/// While one lane writes, the other takes commits when so many wait. Measured with 16 sessions at a time: with 8, the
/// lanes commit a quarter more steps a second than with 16, and the whole worker needs less CPU than with 1.
const ENOUGH: usize = SESSIONS / 2;

/// How often a lane lets the tasks that can run go first. Where none can, this takes a microsecond. Measured with a backlog: a
/// statement in fifteen is saved.
const YIELDS: u32 = 2;

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
    metrics: Arc<Metrics>,
    lanes: Mutex<Vec<JoinHandle<()>>>,
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
    pub(crate) fn new(server: Server, metrics: Arc<Metrics>) -> Committer {
        Committer(Arc::new(Owner { waiting: Arc::default(), server, metrics, lanes: Mutex::default() }))
    }

    /// Commits `rows` in a lane. If the caller goes away, the commit is made completely or not at all.
    pub(super) async fn commit(&self, rows: Arc<Rows>) -> Reported {
        let Some(mut reported) = self.enter(rows) else { return Reported::Alone };
        let Committer(owner) = self;
        if let Ok(reported) = tokio::time::timeout(PATIENCE, &mut reported).await {
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

    /// Puts `rows` in the queue. `None`: no lane works, so the caller writes the commit alone.
    fn enter(&self, rows: Arc<Rows>) -> Option<oneshot::Receiver<Reported>> {
        let (report, reported) = oneshot::channel();
        let waiting = &self.0.waiting;
        let is_due = {
            let mut queue = waiting.lock();
            if queue.closed || queue.unable >= LANES {
                return None;
            }
            queue.requests.push_back(Request::new(rows, report));
            queue.is_due()
        };
        self.0.start_lanes(false);
        if is_due {
            // The lane that worked last has its connection; a second one is opened only for a second lane.
            waiting.changed.notify_last();
        }
        Some(reported)
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
            let lane = Lane {
                waiting: Arc::clone(&self.waiting),
                server: self.server.clone(),
                metrics: Arc::clone(&self.metrics),
            };
            lanes.push(tokio::spawn(lane.run(std::mem::take(&mut opens))));
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.waiting.close();
    }
}

struct Lane {
    waiting: Arc<Waiting>,
    server: Server,
    metrics: Arc<Metrics>,
}

impl Lane {
    /// Writes commits until the committer is closed.
    async fn run(self, opens: bool) {
        let waiting = &*self.waiting;
        let mut connection = if opens { waiting.connect(&self.server).await.ok() } else { None };
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
                None => waiting.connect(&self.server).await,
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
                    connection = waiting.without_connection(&self.server, error).await;
                }
            }
        }
    }

    /// Writes the commits of `requests` as one statement. Returns the connection if it is sound.
    async fn write(&self, mut open: PgConnection, requests: Vec<Request>) -> Option<PgConnection> {
        let commits: Vec<&Rows> = requests.iter().map(|request| &*request.rows).collect();
        let error = match statement::write_all(&mut open, &commits, None).await {
            Ok(written) => {
                self.metrics.together(requests.len());
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
