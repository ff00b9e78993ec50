//! How far back a claim looks.
//!
//! Entries of finished jobs stay in the index until vacuum may remove them, and it may not while some transaction still
//! sees those jobs: a dump, a long report. A claim reads the index in the order of `run_at`, so it would walk through all of
//! them before the first job that waits: 0.7 seconds for 1.5 million. But a claim that found fewer jobs than it asked for has
//! taken all that were ready, and a full one has taken the oldest. So the next claim begins there.
//!
//! Other jobs may still appear further back, rarely: a transaction committed late, a claim of another process was undone, the
//! server's clock was set back, a process that came back from an outage left claimed jobs alone (`contact.rs`). The claim goes back
//! some seconds more for that, and from time to time all the way.

use std::time::Duration;

/// How much further back each claim looks than it must.
const MARGIN: Duration = Duration::from_secs(10);

/// Shortest time between two claims that look all the way back. If they are slow, they take a fiftieth of the time.
const ALL_EVERY: Duration = Duration::from_secs(2);
const ALL_SHARE: u64 = 50;

/// All the way back.
const ALL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// What the claims of one queue know. Times are milliseconds of `CLOCK_BOOTTIME`.
#[derive(Debug)]
pub(super) struct Horizon {
    /// No job that was ready before this moment is left. Negative: a moment before the host started.
    pub clear_before: i64,
    /// When a claim looks all the way back again.
    all_at: u64,
}

/// [`Horizon::clear_before`] of a queue from which nothing was claimed yet.
pub(super) const NEVER: i64 = i64::MIN;

impl Default for Horizon {
    fn default() -> Horizon {
        Horizon { clear_before: NEVER, all_at: 0 }
    }
}

impl Horizon {
    /// How far back a claim at `now` looks.
    pub fn reach(&self, now: u64) -> Duration {
        if now >= self.all_at {
            return ALL;
        }
        self.nearest(now)
    }

    /// How far back a claim in turn looks. It never looks all the way back; claims by age do that.
    pub fn nearest(&self, now: u64) -> Duration {
        back_to(self.clear_before, now)
    }

    /// A claim that began at `began` and looked back for `reach` has ended at `now`. If it is full, it leaves only
    /// jobs that became ready within `left`.
    pub fn claimed(&mut self, began: u64, reach: Duration, now: u64, left: Option<Duration>) {
        let left = left.map_or(0, |left| i64::try_from(left.as_millis()).unwrap_or(i64::MAX));
        self.clear_before = began.cast_signed().saturating_sub(left).max(self.clear_before);
        if reach == ALL {
            let pause = (now - began) * ALL_SHARE;
            self.all_at = now + pause.max(ALL_EVERY.as_millis() as u64);
        }
    }

    /// A claim failed. Nothing is known of what it would have found.
    pub fn failed(&mut self) {
        self.all_at = 0;
    }
}

/// How long before `now` a waiting job may have become ready, if none that was ready before `clear_before` is left.
pub(super) fn back_to(clear_before: i64, now: u64) -> Duration {
    let since = now.cast_signed().saturating_sub(clear_before).max(0).unsigned_abs();
    Duration::from_millis(since).saturating_add(MARGIN).min(ALL)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1000;

    #[test]
    fn jobs_that_have_waited_since_before_the_hosts_start_stay_in_sight() {
        let mut horizon = Horizon::default();
        // A host that is up for a minute meets the backlog of an hour, and takes the oldest of it.
        horizon.claimed(60 * S, ALL, 60 * S, Some(Duration::from_secs(3600)));
        assert_eq!(horizon.reach(61 * S), Duration::from_secs(3601) + MARGIN);
        assert_eq!(horizon.nearest(61 * S), Duration::from_secs(3601) + MARGIN);
        assert_eq!(Horizon::default().nearest(61 * S), ALL);
    }

    #[test]
    fn a_claim_looks_back_to_what_the_last_one_left() {
        let mut horizon = Horizon::default();
        assert_eq!(horizon.reach(100 * S), ALL);
        horizon.claimed(100 * S, ALL, 100 * S, None);
        assert_eq!(horizon.reach(101 * S), Duration::from_secs(1) + MARGIN);
        // It was full: the jobs that are left became ready within the last hour.
        horizon.claimed(101 * S, Duration::from_secs(11), 101 * S, Some(Duration::from_secs(3600)));
        assert_eq!(
            horizon.reach(101 * S + 500),
            Duration::from_millis(1500) + MARGIN,
            "what was clear stays clear"
        );
        assert_eq!(horizon.reach(102 * S), ALL);
        horizon.claimed(110 * S, ALL, 111 * S, Some(Duration::from_secs(50)));
        assert_eq!(horizon.reach(120 * S), Duration::from_secs(20) + MARGIN);
        assert_eq!(horizon.reach(111 * S + ALL_SHARE * S - 1), Duration::from_millis(60_999) + MARGIN);
        assert_eq!(horizon.reach(111 * S + ALL_SHARE * S), ALL, "it took a second, so the next one is later");
        horizon.failed();
        assert_eq!(horizon.reach(112 * S), ALL);
    }
}
