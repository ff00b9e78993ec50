//! Which streams have something new to read. One listener and one query serve all streams of a process, so a stream
//! with nothing to show costs the database next to nothing.
//!
//! Notifications name the sessions that changed. One can be lost, so a query also looks at the sessions that are
//! followed, a thousand each second in turn.

use super::callers::{self, Callers, Place};
use crate::access::Caller;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, watch};
use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;
use wakeful_engine::ctx::Ctx;
use wakeful_store::event::Newest;
use wakeful_store::queue::EVERY_SESSION;

/// How often the query looks.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// The most sessions that it looks at.
const PAGE: usize = 1000;

/// All streams of this process.
#[derive(Debug)]
pub(crate) struct Followers {
    places: Arc<Semaphore>,
    callers: Arc<Callers>,
    sessions: Mutex<BTreeMap<String, Followed>>,
}

/// Why there is no place for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPlace {
    /// All are taken.
    Full,
    /// The caller has the most that it may have.
    OfCaller(usize),
}

/// A session that somebody follows.
#[derive(Debug)]
struct Followed {
    changed: watch::Sender<()>,
    /// What the last query saw.
    newest: Option<Newest>,
}

/// One stream's place. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Follower {
    followers: Arc<Followers>,
    session_id: String,
    changed: watch::Receiver<()>,
    of_caller: Place,
    _place: OwnedSemaphorePermit,
}

impl Followers {
    /// There are `server.streams` places. Watches for news until the process ends.
    pub(crate) fn start(ctx: &Arc<Ctx>) -> Arc<Followers> {
        let followers = Arc::new(Followers::new(ctx.config.server.streams, ctx.config.server.user_streams));
        tokio::spawn(Arc::clone(&followers).watch(Arc::clone(ctx)));
        followers
    }

    fn new(streams: usize, of_a_user: usize) -> Followers {
        Followers {
            places: Arc::new(Semaphore::new(streams.min(Semaphore::MAX_PERMITS))),
            callers: Callers::new(streams, of_a_user),
            sessions: Mutex::default(),
        }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// [`NoPlace`].
    pub(crate) fn follow(
        self: &Arc<Followers>,
        session_id: &str,
        caller: &Caller,
    ) -> Result<Follower, NoPlace> {
        let of_caller = self.callers.enter(caller).map_err(NoPlace::OfCaller)?;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| NoPlace::Full)?;
        let changed = self
            .sessions()
            .entry(session_id.to_owned())
            .or_insert_with(|| Followed { changed: watch::Sender::new(()), newest: None })
            .changed
            .subscribe();
        Ok(Follower {
            followers: Arc::clone(self),
            session_id: session_id.to_owned(),
            changed,
            of_caller,
            _place: place,
        })
    }

