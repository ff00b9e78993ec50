//! Where the server is, and how every connection to it is opened.

use super::Links;
use crate::{socket, space};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a connection may take to answer before it counts as dead.
pub(crate) const ANSWERS: Duration = Duration::from_secs(2);

/// How long a statement may take, its answer included. The server ends a statement after a minute. If no answer has come by then, the
/// server's host has vanished behind something that still acknowledges our packets.
pub(crate) const STATEMENT: Duration = Duration::from_secs(65);

/// Longest wait for a new connection.
pub(crate) const CONNECT: Duration = Duration::from_secs(5);

/// How long a statement waits for a lock.
const LOCK_WAITS: &str = "5s";

/// Settings of every connection.
const SETTINGS: [(&str, &str); 8] = [
    // Our statements take milliseconds. One that hangs must not hold its locks.
    ("statement_timeout", "60s"),
    // A process that is stopped in the middle of a transaction (SIGSTOP, a paused host) keeps its locks until the server ends the
    // transaction. Ours go from one statement to the next at once; those that may rest say so ([`super::Pool::begin_long`]).
    ("idle_in_transaction_session_timeout", "3s"),
    // Longer than that, so that those who wait behind a stopped process get the lock. Behind anything else they give up, and try
    // again later: a connection that waits serves no other session.
    ("lock_timeout", LOCK_WAITS),
    // A connection keeps the plan of its first statements. Made while a table is empty, it would read the
    // whole table when that is full: 20,000 ready jobs for each claim. Every frequent statement has an
    // index. Without `jit` the penalty for a sequential scan would start the compiler.
    ("enable_seqscan", "off"),
    // A bitmap has no order. A claim that expects few ready jobs would collect all of them, and sort them to take one.
    ("enable_bitmapscan", "off"),
    ("jit", "off"),
    // Connections with a task of their own work for all spaces. Those of the pool say what they see when they are lent.
    (space::SETTING, space::ALL),
    // The statements' fences rely on it: a row that was waited for is read again. A role or a database may have another default.
    ("default_transaction_isolation", "read committed"),
];

/// Without it the server goes on with a statement whose client went away, while the process opens the next connection: slow
/// statements whose callers give up would take more connections than a process may have. Other systems refuse the setting.
const CLIENT_CHECKS: &str = "set_config('client_connection_check_interval', \
    case when version() like '%linux%' then '1s' else '0' end, false)";

/// The database, as every connection of the process is opened. Clones share [`Breaks`] and [`Links`].
#[derive(Clone, Debug)]
pub(crate) struct Server {
    options: Arc<PgConnectOptions>,
    pub breaks: Breaks,
    pub links: Links,
}

impl Server {
    /// # Errors
    /// A malformed URL.
    pub fn new(url: &str, application: &str) -> Result<Server, sqlx::Error> {
        let options = PgConnectOptions::from_str(url)?
            .application_name(application)
            // A pooler such as PgBouncer refuses start-up parameters that it does not know.
            .extra_float_digits(None);
        Ok(Server { options: Arc::new(options), breaks: Breaks::default(), links: Links::default() })
    }

    /// Opens a connection with `more` settings.
    pub async fn connect(&self, more: &[(&str, &str)]) -> Result<PgConnection, sqlx::Error> {
        let connected = tokio::time::timeout(CONNECT, async {
            let mut connection = self.options.connect().await?;
            self.set_up(&mut connection, more).await?;
            Ok(connection)
        });
        connected.await.unwrap_or_else(|_| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())))
    }

    /// For a listener of sqlx, which opens its connection itself. Call [`Server::set_up`] on that.
    pub fn options(&self) -> &PgConnectOptions {
        &self.options
    }

    /// Sets what a connection needs, after it was opened: a pooler refuses most settings before that.
    pub async fn set_up(
        &self,
        connection: &mut PgConnection,
        more: &[(&str, &str)],
    ) -> Result<(), sqlx::Error> {
        socket::limit_silence(&self.options);
        let settings: Vec<String> = SETTINGS
            .iter()
            .chain(&socket::SERVER_SETTINGS)
            .chain(more)
            .map(|(name, value)| format!("set_config('{name}', '{}', false)", value.replace('\'', "''")))
            .collect();
        let set = format!("select {}, {CLIENT_CHECKS}", settings.join(", "));
        sqlx::raw_sql(AssertSqlSafe(set)).execute(connection).await.map(|_| ())
    }
}

/// Waits for a statement's answer.
///
/// # Errors
/// The statement's, or `TimedOut` if none came within [`STATEMENT`]: then the connection is of no use.
pub(crate) async fn in_time<T>(
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let answer = tokio::time::timeout(STATEMENT, statement).await;
    answer.unwrap_or_else(|_| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())))
}

/// When a connection last broke. Often the others broke with it. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Breaks(Arc<Mutex<Option<Instant>>>);

impl Breaks {
    pub fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Returns whether a connection broke within the last `time`.
    pub fn since(&self, time: Duration) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| at.elapsed() <= time)
    }
}
