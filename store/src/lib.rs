//! What Wakeful remembers: every line of SQL, every transaction, and the job queue.
//!
//! | to | read |
//! |---|---|
//! | start or wake a session, or begin anew | [`wake`], [`create`], [`run`] |
//! | know a mail again, and take it | [`mail`] |
//! | make one go on, whatever its rows look like | [`heal`] |
//! | say what became of an uncertain effect | [`resolve`] |
//! | read what a replay runs again, and find one that was begun | [`replay`] |
//! | archive or terminate one | [`retire`] |
//! | make a session that begins with the messages of another one | [`fork`], [`tree`] |
//! | rebuild one from the database, or read some of its messages | [`hydrate`], [`record`] |
//! | commit what a step did | [`step`] |
//! | recover a session from a journal, wherever it is kept | [`journal`] |
//! | hold the caches against the logs | [`verify`] |
//! | run a tool at most once | [`ledger`] |
//! | show a model call as it streams | [`generation`] |
//! | send what a step enqueued | [`delivery`] |
//! | hand out work | [`queue`] |
//! | know whether it takes writes | [`readiness`] |
//! | show sessions to people | [`session`], [`chain`], [`event`], [`standing`] |
//! | lay two of them side by side | [`side`] |
//! | carry a session to another database | [`export`], [`import`] |
//! | find out what is wrong with the whole | [`diagnosis`] |
//!
//! Locks are taken in one order everywhere: conversation, session, job. A statement sees one snapshot, and after
//! waiting for a row Postgres re-checks only that row's own columns: so only predicates on the row being updated
//! decide a race.

pub mod chain;
pub mod context;
pub mod create;
pub mod delivery;
pub mod diagnosis;
pub mod error;
pub mod event;
pub mod export;
pub mod failpoint;
pub mod fork;
pub mod generation;
pub mod heal;
pub mod hydrate;
pub mod import;
pub mod journal;
pub mod ledger;
pub mod mail;
pub mod queue;
pub mod readiness;
pub mod record;
pub mod replay;
pub mod resolve;
pub mod retire;
pub mod run;
pub mod schema;
pub mod session;
pub mod side;
pub mod standing;
pub mod step;
pub mod tree;
pub mod verify;
pub mod wake;

pub use error::{Error, Outage, Result};
pub use schema::create_database;

use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use std::str::FromStr;
use std::time::Duration;

/// A connection that was alive so recently is not asked again.
const TRUSTED_IDLE: Duration = Duration::from_secs(1);

/// The database, as every part of Wakeful holds it. Cloning shares the pools.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) pool: PgPool,
    /// Connections with asynchronous commit: for generations and their chunks, and nothing else.
    pub(crate) streams: PgPool,
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
        Ok(Store { pool, streams, options, refusal: readiness::Refusal::default() })
    }

    /// Ends the pools' connections.
    pub async fn close(&self) {
        self.streams.close().await;
        self.pool.close().await;
    }
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
