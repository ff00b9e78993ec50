//! The connections of a process, except those with a task of their own (committer, heartbeat, liveness lock,
//! LISTEN).
//!
//! There is one small pool. A statement takes an idle connection, the one that was used last. If none is idle
//! and the pool has a place left, a task opens one more, and the statement takes whichever comes first. When the
//! server has no connection left for this process, the statement waits for the next one that another statement
//! gives back, and the pool tries again later. So a process that got one connection works, slowly.
//!
//! A connection sees one space, or all ([`crate::space`]). A statement takes one that sees what its task may see, if one is
//! idle; else the server is told first.
//!
//! Two *doors* lead into the pool: one for messages that come in, one for everything else. Neither may take the last
//! connection, so readers and workers cannot keep a message out, and messages cannot stop readers and workers.
//!
//! A statement that locks the row of a session takes its connection *in line* ([`crate::lines`]): of all that wait for one
//! session, only one has a connection.
//!
//! sqlx's own pool sends a message to the server for each connection that is given back, and while the server
//! refuses it a connection, its waiters do not take those that come back. `deadpool` opens connections in its
//! `get` too, and fails when that fails. So this pool is ours. What a connection may be after its use is in [`lent`].

mod executor;
mod lent;
mod links;
mod server;

pub(crate) use lent::{Lent, Transaction};
pub(crate) use links::{Links, Use};
pub(crate) use server::{CONNECT, Server, in_time};

use crate::lines::{self, Lines};
use crate::space::{self, Scope};
use lent::After;
use server::ANSWERS;
use sqlx::{Connection, PgConnection};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::{debug, warn};

/// A connection that was used this recently is not asked whether it is alive. If it has died since, its next
/// statement fails like any statement whose connection breaks, and callers repeat it.
const TRUSTED_IDLE: Duration = Duration::from_secs(1);

/// A connection that was idle for this long is closed, so that other processes can have it.
const KEPT_IDLE: Duration = Duration::from_secs(10);

/// A connection that is older than this is closed after its use: the server's side of it grows with time.
const KEPT: Duration = Duration::from_secs(30 * 60);

/// Longest wait for a connection. Every message has a place, so only an unreachable server makes it wait.
const WAITS: Duration = Duration::from_secs(10);
const MESSAGE_WAITS: Duration = Duration::from_secs(5);

/// Shortest and longest pause after the server refused a connection. A pool that has none tries more often.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE_EMPTY: Duration = Duration::from_millis(500);

/// For this long after such a pause, the process counts as limited.
const REFUSED_LATELY: Duration = Duration::from_secs(10);

/// The pool, seen through one of its doors. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    door: Arc<Semaphore>,
    wait: Duration,
    /// Its statements read no row of a space, so a connection may see any.
    as_it_is: bool,
    /// Whose line they stand in.
    line: Option<Arc<str>>,
}

#[derive(Debug)]
struct Shared {
    server: Server,
    size: usize,
    /// A permit for each connection that may still be opened.
    places: Arc<Semaphore>,
    open: Arc<AtomicUsize>,
    /// A permit for each idle connection.
    idle: Semaphore,
    connections: Mutex<VecDeque<Idle>>,
    growth: Mutex<Growth>,
    /// Fires when an attempt to open a connection ended.
    attempted: Notify,
    doors: [Arc<Semaphore>; 2],
    lines: Lines,
}

/// An open connection with its place in the pool.
#[derive(Debug)]
struct Live {
    connection: PgConnection,
    /// What its setting says that it sees. `None`: it is not known.
    sees: Option<Scope>,
    since: Instant,
    _open: Open,
    _place: OwnedSemaphorePermit,
}

/// Counts an open connection.
#[derive(Debug)]
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug)]
struct Idle {
    live: Live,
    since: Instant,
}

/// When the pool may open connections.
#[derive(Debug)]
struct Growth {
    /// How often in a row the server refused one.
    refusals: u32,
    /// After a refusal: when one connection may be tried again.
    next: Instant,
}

