//! Whether a process has been in touch with the database, as its heartbeat tells.
//!
//! After an outage that was longer than a lease, every lease in the database has ended, even where the holder still works.
//! These processes come back within seconds of each other. So a process that comes back leaves all claimed jobs alone at
//! first: their holders renew them, and go on.

use std::time::Duration;

/// Times are milliseconds of `CLOCK_BOOTTIME`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Contact {
    /// The process is in touch until then, unless a later heartbeat succeeds. 0: none has succeeded yet.
    until: u64,
    /// The others have had their time from then on.
    settled: u64,
}

impl Contact {
    /// A heartbeat that began at `now` has succeeded. They come `every` so often.
    pub fn beat(&mut self, now: u64, lease: Duration, every: Duration) {
        if !self.is_kept(now) {
            // As long as a heartbeat may take.
            self.settled = now + (lease / 2).as_millis() as u64;
        }
        // A lease that was renewed right before an outage ends this long after it, or later.
        let gap = lease.saturating_sub(every).max(every * 3 / 2);
        self.until = now + gap.as_millis() as u64;
    }

    /// Returns whether a lease that has ended may be taken for one that nobody keeps.
    pub fn may_take_expired(&self, now: u64) -> bool {
        self.is_kept(now) && now >= self.settled
    }

    fn is_kept(&self, now: u64) -> bool {
        self.until == 0 || now <= self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1000;

    #[test]
    fn a_process_that_was_cut_off_for_most_of_a_lease_lets_the_others_come_back_first() {
        let (lease, every) = (Duration::from_secs(30), Duration::from_secs(10));
        let mut contact = Contact::default();
        assert!(contact.may_take_expired(100 * S), "it has just started");
        contact.beat(100 * S, lease, every);
        assert!(contact.may_take_expired(100 * S));
        assert!(contact.may_take_expired(120 * S));
        assert!(!contact.may_take_expired(121 * S));
        contact.beat(140 * S, lease, every);
        assert!(!contact.may_take_expired(140 * S));
        contact.beat(150 * S, lease, every);
        assert!(!contact.may_take_expired(154 * S));
        assert!(contact.may_take_expired(155 * S));
        // A missed beat is no outage.
        contact.beat(170 * S, lease, every);
        assert!(contact.may_take_expired(170 * S));
    }

    #[test]
    fn a_heartbeat_that_comes_twice_in_a_lease_is_no_outage() {
        let (lease, every) = (Duration::from_secs(30), Duration::from_secs(15));
        let mut contact = Contact::default();
        for beat in 0..5 {
            contact.beat(100 * S + beat * 16 * S, lease, every);
            assert!(contact.may_take_expired(100 * S + beat * 16 * S));
        }
    }
}
