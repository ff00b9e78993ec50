//! Which sessions somebody reads live, in any process.
//!
//! A worker writes the text of a model call while it streams only for sessions that are read. So a reader that
//! sees a model call in flight says so with a notification, and repeats that every second. If a notification is
//! lost, the next one comes a second later. A worker believes each for three seconds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often a reader says that it reads.
pub const READS_EVERY: Duration = Duration::from_secs(1);

/// How long a worker believes it.
const BELIEVED: Duration = Duration::from_secs(3);

/// Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Readers(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// Until when each session counts as read.
    sessions: HashMap<String, watch::Sender<Instant>>,
    /// At this size, forget the sessions that count no more.
    full: usize,
}

impl Readers {
    /// Somebody reads this session now.
    pub(super) fn note(&self, session_id: &str) {
        let until = Instant::now() + BELIEVED;
        self.with(session_id, |session| session.send_replace(until));
    }

    pub(super) fn of(&self, session_id: &str) -> Audience {
        Audience(self.with(session_id, watch::Sender::subscribe))
    }

    fn with<T>(&self, session_id: &str, act: impl FnOnce(&watch::Sender<Instant>) -> T) -> T {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(session) = known.sessions.get(session_id) {
            return act(session);
        }
        if known.sessions.len() >= known.full {
            known.sessions.retain(|_, session| session.receiver_count() > 0 || *session.borrow() > now);
            known.full = (known.sessions.len() * 2).max(64);
        }
        act(known.sessions.entry(session_id.to_owned()).or_insert_with(|| watch::Sender::new(now)))
    }
}

/// The live readers of one session.
#[derive(Debug)]
pub struct Audience(watch::Receiver<Instant>);

impl Audience {
    /// Returns whether somebody reads the session now.
    pub fn reads(&self) -> bool {
        *self.0.borrow() > Instant::now()
    }

    /// Waits until somebody reads the session.
    pub async fn comes(&mut self) {
        if self.0.wait_for(|until| *until > Instant::now()).await.is_err() {
            // The sender is gone, so no reader will be heard of.
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn a_reader_is_known_to_the_calls_of_its_session_before_and_after() {
        let readers = Readers::default();
        let mut early = readers.of("a");
        assert!(!early.reads() && early.comes().now_or_never().is_none());
        readers.note("a");
        assert!(early.reads() && early.comes().now_or_never().is_some());
        assert!(readers.of("a").reads());
        assert!(!readers.of("b").reads());
    }

    #[test]
    fn sessions_that_were_read_once_are_forgotten() {
        let readers = Readers::default();
        let held = readers.of("held");
        for number in 0..1000 {
            drop(readers.of(&format!("s{number}")));
        }
        assert!(readers.0.lock().unwrap().sessions.len() <= 65);
        readers.note("held");
        assert!(held.reads());
    }
}
