//! What Wakeful remembers: every line of SQL, every transaction, and the job queue.
//!
//! | to | read |
//! |---|---|
//! | start or wake a session, or restart a conversation | [`wake`], [`create`], [`run`] |
//! | recognise a known mail, and accept a new one | [`mail`] |
//! | make a session continue, whatever its rows look like | [`heal`] |
//! | close a question that nobody answered | [`question`] |
//! | record how an uncertain effect ended | [`resolve`] |
//! | read the recording for a replay, and find an unfinished replay | [`replay`] |
//! | archive or terminate a session | [`retire`] |
//! | make a session that begins with the messages of another one | [`fork`], [`tree`] |
//! | rebuild a session from the database | [`hydrate`] |
//! | commit what a step did | [`step`] |
//! | read a tool's output, or a file that came with a message | [`outputs`] |
//! | recover a session from a journal, wherever it is kept | [`journal`] |
//! | check the caches against the logs | [`verify`] |
//! | import a chat from before sessions existed | [`legacy`] |
//! | run a tool at most once | [`ledger`] |
//! | show a model call as it streams | [`generation`] |
//! | send what a step enqueued; send it again; show it | [`delivery`], [`resend`], [`outbox`] |
//! | note what was sent and did not arrive, and tell the agent | [`bounce`] |
//! | see what a conversation did so far | [`history`] |
//! | hand out work | [`queue`] |
//! | make a database, bring it up to date, and know whether it takes writes | [`schema`], [`readiness`] |
//! | show sessions to people | [`session`], [`chain`], [`event`], [`standing`] |
//! | compare two sessions | [`side`] |
//! | carry a session to another database | [`export`], [`import`] |
//! | define, fire and show schedules | [`schedule`] |
//! | detect a webhook token that was used before | [`webhook`] |
//! | diagnose the whole system | [`diagnosis`] |
//!
//! All code takes locks in one order: schedule, conversation, session, job. A statement sees one snapshot.
//! After waiting for a row, Postgres re-checks only that row's own columns. So only predicates on the row
//! being updated decide a race.

pub mod bounce;
pub mod chain;
pub mod create;
pub mod delivery;
pub mod diagnosis;
pub mod error;
pub mod event;
pub mod export;
#[doc(hidden)]
pub mod failpoint;
pub mod fork;
pub mod generation;
pub mod heal;
pub mod history;
pub mod hydrate;
pub mod import;
pub mod journal;
pub mod ledger;
pub mod legacy;
pub mod mail;
pub mod outbox;
pub mod outputs;
pub mod question;
pub mod queue;
pub mod readiness;
pub mod replay;
pub mod resend;
pub mod resolve;
pub mod retire;
pub mod run;
pub mod schedule;
pub mod schema;
pub mod session;
pub mod side;
mod socket;
pub mod standing;
pub mod steer;
pub mod step;
pub mod tree;
pub mod verify;
pub mod wake;
pub mod webhook;

pub use error::{Error, Outage, Result};
pub use schema::create_database;

use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A connection that was used this recently is not pinged before use.
const TRUSTED_IDLE: Duration = Duration::from_secs(1);

/// How long a connection may take to answer before it counts as dead.
const ANSWERS: Duration = Duration::from_secs(2);

/// Longest wait for an intake connection. There is one for each message that may be written at a time, so only an
/// unreachable server makes a message wait.
const INTAKE_CONNECT: Duration = Duration::from_secs(5);

/// The database as every part of Wakeful uses it. Clones share the pools.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) pool: PgPool,
    /// Connections with asynchronous commit, only for generations and their chunks.
    pub(crate) streams: PgPool,
    /// Connections for incoming messages, so that readers and workers cannot keep a message out, and messages cannot
    /// take the connections of readers and workers.
    pub(crate) intake: PgPool,
    /// Options for a separate connection: heartbeat and LISTEN must never wait for the pool.
    pub(crate) options: PgConnectOptions,
    pub(crate) refusal: readiness::Refusal,
    pub(crate) committer: step::committer::Committer,
    pub(crate) breaks: Breaks,
}

