//! Cancels of the sessions that this process works on. One query looks for all of them.

use std::collections::{HashMap, VecDeque};
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

/// How long a cancel is remembered that came before its session waited. Cancels of the sessions of other processes are heard too.
const REMEMBERED: Duration = Duration::from_secs(2);

/// The sessions whose cancels this process waits for.
#[derive(Debug)]
pub struct Cancels {
    every: Duration,
    waiting: Mutex<Waiting>,
    /// The waiter that holds this looks for all of them. If it stops waiting, another one takes over.
    looker: tokio::sync::Mutex<Option<Looker>>,
}

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    /// The session of each waiter, and the token that wakes it.
    sessions: HashMap<u64, (String, CancellationToken)>,
    /// Sessions whose cancel was heard lately, before they waited for one. Their next waiter looks at once: the
    /// notification may have come faster than the answer to the commit before that wait.
    unawaited: VecDeque<(Instant, String)>,
}

#[derive(Debug)]
struct Looker {
    news: broadcast::Receiver<Arc<str>>,
    looked: Instant,
    /// A notification came since the last look. The waiter that heard it may have stopped waiting before it looked.
    heard: bool,
}

impl Default for Cancels {
    fn default() -> Cancels {
        Cancels::looking_every(EVERY)
    }
}

impl Cancels {
    /// Looks also without a notification, after this time.
    pub fn looking_every(every: Duration) -> Cancels {
        Cancels { every, waiting: Mutex::default(), looker: tokio::sync::Mutex::default() }
    }

    /// Waits until someone asks to cancel the session's run. Checks after a cancel's notification, and every two
    /// seconds.
    pub async fn cancelled(&self, store: &Store, news: &News, session_id: &str) {
        let waiter = self.enter(session_id);
        if self.was_heard(session_id)
            && store.cancelled_among(&[session_id.to_owned()]).await.is_ok_and(|found| !found.is_empty())
        {
            return;
        }
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
        let looker = looker.get_or_insert_with(|| Looker {
            news: news.sessions(),
            looked: Instant::now(),
            heard: true,
        });
        loop {
            let due = looker.looked + self.every;
            while !looker.heard {
                tokio::select! {
                    () = heard_cancel(&mut looker.news, |session_id| self.awaits(session_id)) => looker.heard = true,
                    () = sleep_until(due) => looker.heard = true,
                }
            }
            sleep_until(looker.looked + APART).await;
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
            (looker.looked, looker.heard) = (Instant::now(), false);
        }
    }

    /// Returns whether somebody waits for a cancel of this session. If not, remembers it for a while.
    fn awaits(&self, session_id: &str) -> bool {
        let mut waiting = self.waiting();
        let awaits = waiting.sessions.values().any(|(id, _)| id == session_id);
        if !awaits {
            let now = Instant::now();
            while waiting.unawaited.front().is_some_and(|(at, _)| now - *at > REMEMBERED) {
                waiting.unawaited.pop_front();
            }
            waiting.unawaited.push_back((now, session_id.to_owned()));
        }
        awaits
    }

    fn was_heard(&self, session_id: &str) -> bool {
        let mut waiting = self.waiting();
        let before = waiting.unawaited.len();
        waiting.unawaited.retain(|(_, id)| id != session_id);
        waiting.unawaited.len() < before
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
