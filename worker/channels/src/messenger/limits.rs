//! Send limits of messengers: token buckets in this process, and the waits that the messenger asks for.
//!
//! Nothing here sleeps. A caller who may not send now is told how long to wait. Each waiting caller gets a
//! later time, so they do not all come back at once. Each process has its own buckets; between processes the
//! messenger's 429 decides.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use wakeful_engine::channel::SendError;

/// When there are more buckets than this, full ones are dropped.
const KEPT: usize = 10_000;

/// One message per `every`, and up to `burst` at once after a silence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    pub every: Duration,
    pub burst: u32,
}

impl Rate {
    pub const fn per(every_ms: u64, burst: u32) -> Rate {
        Rate { every: Duration::from_millis(every_ms), burst }
    }

    fn slack(self) -> Duration {
        self.every * self.burst.saturating_sub(1)
    }
}

/// Buckets by name. Times count from `began`.
#[derive(Debug)]
pub(super) struct Limits {
    began: Instant,
    buckets: Mutex<HashMap<String, Bucket>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// When the bucket is full again: the theoretical arrival time of the generic cell rate algorithm.
    full_at: Duration,
    /// The end of the wait that the messenger asked for.
    closed_until: Duration,
    /// The next refused caller is told to wait at least until this time. Earlier times are already given out.
    next_turn_at: Duration,
}

impl Limits {
    pub fn new() -> Limits {
        Limits { began: Instant::now(), buckets: Mutex::default() }
    }

    /// Takes one token from each bucket, or from none.
    ///
    /// # Errors
    /// [`SendError::Throttled`] with the text `error`, and how long to wait before asking again.
    pub fn take(&self, wanted: &[(String, Rate)], error: &str) -> Result<(), SendError> {
        self.take_at(wanted, self.began.elapsed())
            .map_err(|after| SendError::Throttled { error: error.to_owned(), after })
    }

    /// Closes this bucket for the time `wait`, because the messenger asked for it.
    pub fn close(&self, name: &str, wait: Duration) {
        self.close_at(name, wait, self.began.elapsed());
    }

    fn take_at(&self, wanted: &[(String, Rate)], now: Duration) -> Result<(), Duration> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() > KEPT {
            buckets.retain(|_, bucket| bucket.full_at.max(bucket.closed_until) > now);
        }
        let mut retry_at = None;
        for (name, rate) in wanted {
            let bucket = buckets.entry(name.clone()).or_default();
            let open_at = bucket.full_at.saturating_sub(rate.slack()).max(bucket.closed_until);
            if open_at > now {
                let turn = open_at.max(bucket.next_turn_at);
                bucket.next_turn_at = turn + rate.every;
                retry_at = retry_at.max(Some(turn));
            }
        }
        if let Some(turn) = retry_at {
            return Err(turn - now);
        }
        for (name, rate) in wanted {
            let bucket = buckets.entry(name.clone()).or_default();
            bucket.full_at = bucket.full_at.max(now) + rate.every;
        }
        Ok(())
    }

    fn close_at(&self, name: &str, wait: Duration, now: Duration) {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = buckets.entry(name.to_owned()).or_default();
        bucket.closed_until = bucket.closed_until.max(now.saturating_add(wait));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_burst_passes_and_then_one_every_so_often() {
        let limits = Limits::new();
        let all = [("all".to_owned(), Rate::per(100, 3))];
        let passed = (0..1000_u64).filter(|at| limits.take_at(&all, ms(*at)).is_ok()).count();
        assert_eq!(passed, 3 + 9);
    }

    #[test]
    fn those_who_wait_are_told_to_come_one_after_the_other() {
        let limits = Limits::new();
        let all = [("all".to_owned(), Rate::per(100, 1))];
        assert_eq!(limits.take_at(&all, ms(0)), Ok(()));
        let waits: Vec<Duration> = (0..3).map(|_| limits.take_at(&all, ms(0)).unwrap_err()).collect();
        assert_eq!(waits, [ms(100), ms(200), ms(300)]);
        // Each caller gets its turn, and a new caller comes after them.
        for at in [100, 200, 300] {
            assert_eq!(limits.take_at(&all, ms(at)), Ok(()), "{at}");
        }
        assert_eq!(limits.take_at(&all, ms(300)), Err(ms(100)));
    }

    #[test]
    fn one_bucket_that_is_empty_takes_nothing_out_of_another() {
        let limits = Limits::new();
        let of = |chat: &str| [("all".to_owned(), Rate::per(10, 2)), (chat.to_owned(), Rate::per(1000, 1))];
        assert_eq!(limits.take_at(&of("a"), ms(0)), Ok(()));
        for _ in 0..5 {
            assert!(limits.take_at(&of("a"), ms(0)).unwrap_err() >= ms(1000));
        }
        assert_eq!(limits.take_at(&of("b"), ms(0)), Ok(()));
        assert!(limits.take_at(&of("c"), ms(0)).is_err());
    }

    #[test]
    fn what_the_messenger_asked_for_is_kept() {
        let limits = Limits::new();
        let all = [("all".to_owned(), Rate::per(10, 100))];
        limits.close_at("all", ms(5000), ms(0));
        limits.close_at("all", ms(1000), ms(0));
        assert_eq!(limits.take_at(&all, ms(0)), Err(ms(5000)));
        assert!(limits.take_at(&all, ms(4999)).is_err());
        assert_eq!(limits.take_at(&all, ms(5000)), Ok(()));
    }
}