impl Pool {
    /// Opens no connection. The pools are the doors of everything else and of messages.
    pub fn new(server: Server, size: usize) -> (Pool, Pool) {
        let size = size.max(1);
        let doors = [(); 2].map(|()| Arc::new(Semaphore::new((size - 1).max(1))));
        let shared = Arc::new(Shared {
            server,
            size,
            places: Arc::new(Semaphore::new(size)),
            open: Arc::default(),
            idle: Semaphore::new(0),
            connections: Mutex::default(),
            growth: Mutex::new(Growth { refusals: 0, next: Instant::now() }),
            attempted: Notify::new(),
            doors: doors.clone(),
            lines: Lines::default(),
        });
        let [general, messages] = doors;
        (
            Pool { shared: Arc::clone(&shared), door: general, wait: WAITS, as_it_is: false, line: None },
            Pool { shared, door: messages, wait: MESSAGE_WAITS, as_it_is: false, line: None },
        )
    }

    /// For statements that read and write tables of the installation only: they take any connection, and the server need
    /// not be told what it sees.
    pub fn of_installation(&self) -> Pool {
        Pool { as_it_is: true, ..self.clone() }
    }

    /// For statements and transactions that lock the row of this session, or of this conversation. They take a connection one
    /// after the other ([`crate::lines`]).
    pub fn in_line(&self, id: &str) -> Pool {
        Pool { line: Some(id.into()), ..self.clone() }
    }

