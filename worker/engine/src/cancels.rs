//! Cancels of the sessions that this process works on. One query looks for all of them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::broadcast;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::debug;
use wakeful_store::Store;
use wakeful_store::queue::{News, heard_cancel};

/// A cancel whose notification is lost is noticed after this time.
const EVERY: Duration = Duration::from_secs(2);

/// Work that ends sooner does not look. A notification that comes meanwhile is kept for the next one that looks.
const SOON: Duration = Duration::from_millis(20);

/// Looks are at least this far apart, however many notifications arrive.
const APART: Duration = Duration::from_millis(50);

/// The sessions whose cancels this process waits for.
#[derive(Debug, Default)]
pub struct Cancels {
    waiting: Mutex<Waiting>,
    /// The waiter that holds this looks for all of them. If it stops waiting, another one takes over.
    looker: tokio::sync::Mutex<Option<Looker>>,
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    /// The session of each waiter, and the token that wakes it.
    sessions: HashMap<u64, (String, CancellationToken)>,
}

#[derive(Debug)]
struct Looker {
    news: broadcast::Receiver<Arc<str>>,
    looked: Instant,
}

impl Cancels {
    /// Waits until someone asks to cancel the session's run. Checks after a cancel's notification, and every two
    /// seconds.
    pub async fn cancelled(&self, store: &Store, news: &News, session_id: &str) {
        let waiter = self.enter(session_id);
        tokio::select! {
            () = waiter.token.cancelled() => {}
            never = async {
                sleep(SOON).await;
                self.look(store, news).await
            } => match never {}
        }
    }

    fn enter(&self, session_id: &str) -> Waiter<'_> {
        let token = CancellationToken::new();
        let mut waiting = self.waiting();
        let number = waiting.next;
        waiting.next += 1;
        waiting.sessions.insert(number, (session_id.to_owned(), token.clone()));
        Waiter { cancels: self, number, token }
    }

    async fn look(&self, store: &Store, news: &News) -> Infallible {
        let mut looker = self.looker.lock().await;
        // The first one looks at once, for what was cancelled before it listened.
        let Looker { news, looked } = looker.get_or_insert_with(|| {
            let now = Instant::now();
            Looker { news: news.sessions(), looked: now.checked_sub(EVERY).unwrap_or(now) }
        });
        loop {
            tokio::select! {
                () = heard_cancel(news, |session_id| self.has(session_id)) => sleep(APART).await,
                () = sleep_until(*looked + EVERY) => {}
            }
            let sessions: Vec<String> = self.waiting().sessions.values().map(|(id, _)| id.clone()).collect();
            // Ignore a database fault here: the step's own commit notices it.
            match store.cancelled_among(&sessions).await {
                Ok(cancelled) => {
                    for (id, token) in self.waiting().sessions.values() {
                        if cancelled.contains(id) {
                            token.cancel();
                        }
                    }
                }
                Err(error) => debug!(%error, "Could not look for cancels; looking again later"),
            }
            *looked = Instant::now();
        }
    }

    fn has(&self, session_id: &str) -> bool {
        self.waiting().sessions.values().any(|(id, _)| id == session_id)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One session in [`Waiting`], until this is dropped.
struct Waiter<'a> {
    cancels: &'a Cancels,
    number: u64,
    token: CancellationToken,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.cancels.waiting().sessions.remove(&self.number);
    }
}
