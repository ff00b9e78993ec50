//! Which connections a process has lost, and since when. Whoever opens a connection says here how that went; `/readyz`, `doctor`
//! and the commands read it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
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

/// The connections that are lost. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links(Arc<Mutex<BTreeMap<Use, Instant>>>);

impl Links {
    fn lost_ones(&self) -> std::sync::MutexGuard<'_, BTreeMap<Use, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that there is no connection for `what`. The first such note counts.
    pub fn lost(&self, what: Use) {
        self.lost_ones().entry(what).or_insert_with(Instant::now);
    }

    /// Notes that there is one.
    pub fn back(&self, what: Use) {
        if let Some(since) = self.lost_ones().remove(&what) {
            let lost_s = since.elapsed().as_secs();
            info!(lost_s, "There is a connection for {} again", what.as_str());
        }
    }

    /// Each that is lost, and for how long.
    pub fn all_lost(&self) -> Vec<(&'static str, Duration)> {
        self.lost_ones().iter().map(|(what, since)| (what.as_str(), since.elapsed())).collect()
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
        let since = links.lost_ones()[&Use::Heartbeat];
        links.lost(Use::Heartbeat);
        shared.lost(Use::Statements);
        assert_eq!(links.lost_ones()[&Use::Heartbeat], since);
        let names: Vec<_> = links.all_lost().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["statements", "heartbeat"]);
        links.back(Use::Heartbeat);
        links.back(Use::Commits);
        assert_eq!(shared.all_lost().len(), 1);
    }
}