impl Store {
    /// Connects to `url` with at most `max_connections` in the pool.
    ///
    /// # Errors
    /// [`Error::Database`] when the URL is malformed or the server does not answer within ten seconds.
    pub async fn connect(url: &str, max_connections: u32, application: &str) -> Result<Store> {
        let options = PgConnectOptions::from_str(url)?
            .application_name(application)
            // Our statements take milliseconds. One that hangs must not hold its locks.
            .options([("statement_timeout", "60s"), ("idle_in_transaction_session_timeout", "60s")])
            // A connection keeps the plan of its first statements. Made while a table is empty, it would read the
            // whole table when that is full: 20,000 ready jobs for each claim. Every frequent statement has an
            // index. Without `jit` the penalty for a sequential scan would start the compiler.
            .options([("enable_seqscan", "off"), ("jit", "off")])
            .options(socket::SERVER_SETTINGS);
        let breaks = Breaks::default();
        let pool = match pool_options(max_connections, &options, &breaks).connect_with(options.clone()).await
        {
            // A pool only reports that it waited. Connect once without it to get the reason.
            Err(sqlx::Error::PoolTimedOut) => {
                options.connect().await?;
                return Err(sqlx::Error::PoolTimedOut.into());
            }
            pool => pool?,
        };
        let streams = pool_options((max_connections / 4).max(2), &options, &breaks)
            .connect_lazy_with(options.clone().options([("synchronous_commit", "off")]));
        let intake = pool_options(intake_connections(max_connections), &options, &breaks)
            .acquire_timeout(INTAKE_CONNECT)
            .connect_lazy_with(options.clone());
        let committer = step::committer::Committer::new(options.clone(), breaks.clone());
        Ok(Store {
            pool,
            streams,
            intake,
            options,
            refusal: readiness::Refusal::default(),
            committer,
            breaks,
        })
    }

    /// How many messages may be written at once.
    pub fn intake_connections(&self) -> u32 {
        self.intake.options().get_max_connections()
    }

    /// Ends the pools' connections.
    pub async fn close(&self) {
        self.committer.close().await;
        self.streams.close().await;
        self.intake.close().await;
        self.pool.close().await;
    }
}

/// When a connection last broke. Often the others broke with it. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Breaks(Arc<Mutex<Option<Instant>>>);

impl Breaks {
    pub(crate) fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Returns whether a connection broke within the last `time`.
    fn since(&self, time: Duration) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| at.elapsed() <= time)
    }
}

/// A message needs only a few short statements, so a quarter of the other connections is enough.
fn intake_connections(max_connections: u32) -> u32 {
    (max_connections / 4).max(2)
}

/// sqlx would ping a connection before every use, one more round trip for each statement. Here a connection
/// that was used a moment ago is trusted (sqlx checks it when it comes back). If the connection has died
/// since, its next statement fails like any statement whose connection breaks, and callers repeat it. After
/// another connection broke, no connection of before is trusted.
fn pool_options(max_connections: u32, options: &PgConnectOptions, breaks: &Breaks) -> PgPoolOptions {
    let (options, breaks) = (options.clone(), breaks.clone());
    PgPoolOptions::new()
        .after_connect(move |_, _| {
            socket::limit_silence(&options);
            Box::pin(async { Ok(()) })
        })
        .max_connections(max_connections)
        .acquire_timeout(Duration::from_secs(10))
        .test_before_acquire(false)
        .before_acquire(move |connection, meta| {
            let trusted = meta.idle_for <= TRUSTED_IDLE && !breaks.since(meta.idle_for);
            Box::pin(async move {
                if !trusted {
                    match tokio::time::timeout(ANSWERS, connection.ping()).await {
                        Ok(answered) => answered?,
                        // The pool drops it and takes another one.
                        Err(_) => return Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())),
                    }
                }
                Ok(true)
            })
        })
}

/// A new id: `prefix_` and a time-ordered UUID in hex.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}_{}", uuid::Uuid::now_v7().simple())
}
