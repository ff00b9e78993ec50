//! What Wakeful remembers: every line of SQL, every transaction, and the job queue.
//!
//! | to | read |
//! |---|---|
//! | start or wake a session, or restart a conversation | [`wake`], [`create`], [`run`] |
//! | recognise a known mail, and accept a new one | [`mail`] |
//! | make one go on, whatever its rows look like | [`heal`] |
//! | close a question that nobody answered | [`expire`] |
//! | say what became of an uncertain effect | [`resolve`] |
//! | read the recording for a replay, and find an unfinished replay | [`replay`] |
//! | archive or terminate a session | [`retire`] |
//! | make a session that begins with the messages of another one | [`fork`], [`tree`] |
//! | rebuild one from the database, or read some of its messages | [`hydrate`], [`record`] |
//! | commit what a step did | [`step`] |
//! | read what a context points at | [`context`] |
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
pub mod context;
pub mod create;
pub mod delivery;
pub mod diagnosis;
pub mod error;
pub mod event;
pub mod expire;
pub mod export;
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
pub mod queue;
pub mod readiness;
pub mod record;
pub mod replay;
pub mod resend;
pub mod resolve;
pub mod retire;
pub mod run;
pub mod schedule;
pub mod schema;
pub mod session;
pub mod side;
pub mod standing;
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
use std::time::Duration;

/// A connection that was alive so recently is not asked again.
const TRUSTED_IDLE: Duration = Duration::from_secs(1);

/// Messages are let in as many at a time as there are connections for them, so none waits for another one's: only for a
/// server that may be away.
const INTAKE_CONNECT: Duration = Duration::from_secs(5);

/// The database, as every part of Wakeful holds it. Cloning shares the pools.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) pool: PgPool,
    /// Connections with asynchronous commit: for generations and their chunks, and nothing else.
    pub(crate) streams: PgPool,
    /// Connections for what comes in. Whoever reads cannot keep a message out, and messages cannot keep readers and
    /// workers from theirs.
    pub(crate) intake: PgPool,
    /// How to make a connection of one's own: heartbeat and LISTEN must never wait for the pool.
    pub(crate) options: PgConnectOptions,
    pub(crate) refusal: readiness::Refusal,
}

impl Store {
    /// Connects to `url` with at most `max_connections` in the pool.
    ///
    /// # Errors
    /// [`Error::Database`] when the URL is malformed or the server does not answer within ten seconds.
    pub async fn connect(url: &str, max_connections: u32, application: &str) -> Result<Store> {
        let options = PgConnectOptions::from_str(url)?
            .application_name(application)
            // A statement of ours takes milliseconds; one that hangs must not hold its locks for ever.
            .options([("statement_timeout", "60s"), ("idle_in_transaction_session_timeout", "60s")]);
        let pool = match pool_options(max_connections).connect_with(options.clone()).await {
            // The pool knows that it waited, and not for what: one more try of a single connection says it.
            Err(sqlx::Error::PoolTimedOut) => {
                options.connect().await?;
                return Err(sqlx::Error::PoolTimedOut.into());
            }
            pool => pool?,
        };
        let streams = pool_options((max_connections / 4).max(2))
            .connect_lazy_with(options.clone().options([("synchronous_commit", "off")]));
        let intake = pool_options(intake_connections(max_connections))
            .acquire_timeout(INTAKE_CONNECT)
            .connect_lazy_with(options.clone());
        Ok(Store { pool, streams, intake, options, refusal: readiness::Refusal::default() })
    }

    /// How many messages may be written at once.
    pub fn intake_connections(&self) -> u32 {
        self.intake.options().get_max_connections()
    }

    /// Ends the pools' connections.
    pub async fn close(&self) {
        self.streams.close().await;
        self.intake.close().await;
        self.pool.close().await;
    }
}

/// A message takes a handful of short statements: a quarter of what the workers and readers have is plenty.
fn intake_connections(max_connections: u32) -> u32 {
    (max_connections / 4).max(2)
}

/// sqlx would ask before every use whether the connection is alive: one round trip more for each statement. A
/// connection that was in use a moment ago (sqlx looks when it comes back) is taken as it is. If it died since, its
/// statement fails as it would have failed in the middle, and callers repeat what is transient.
fn pool_options(max_connections: u32) -> PgPoolOptions {
    PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(Duration::from_secs(10))
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for > TRUSTED_IDLE {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
}

/// A new id: `prefix_` and a time-ordered UUID in hex.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}_{}", uuid::Uuid::now_v7().simple())
}
