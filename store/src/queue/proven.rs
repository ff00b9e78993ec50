//! A connection that listens, and that proves every few seconds that it still does.
//!
//! A host that vanishes sends nothing, so a connection to it looks idle for hours. A pooler in transaction
//! mode accepts LISTEN and then gives the session to another client. In both cases a notification that the
//! process sends to itself does not arrive.

use crate::pool::CONNECT;
use crate::{Store, new_id};
use sqlx::Acquire;
use sqlx::postgres::{PgListener, PgNotification, PgPoolOptions};
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// How often the connection proves itself.
const EVERY: Duration = Duration::from_secs(2);

/// How long a proof may take.
const WITHIN: Duration = Duration::from_secs(3);

/// How long a statement by the pool may take here. The pool may be full, and waits ten seconds for a connection.
const BY_THE_POOL: Duration = Duration::from_secs(15);

/// Why a connection is useless.
#[derive(Debug)]
pub(super) enum Lost {
    /// It is up, but a pooler in transaction mode gives its session to other clients between statements.
    Session,
    Connection(sqlx::Error),
}

impl From<sqlx::Error> for Lost {
    fn from(error: sqlx::Error) -> Lost {
        Lost::Connection(error)
    }
}

/// A listener on a connection of its own.
pub(super) struct ProvenListener {
    listener: PgListener,
    /// The channel of its notifications to itself.
    echo: String,
    /// Whether a notification to itself is on its way.
    awaits_echo: bool,
    /// When the next proof begins, or until when the answer to the present one must come.
    due: Instant,
}

impl ProvenListener {
    /// Connects and listens to `channels`.
    pub(super) async fn connect(store: &Store, channels: &[&str]) -> Result<ProvenListener, Lost> {
        // Readers wait for this connection, so it must notice within seconds that the server is back. The
        // pool waits up to a fifth of this time between its attempts to connect.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(Duration::from_secs(5))
            .connect_with(store.server.options().clone())
            .await?;
        let mut listener = PgListener::connect_with(&pool).await?;
        // A new connection has none of the old one's locks.
        listener.eager_reconnect(false);
        let echo = new_id("wakeful_echo");
        let set_up = async {
            store.server.set_up(listener.acquire().await?, &[]).await?;
            listener.listen_all(channels.iter().copied().chain([echo.as_str()])).await
        };
        answered(set_up).await?;
        Ok(ProvenListener { listener, echo, awaits_echo: false, due: Instant::now() + EVERY })
    }

    /// Proves that the server keeps a session for this connection: a notification that another connection
    /// sends arrives here. Call it before the first [`ProvenListener::recv`].
    pub(super) async fn prove_session(&mut self, store: &Store) -> Result<(), Lost> {
        let sent = sqlx::query!("select pg_notify($1, '') as sent", self.echo).fetch_one(&store.pool);
        timeout(BY_THE_POOL, sent).await.map_err(|_| Lost::Connection(vanished()))??;
        match timeout(WITHIN, self.listener.try_recv()).await {
            Ok(Ok(Some(_))) => Ok(()),
            Ok(Ok(None)) => Err(Lost::Connection(reset())),
            Ok(Err(error)) => Err(Lost::Connection(error)),
            Err(_) => Err(Lost::Session),
        }
    }

    /// Waits for a notification. Returns an error within seconds after the connection is lost, also if the
    /// host has vanished.
    pub(super) async fn recv(&mut self) -> Result<PgNotification, Lost> {
        loop {
            match timeout_at(self.due, self.listener.try_recv()).await {
                Ok(notification) => match notification?.ok_or_else(reset)? {
                    echo if echo.channel() == self.echo => self.awaits_echo = false,
                    notification => return Ok(notification),
                },
                Err(_) if self.awaits_echo => return Err(Lost::Connection(vanished())),
                Err(_) => self.send_echo().await?,
            }
        }
    }

    /// Runs a statement of the caller on this connection, and gives up when the server does not answer.
    pub(super) async fn run<T>(
        &mut self,
        statement: impl AsyncFnOnce(&mut PgListener) -> Result<T, sqlx::Error>,
    ) -> Result<T, Lost> {
        answered(statement(&mut self.listener)).await
    }

    async fn send_echo(&mut self) -> Result<(), Lost> {
        let sent = sqlx::query!("select pg_notify($1, '') as sent", self.echo).fetch_one(&mut self.listener);
        timeout(WITHIN, sent).await.map_err(|_| Lost::Connection(vanished()))??;
        (self.awaits_echo, self.due) = (true, Instant::now() + EVERY);
        Ok(())
    }
}

/// Waits for what a new connection is asked. Without this limit, a server that accepts it and says nothing would hold up
/// whoever wants the next one.
async fn answered<T>(statement: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, Lost> {
    let answer = timeout(CONNECT, statement).await;
    answer.map_err(|_| Lost::Connection(vanished()))?.map_err(Lost::Connection)
}

fn reset() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())
}

fn vanished() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())
}