    async fn watch(self: Arc<Followers>, ctx: Arc<Ctx>) {
        let mut news = ctx.bus.news.sessions();
        let mut looks = interval(LOOKS_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut tokens = interval(callers::LOOKS_EVERY);
        tokens.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The last session of the page before.
        let mut last = String::new();
        loop {
            tokio::select! {
                () = ctx.shutdown.abort.cancelled() => return,
                heard = news.recv() => match heard {
                    Ok(id) if &*id != EVERY_SESSION => self.wake(&id),
                    // Notifications were missed.
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {
                        let all: Vec<String> = self.sessions().keys().cloned().collect();
                        for page in all.chunks(PAGE) {
                            self.look(&ctx, page).await;
                        }
                    }
                    // The process ends.
                    Err(broadcast::error::RecvError::Closed) => return,
                },
                _ = tokens.tick() => self.callers.look(&ctx).await,
                _ = looks.tick() => {
                    let page = self.page_after(&last);
                    last = page.last().cloned().unwrap_or_default();
                    if !page.is_empty() {
                        self.look(&ctx, &page).await;
                    }
                }
            }
        }
    }

    /// The next sessions after `last`. After the end it begins anew.
    fn page_after(&self, last: &str) -> Vec<String> {
        let mut sessions = self.sessions();
        // Two streams that end together may each leave their entry to the other.
        sessions.retain(|_, followed| followed.changed.receiver_count() > 0);
        let after = sessions.range::<str, _>((Bound::Excluded(last), Bound::Unbounded));
        let page: Vec<String> = after.take(PAGE).map(|(id, _)| id.clone()).collect();
        if !page.is_empty() {
            return page;
        }
        sessions.keys().take(PAGE).cloned().collect()
    }

    /// Wakes the streams of those sessions that have changed since the last look, or have a model call in progress.
    async fn look(&self, ctx: &Ctx, page: &[String]) {
        let newest = match ctx.store.newest(page).await {
            Ok(newest) => newest,
            Err(error) => {
                debug!(%error, "The streams could not be looked after; the next look comes in a second");
                return;
            }
        };
        let mut sessions = self.sessions();
        for (session_id, newest) in newest {
            if let Some(followed) = sessions.get_mut(&session_id)
                && (newest.calls || followed.newest != Some(newest))
            {
                followed.newest = Some(newest);
                followed.changed.send_replace(());
            }
        }
    }

    fn wake(&self, session_id: &str) {
        if let Some(followed) = self.sessions().get(session_id) {
            followed.changed.send_replace(());
        }
    }

    fn sessions(&self) -> MutexGuard<'_, BTreeMap<String, Followed>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Follower {
    pub(crate) fn session_id(&self) -> &str {
        &self.session_id
    }

    /// Waits until the caller's token is no longer in force.
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + use<> {
        self.of_caller.ended()
    }

    /// Waits until the session may have something new: since the last call, or since the place was taken.
    pub(crate) async fn changed(&mut self) {
        if self.changed.changed().await.is_err() {
            // The sender lives as long as this follower.
            std::future::pending().await
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let mut sessions = self.followers.sessions();
        // This one is still counted.
        if sessions.get(&self.session_id).is_some_and(|followed| followed.changed.receiver_count() <= 1) {
            sessions.remove(&self.session_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Who;
    use futures::FutureExt;

    fn followers(limit: usize) -> Arc<Followers> {
        Arc::new(Followers::new(limit, 1))
    }

    fn this_machine() -> Caller {
        Caller::of_installation(Who::ThisMachine)
    }

    #[test]
    fn all_streams_of_a_session_hear_of_it_and_no_other_one() {
        let all = followers(3);
        let [mut first, mut second, mut other] =
            ["a", "a", "b"].map(|id| all.follow(id, &this_machine()).unwrap());
        assert_eq!(all.follow("c", &this_machine()).unwrap_err(), NoPlace::Full);
        all.wake("a");
        all.wake("nobody follows it");
        assert!(first.changed().now_or_never().is_some() && second.changed().now_or_never().is_some());
        assert!(other.changed().now_or_never().is_none());
        assert!(first.changed().now_or_never().is_none(), "once");
        drop(first);
        assert_eq!(all.sessions().len(), 2);
        drop(second);
        assert_eq!(all.sessions().len(), 1);
        assert!(all.follow("c", &this_machine()).is_ok());
    }

    #[test]
    fn the_looks_come_round_to_every_session() {
        let all = followers(2500);
        let held: Vec<Follower> =
            (0..2500).map(|n| all.follow(&format!("s{n:04}"), &this_machine()).unwrap()).collect();
        let mut last = String::new();
        let pages: Vec<usize> = (0..4)
            .map(|_| {
                let page = all.page_after(&last);
                last = page.last().cloned().unwrap_or_default();
                page.len()
            })
            .collect();
        assert_eq!(pages, [1000, 1000, 500, 1000]);
        assert_eq!(last, "s0999");
        drop(held);
        assert!(all.page_after("").is_empty());
    }
}
