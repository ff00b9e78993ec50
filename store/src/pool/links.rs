//! Which connections a process has lost, and since when. Code that opens a connection records here whether that succeeded. `/readyz`,
//! `doctor` and the commands read it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::info;

/// What a process needs connections for, in the order in which they are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Use {
    /// The pool: reads, incoming messages, claims.
    Statements,
    /// The lanes of the committer. While none has a connection, commits go through the pool.
    Commits,
    Heartbeat,
    /// LISTEN. Until it is back, work is found by polling.
    Notifications,
    LivenessLock,
}

impl Use {
    fn as_str(self) -> &'static str {
        match self {
            Use::Statements => "statements",
            Use::Commits => "commits",
            Use::Heartbeat => "heartbeat",
            Use::Notifications => "notifications",
            Use::LivenessLock => "liveness lock",
        }
    }
}

/// The connections that are lost, and when one came back last. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    lost: BTreeMap<Use, Instant>,
    back_at: Option<Instant>,
}

impl Links {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that there is no connection for `what`. The first such note counts.
    pub fn lost(&self, what: Use) {
        self.known().lost.entry(what).or_insert_with(Instant::now);
    }

    /// Notes that there is one.
    pub fn back(&self, what: Use) {
        let mut known = self.known();
        if let Some(since) = known.lost.remove(&what) {
            known.back_at = Some(Instant::now());
            drop(known);
            let lost_s = since.elapsed().as_secs();
            info!(lost_s, "There is a connection for {} again", what.as_str());
        }
    }

    /// Each that is lost, and for how long.
    pub fn all_lost(&self) -> Vec<(&'static str, Duration)> {
        self.known().lost.iter().map(|(what, since)| (what.as_str(), since.elapsed())).collect()
    }

    /// Since when there has been no connection for `what`.
    pub fn lost_since(&self, what: Use) -> Option<Instant> {
        self.known().lost.get(&what).copied()
    }

    /// When a connection that was lost came back last.
    pub fn back_at(&self) -> Option<Instant> {
        self.known().back_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_lost_since_the_first_note_until_it_is_back() {
        let links = Links::default();
        let shared = links.clone();
        assert_eq!(links.all_lost(), []);
        links.lost(Use::Heartbeat);
        let since = links.known().lost[&Use::Heartbeat];
        links.lost(Use::Heartbeat);
        shared.lost(Use::Statements);
        assert_eq!(links.known().lost[&Use::Heartbeat], since);
        let names: Vec<_> = links.all_lost().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["statements", "heartbeat"]);
        links.back(Use::Commits);
        assert_eq!(links.back_at(), None, "it was not lost");
        links.back(Use::Heartbeat);
        assert!(links.back_at().is_some_and(|at| at >= since));
        assert!(links.lost_since(Use::Statements).is_some() && links.lost_since(Use::Heartbeat).is_none());
        assert_eq!(shared.all_lost().len(), 1);
    }
}
