//! Wake-ups across processes: NOTIFY after commits, LISTEN on a connection of its own.
//!
//! One task a process sends, the first at once and then at most twenty a second: NOTIFY inside busy transactions
//! makes their commits wait for each other. A notification is a hint; whoever waits for one polls as well.

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

/// Tells other processes what was committed. Cloning shares the task.
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

    /// There is new work.
    pub fn job(&self) {
        // The task is gone only at shutdown, when the others' polling is enough.
        let _ = self.0.send(Note::Job);
    }

    /// There is something new to see in a session.
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

/// One statement for both channels; an empty payload tells of no session.
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
    /// Tells workers and readers of a session at once. For a process that ends before a [`Notifier`] would have sent:
    /// when this returns, the notification is sent.
    ///
    /// # Errors
    /// [`crate::Error::Database`]: the others find out by polling.
    pub async fn announce(&self, session_id: &str) -> crate::Result<()> {
        Ok(notify(self, true, session_id).await?)
    }
}

/// What other processes tell. Cloning shares the connection.
#[derive(Clone, Debug)]
pub struct News {
    jobs: broadcast::Sender<()>,
    sessions: broadcast::Sender<Arc<str>>,
    schedules: broadcast::Sender<()>,
}

/// Waits for news of one session. Those that were missed count: one of them may have been about it.
pub async fn heard(news: &mut broadcast::Receiver<Arc<str>>, session_id: &str) {
    loop {
        match news.recv().await {
            Ok(id) if &*id == session_id || &*id == EVERY_SESSION => return,
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => return,
            // Nobody will tell: whoever waits has a timer beside this.
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

impl News {
    /// Starts listening, until `stop`. A lost connection is made again, and then everybody looks.
    pub fn listen(store: &Store, stop: CancellationToken) -> News {
        let news = News {
            jobs: broadcast::channel(16).0,
            sessions: broadcast::channel(1024).0,
            schedules: broadcast::channel(16).0,
        };
        tokio::spawn(news.clone().run(store.options.clone(), stop));
        news
    }

    /// Fires when there may be new work. Each caller has its own.
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

    /// Session ids with something new; `*` stands for all.
    pub fn sessions(&self) -> broadcast::Receiver<Arc<str>> {
        self.sessions.subscribe()
    }

    /// Hears that a schedule changed.
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
        // A pool waits up to a fifth of this between its attempts, and readers wait for us: a server that is back must
        // be heard within seconds.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(Duration::from_secs(5))
            .connect_with(options.clone())
            .await?;
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.listen_all([JOBS, SESSIONS, schedule::CHANNEL]).await?;
        // What was sent while nobody listened is not sent again: everybody looks once.
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
        // Nobody subscribed is nobody to tell.
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