    /// How many connections may go through this door at once.
    pub fn width(&self) -> usize {
        (self.shared.size - 1).max(1)
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::Acquire)
    }

    /// How many connections are open, if the server refused to give more a moment ago. Later it may give some: more
    /// work makes the pool ask again.
    pub fn limited_to(&self) -> Option<usize> {
        let growth = self.shared.growth();
        let limited = growth.refusals > 0 && growth.next + REFUSED_LATELY > Instant::now();
        limited.then(|| self.open())
    }

    /// Lends a connection that sees the space that the task works in.
    ///
    /// # Errors
    /// `PoolTimedOut` when all are in use for too long. Without any connection: why the server gives none.
    /// [`Held`](crate::lines::Held) when the first of its line takes too long.
    pub async fn acquire(&self) -> Result<Lent, sqlx::Error> {
        let front = match &self.line {
            Some(key) => Some(self.shared.lines.front(key, usize::MAX, lines::WAITS).await?),
            None => None,
        };
        let deadline = Instant::now() + self.wait;
        let entered = timeout_at(deadline, Arc::clone(&self.door).acquire_owned()).await;
        let door = entered.map_err(|_| sqlx::Error::PoolTimedOut)?.map_err(|_| sqlx::Error::PoolClosed)?;
        let scope = (!self.as_it_is).then(space::current);
        let live = self.shared.take(deadline, scope.as_ref()).await?;
        let mut lent = Lent::new(live, Arc::clone(&self.shared), door, front);
        if let Some(scope) = scope {
            lent.see(&scope).await?;
        }
        Ok(lent)
    }

    /// Begins a transaction. It is rolled back unless it is committed.
    pub async fn begin(&self) -> Result<Transaction, sqlx::Error> {
        Transaction::begin(self.acquire().await?).await
    }

    /// Begins a transaction that may rest between its statements, and wait for locks, for a minute: it reads a file, or asks
    /// another server. It may lock nothing that a step, a message or an act upon a session waits for.
    pub async fn begin_long(&self) -> Result<Transaction, sqlx::Error> {
        let mut tx = self.begin().await?;
        let patience =
            "set local idle_in_transaction_session_timeout = '60s'; set local lock_timeout = '60s'";
        sqlx::raw_sql(patience).execute(&mut *tx).await?;
        Ok(tx)
    }

    /// Begins a transaction for a list. Each statement in it is planned for the values that it has: the plan that a connection
    /// keeps for all values walks through every row, in the order of the list, to find a rare one.
    pub async fn planned(&self) -> Result<Transaction, sqlx::Error> {
        let mut tx = self.begin().await?;
        sqlx::raw_sql("set local plan_cache_mode = force_custom_plan").execute(&mut *tx).await?;
        Ok(tx)
    }

    /// Closes all connections, and waits for those that are in use.
    pub async fn close(&self) {
        for door in &self.shared.doors {
            door.close();
        }
        let idle = {
            // `put` asks under the same lock, so no connection comes after this.
            let mut connections = self.shared.connections();
            self.shared.idle.close();
            std::mem::take(&mut *connections)
        };
        for one in idle {
            one.live.close().await;
        }
        // An error means that another caller has closed it.
        if let Ok(all) = self.shared.places.acquire_many(self.shared.size as u32).await {
            all.forget();
            self.shared.places.close();
        }
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn growth(&self) -> MutexGuard<'_, Growth> {
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn take(self: &Arc<Shared>, deadline: Instant, scope: Option<&Scope>) -> Result<Live, sqlx::Error> {
        let (mut opening, mut refusal) = (None, None);
        loop {
            let attempted = self.attempted.notified();
            let next = self.growth().next_attempt();
            tokio::select! {
                biased;
                idle = self.idle.acquire() => {
                    idle.map_err(|_| sqlx::Error::PoolClosed)?.forget();
                    let idle = self.pop(scope);
                    self.open_second(idle.as_ref(), scope);
                    if let Some(live) = self.checked(idle).await {
                        return Ok(live);
                    }
                }
                // An error here means that the opened connection is idle now, or that its task ended.
                failed = async { opening.as_mut().expect("the branch has a condition").await }, if opening.is_some() => {
                    opening = None;
                    if let Ok(error) = failed {
                        if self.open.load(Ordering::Acquire) == 0 && !is_refusal(&error) {
                            return Err(error);
                        }
                        refusal = Some(error);
                    }
                }
                place = Arc::clone(&self.places).acquire_owned(), if opening.is_none() && next.is_none() => {
                    opening = Some(self.open_one(place.map_err(|_| sqlx::Error::PoolClosed)?, scope));
                }
                () = sleep_until(next.unwrap_or(deadline)), if opening.is_none() && next.is_some() => {}
                () = attempted => {}
                () = sleep_until(deadline) => {
                    let refusal = refusal.filter(|_| self.open.load(Ordering::Acquire) == 0);
                    return Err(refusal.unwrap_or(sqlx::Error::PoolTimedOut));
                }
            }
        }
    }

    /// Opens a connection for the statement that takes it first. Returns where its failure is reported.
    fn open_one(
        self: &Arc<Shared>,
        place: OwnedSemaphorePermit,
        scope: Option<&Scope>,
    ) -> oneshot::Receiver<sqlx::Error> {
        let (failed, report) = oneshot::channel();
        // While the server refuses, there is one attempt at a time.
        self.growth().next = Instant::now() + server::CONNECT;
        let shared = Arc::clone(self);
        let scope = scope.cloned().unwrap_or(Scope::All);
        tokio::spawn(async move {
            match shared.server.connect(&[(space::SETTING, scope.setting())]).await {
                Ok(connection) => {
                    shared.growth().refusals = 0;
                    shared.server.links.back(Use::Statements);
                    shared.open.fetch_add(1, Ordering::AcqRel);
                    let open = Open(Arc::clone(&shared.open));
                    shared.put(Live {
                        connection,
                        sees: Some(scope),
                        since: Instant::now(),
                        _open: open,
                        _place: place,
                    });
                }
                Err(error) => {
                    let open = shared.open.load(Ordering::Acquire);
                    let refusals = shared.growth().refuse(open);
                    if open == 0 {
                        shared.server.links.lost(Use::Statements);
                    }
                    if refusals == 1 && open > 0 && is_refusal(&error) {
                        warn!(%error, open, "The server gives no more connections; this process goes on with fewer");
                    } else {
                        debug!(%error, open, refusals, "No connection could be opened");
                    }
                    drop(place);
                    // An error means that an idle connection came first.
                    let _ = failed.send(error);
                }
            }
            shared.attempted.notify_waiters();
        });
        report
    }

    /// Opens a second connection when the only one is about to change what it sees. Otherwise a process that works for all
    /// spaces and answers requests of one would tell the server before each statement.
    fn open_second(self: &Arc<Shared>, idle: Option<&Idle>, scope: Option<&Scope>) {
        let seen = idle.and_then(|idle| idle.live.sees.as_ref());
        let only = self.places.available_permits() + 1 == self.size;
        if only
            && scope.is_some()
            && seen.is_some()
            && seen != scope
            && self.growth().next_attempt().is_none()
            && let Ok(place) = Arc::clone(&self.places).try_acquire_owned()
        {
            drop(self.open_one(place, seen));
        }
    }

    /// Takes the connection that was used last of those that see `scope`, or of all: so a process that works for all
    /// spaces and answers requests of one tells the server seldom.
    fn pop(&self, scope: Option<&Scope>) -> Option<Idle> {
        let mut connections = self.connections();
        match connections.iter().rposition(|idle| scope.is_some() && idle.live.sees.as_ref() == scope) {
            Some(at) => connections.remove(at),
            None => connections.pop_back(),
        }
    }

    /// Returns the connection if it can be used.
    async fn checked(&self, idle: Option<Idle>) -> Option<Live> {
        let Idle { mut live, since } = idle?;
        let idle_for = since.elapsed();
        let answer = if self.server.breaks.since(idle_for) {
            timeout(ANSWERS, live.writes()).await
        } else if idle_for > TRUSTED_IDLE {
            timeout(ANSWERS, live.connection.ping()).await
        } else {
            return Some(live);
        };
        matches!(answer, Ok(Ok(()))).then_some(live)
    }

    /// Takes a connection back that is ready for the next statement.
    fn put(self: &Arc<Shared>, live: Live) {
        let now = Instant::now();
        {
            let mut connections = self.connections();
            if self.idle.is_closed() || live.since.elapsed() > KEPT {
                tokio::spawn(live.close());
                return;
            }
            connections.push_back(Idle { live, since: now });
        }
        self.idle.add_permits(1);
        if let Some(oldest) = self.take_old(now) {
            tokio::spawn(oldest.live.close());
        }
    }

    /// Takes the connection that was idle for longest, if that is too long.
    fn take_old(&self, now: Instant) -> Option<Idle> {
        let is_old = |idle: &Idle| now - idle.since > KEPT_IDLE;
        if !self.connections().front().is_some_and(is_old) {
            return None;
        }
        let permit = self.idle.try_acquire().ok()?;
        let mut connections = self.connections();
        let oldest = connections.pop_front_if(|idle| is_old(idle))?;
        permit.forget();
        Some(oldest)
    }

    /// Takes a connection back after its use.
    fn give_back(self: &Arc<Shared>, mut live: Live, after: After, door: OwnedSemaphorePermit) {
        match after {
            After::Ready => self.put(live),
            After::Unusable => drop(live),
            After::Unknown => {
                // Without a runtime the connection is closed, which ends its transaction too.
                let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
                let shared = Arc::clone(self);
                runtime.spawn(async move {
                    if matches!(timeout(ANSWERS, live.recover()).await, Ok(Ok(()))) {
                        shared.put(live);
                    }
                    drop(door);
                });
            }
        }
    }
}

