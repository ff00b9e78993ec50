//! What this process measures of its work with the database. `/metrics` shows it.
//!
//! Each label has few values, which the code or the configuration names: never the id of a session, a run or a person.

use crate::Store;
use crate::queue::Kind;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Bounds in seconds of what waits for the database or for a free slot.
pub const WAITS: [f64; 12] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];

/// Bounds of the number of commits in one statement, of which there are at most 16.
const TOGETHER: [f64; 5] = [1.0, 2.0, 4.0, 8.0, 16.0];

/// One label with its value.
type Label = [(&'static str, &'static str); 1];

/// The store's counters and histograms.
#[derive(Debug)]
pub(crate) struct Metrics {
    claimed: Family<Label, Counter>,
    waited: Family<Label, Histogram>,
    together: Histogram,
    alone: Counter,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            claimed: Family::default(),
            waited: Family::new_with_constructor(|| Histogram::new(WAITS)),
            together: Histogram::new(TOGETHER),
            alone: Counter::default(),
        }
    }
}

impl Metrics {
    /// A claim took `jobs` jobs. The latest of them was ready for `age_s`, if the statement could tell.
    pub fn claimed(&self, kind: Kind, jobs: usize, age_s: Option<f64>) {
        let label = [("kind", kind.as_str())];
        self.claimed.get_or_create(&label).inc_by(jobs as u64);
        if let Some(age_s) = age_s {
            // A clock that was set back gives a negative age.
            self.waited.get_or_create(&label).observe(age_s.max(0.0));
        }
    }

    /// A statement of a lane wrote the commits of so many sessions.
    pub fn together(&self, commits: usize) {
        self.together.observe(commits as f64);
    }

    /// A commit had a statement of its own, over a connection of the pool.
    pub fn alone(&self, is_written: bool) {
        if is_written {
            self.alone.inc();
        }
    }
}

impl Store {
    /// Adds this process's measurements of the database to `registry`. Their names begin with its prefix.
    pub fn register_metrics(&self, registry: &mut Registry) {
        let Metrics { claimed, waited, together, alone } = &*self.metrics;
        registry.register("claimed_jobs", "Jobs that this process took from the queue", claimed.clone());
        registry.register(
            "claim_wait_seconds",
            "How long the newest job of a claim had been ready",
            waited.clone(),
        );
        registry.register(
            "commits_per_statement",
            "How many step commits one statement of the committer wrote",
            together.clone(),
        );
        registry.register(
            "commits_alone",
            "Step commits written one by one: those with messages to send, a taken inbox or a blob, and all while the committer has no connection",
            alone.clone(),
        );
    }

    /// How many connections of the pool are open. Those for commits, heartbeat, liveness lock and LISTEN come in addition.
    pub fn open_connections(&self) -> usize {
        self.pool.open()
    }
}
