//! What Wakeful remembers: every line of SQL, every transaction, and the job queue.
//!
//! | to | read |
//! |---|---|
//! | start or wake a session, or restart a conversation | [`wake`], [`create`], [`run`] |
//! | recognise a known mail, and accept a new one | [`mail`] |
//! | make a session continue, whatever its rows look like | [`heal`] |
//! | close a question that nobody answered | [`question`] |
//! | record how an uncertain effect ended; list those of all sessions | [`resolve`], [`effect`] |
//! | read the recording for a replay, and find an unfinished replay | [`replay`] |
//! | archive or terminate a session | [`retire`] |
//! | erase what a conversation or a person left; hold it | [`erase`] |
//! | make a session that begins with the messages of another one | [`fork`], [`tree`] |
//! | rebuild a session from the database | [`hydrate`] |
//! | commit what a step did | [`step`] |
//! | store and find the files of a session; where their packs are | [`workspace`], [`blob_store`] |
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
//! | bring tasks of Absurd over, give them back, compare them | [`absurd`] |
//! | define, fire and show schedules | [`schedule`] |
//! | find sessions by what was said in them | [`search`] |
//! | see failed runs in groups | [`failure`] |
//! | retry, cancel, archive or wake many sessions, or resolve many effects | [`batch`] |
//! | tell people what needs them, and let them act by a link | [`notify`] |
//! | say who did what | [`audit`] |
//! | make, find and revoke tokens; sign those of users | [`token`] |
//! | keep the spaces apart | [`space`] |
//! | encrypt what people and models wrote | [`encryption`] |
//! | detect a webhook token that was used before | [`webhook`] |
//! | say what an upgrade would stop | [`preflight`] |
//! | measure this process's use of the database | [`metrics`] |
//! | diagnose the whole system; which rights the role lacks | [`diagnosis`], [`rights`] |
//!
//! All code takes locks in one order: schedule, conversation, session, job. A statement sees one snapshot.
//! After waiting for a row, Postgres re-checks only that row's own columns. So only predicates on the row
//! being updated decide a race.

pub mod absurd;
pub mod audit;
pub mod batch;
pub mod blob_store;
pub mod bounce;
pub mod chain;
pub mod create;
pub mod delivery;
pub mod diagnosis;
pub mod effect;
pub mod encryption;
pub mod erase;
pub mod error;
pub mod event;
pub mod export;
#[doc(hidden)]
pub mod failpoint;
pub mod failure;
pub mod fork;
pub mod gate;
pub mod generation;
pub mod heal;
pub mod history;
pub mod hydrate;
pub mod idempotency;
pub mod import;
pub mod journal;
mod json;
pub mod ledger;
pub mod legacy;
pub mod lines;
pub mod mail;
pub mod metrics;
pub mod notify;
pub mod outbox;
pub mod outputs;
pub mod overview;
pub mod page;
pub mod pause;
mod pool;
pub mod preflight;
pub mod question;
pub mod queue;
pub mod readiness;
pub mod replay;
pub mod resend;
pub mod resolve;
pub mod retire;
pub mod rights;
pub mod run;
pub mod schedule;
pub mod schema;
mod sealed_blob;
pub mod search;
pub mod session;
pub mod side;
mod socket;
pub mod space;
pub mod standing;
pub mod steer;
pub mod step;
pub mod token;
pub mod told;
pub mod tree;
pub mod verify;
pub mod wake;
pub mod webhook;
pub mod workspace;

pub use error::{Error, Outage, Result};
pub use schema::create_database;

use pool::{Pool, Server};
use std::sync::Arc;

/// How many connections a process that works opens in addition to those for its statements: two for commits, and
/// one each for LISTEN, the heartbeat and the liveness lock.
pub const OWN_CONNECTIONS: u32 = 5;

/// The database as every part of Wakeful uses it. Clones share the pool.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) pool: Pool,
    /// The same connections, for incoming messages: readers and workers cannot keep a message out, and messages
    /// cannot take the connections of readers and workers.
    pub(crate) intake: Pool,
    pub(crate) server: Server,
    pub(crate) refusal: readiness::Refusal,
    pub(crate) committer: step::committer::Committer,
    pub(crate) user_key: Arc<token::Key>,
    pub(crate) lookups: Arc<token::Lookups>,
    pub(crate) refusals: Arc<audit::Refusals>,
    pub(crate) vault: encryption::Vault,
    pub(crate) blob_stores: Arc<blob_store::BlobStores>,
    pub(crate) metrics: Arc<metrics::Metrics>,
}

impl Store {
    /// Connects to `url`, with at most `connections` for statements. A process that works opens
    /// [`OWN_CONNECTIONS`] more. All are opened when they are needed.
    ///
    /// # Errors
    /// [`Error::Database`] when the URL is malformed or the server gives no connection within ten seconds.
    pub async fn connect(url: &str, connections: u32, application: &str) -> Result<Store> {
        let server = Server::new(url, application)?;
        let (pool, intake) = Pool::new(server.clone(), connections as usize);
        drop(pool.acquire().await?);
        let metrics = Arc::<metrics::Metrics>::default();
        let committer = step::committer::Committer::new(server.clone(), Arc::clone(&metrics));
        let lookups = Arc::new(token::Lookups::new(pool.width()));
        Ok(Store {
            pool,
            intake,
            server,
            refusal: readiness::Refusal::default(),
            committer,
            user_key: Arc::default(),
            lookups,
            refusals: Arc::default(),
            vault: encryption::Vault::default(),
            blob_stores: Arc::default(),
            metrics,
        })
    }

    /// How many messages may be written at once.
    pub fn intake_connections(&self) -> usize {
        self.intake.width()
    }

    /// Opens the first connection for commits now. A process that works calls this before it takes jobs.
    pub fn open_for_commits(&self) {
        self.committer.start();
    }

    /// Closes the connections.
    pub async fn close(&self) {
        self.committer.close().await;
        self.pool.close().await;
    }
}

/// A new id: `prefix_` and a time-ordered UUID in hex.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}_{}", uuid::Uuid::now_v7().simple())
}