impl Live {
    /// Rolls an open transaction back, and reads what the server still has to say.
    async fn recover(&mut self) -> Result<(), sqlx::Error> {
        if lent::roll_back(&mut self.connection) { self.writes().await } else { self.connection.ping().await }
    }

    /// Asks whether the server writes. After a failover, one that only reads is the wrong host.
    async fn writes(&mut self) -> Result<(), sqlx::Error> {
        let divided = "select 1 / (not current_setting('transaction_read_only')::boolean)::integer";
        sqlx::raw_sql(divided).execute(&mut self.connection).await.map(|_| ())
    }

    async fn close(self) {
        // It is closed on both sides, whatever the answer is.
        let _ = timeout(ANSWERS, self.connection.close()).await;
    }
}

impl Growth {
    /// When the next connection may be tried. `None`: now.
    fn next_attempt(&self) -> Option<Instant> {
        (self.refusals > 0 && self.next > Instant::now()).then_some(self.next)
    }

    /// Notes that none could be opened. Returns how often in a row.
    fn refuse(&mut self, open: usize) -> u32 {
        self.refusals = self.refusals.saturating_add(1);
        let longest = if open == 0 { LONGEST_PAUSE_EMPTY } else { LONGEST_PAUSE };
        let pause = FIRST_PAUSE.saturating_mul(1 << self.refusals.min(16)).min(longest);
        self.next = Instant::now() + crate::queue::jittered(pause);
        self.refusals
    }
}

/// Returns whether the server may give a connection later: it has none left, it starts, or it is restarted.
fn is_refusal(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
        sqlx::Error::Database(error) => {
            error.code().is_some_and(|code| ["53300", "57P03"].contains(&code.as_ref()))
        }
        _ => false,
    }
}
