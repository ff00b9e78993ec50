//! Wake-ups across processes: NOTIFY after commits, LISTEN on a connection of its own.
//!
//! One task per process sends notifications, the first at once and then at most twenty a second. Transactions
//! do not send NOTIFY themselves, because Postgres makes commits with NOTIFY wait for each other. A
//! notification is only a hint: every waiter also polls.

use crate::Store;
use crate::schedule;
use sqlx::postgres::{PgListener, PgPoolOptions};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

const JOBS: &str = "wakeful_jobs";
const SESSIONS: &str = "wakeful_sessions";
/// Postgres takes payloads of less than 8000 bytes.
const PAYLOAD_BYTES: usize = 7900;
const EVERY_SESSION: &str = "*";

/// Tells other processes about commits. Clones share the task.
#[derive(Clone, Debug)]
pub struct Notifier(mpsc::UnboundedSender<Note>);

#[derive(Debug)]
enum Note {
    Job,
    Session(String),
}

impl Notifier {
    /// Starts the task. It ends when the last clone is dropped.
    pub fn start(store: Store) -> Notifier {
        let (notes, inbox) = mpsc::unbounded_channel();
        tokio::spawn(send_notes(store, inbox));
        Notifier(notes)
    }

    /// Announces new work.
    pub fn job(&self) {
        // Sending fails only at shutdown. Other processes then find the work by polling.
        let _ = self.0.send(Note::Job);
    }

    /// Announces that readers of a session have something new to read.
    pub fn session(&self, session_id: &str) {
        let _ = self.0.send(Note::Session(session_id.to_owned()));
    }
}

async fn send_notes(store: Store, mut inbox: mpsc::UnboundedReceiver<Note>) {
    while let Some(first) = inbox.recv().await {
        let (mut jobs, mut sessions) = (false, BTreeSet::new());
        let mut next = Some(first);
        while let Some(note) = next {
            match note {
                Note::Job => jobs = true,
                Note::Session(session_id) => {
                    sessions.insert(session_id);
                }
            }
            next = inbox.try_recv().ok();
        }
        let mut payload = sessions.into_iter().collect::<Vec<_>>().join(",");
        if payload.len() > PAYLOAD_BYTES {
            payload = EVERY_SESSION.to_owned();
        }
        let sent = notify(&store, jobs, &payload).await;
        if let Err(error) = sent {
            debug!(%error, "A notification was not sent; the others poll");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Notifies both channels with one statement. An empty `sessions` announces no session.
async fn notify(store: &Store, jobs: bool, sessions: &str) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "select case when $1 then pg_notify($2, '') end as jobs,
            case when $3 <> '' then pg_notify($4, $3) end as sessions",
        jobs,
        JOBS,
        sessions,
        SESSIONS
    )
    .fetch_one(&store.pool)
    .await?;
    Ok(())
}

impl Store {
    /// Notifies workers and readers of a session, and returns when the notification is sent. For a process
    /// that may end before a [`Notifier`] sends.
    ///
    /// # Errors
    /// [`crate::Error::Database`]: other processes find the work by polling.
    pub async fn announce(&self, session_id: &str) -> crate::Result<()> {
        Ok(notify(self, true, session_id).await?)
    }
}

/// Receives notifications of other processes. Clones share the connection.
#[derive(Clone, Debug)]
pub struct News {
    jobs: broadcast::Sender<()>,
    sessions: broadcast::Sender<Arc<str>>,
    schedules: broadcast::Sender<()>,
}

/// Waits for a notification of one session. Returns early if notifications were missed, since one of them may have
/// been for this session.
pub async fn heard(news: &mut broadcast::Receiver<Arc<str>>, session_id: &str) {
    loop {
        match news.recv().await {
            Ok(id) if &*id == session_id || &*id == EVERY_SESSION => return,
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => return,
            // The sender is gone, so no notification will come. The caller also has a timer.
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

impl News {
    /// Starts listening, until `stop`. After a lost connection it connects again and wakes every waiter.
    pub fn listen(store: &Store, stop: CancellationToken) -> News {
        let news = News {
            jobs: broadcast::channel(16).0,
            sessions: broadcast::channel(1024).0,
            schedules: broadcast::channel(16).0,
        };
        tokio::spawn(news.clone().run(store.options.clone(), stop));
        news
    }

    /// Returns a signal that fires when there may be new work. Each caller gets its own signal.
    pub(super) fn jobs(&self) -> Arc<Notify> {
        let (notify, mut jobs) = (Arc::new(Notify::new()), self.jobs.subscribe());
        let fired = Arc::clone(&notify);
        tokio::spawn(async move {
            while !matches!(jobs.recv().await, Err(broadcast::error::RecvError::Closed)) {
                fired.notify_one();
            }
        });
        notify
    }

    /// Receives ids of sessions with something new; `*` means all sessions.
    pub fn sessions(&self) -> broadcast::Receiver<Arc<str>> {
        self.sessions.subscribe()
    }

    /// Fires when a schedule changed.
    pub fn schedules(&self) -> broadcast::Receiver<()> {
        self.schedules.subscribe()
    }

    async fn run(self, options: sqlx::postgres::PgConnectOptions, stop: CancellationToken) {
        while !stop.is_cancelled() {
            tokio::select! {
                () = stop.cancelled() => {}
                error = self.receive(&options) => {
                    warn!(%error, "LISTEN was lost; listening again");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    async fn receive(&self, options: &sqlx::postgres::PgConnectOptions) -> sqlx::Error {
        match self.try_receive(options).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn try_receive(
        &self,
        options: &sqlx::postgres::PgConnectOptions,
    ) -> Result<std::convert::Infallible, sqlx::Error> {
        // Readers wait for this connection, so it must notice within seconds that the server is back. The
        // pool waits up to a fifth of this time between its attempts to connect.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(Duration::from_secs(5))
            .connect_with(options.clone())
            .await?;
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.listen_all([JOBS, SESSIONS, schedule::CHANNEL]).await?;
        // Postgres does not repeat notifications that were sent while we did not listen. So wake every waiter once.
        self.tell(JOBS, "");
        self.tell(SESSIONS, EVERY_SESSION);
        self.tell(schedule::CHANNEL, "");
        loop {
            let Some(notification) = listener.try_recv().await? else {
                return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()));
            };
            self.tell(notification.channel(), notification.payload());
        }
    }

    fn tell(&self, channel: &str, payload: &str) {
        // An error only means that there is no subscriber.
        if channel == JOBS {
            let _ = self.jobs.send(());
        } else if channel == schedule::CHANNEL {
            let _ = self.schedules.send(());
        } else {
            for session_id in payload.split(',') {
                let _ = self.sessions.send(Arc::from(session_id));
            }
        }
    }
}
