//! Delays between attempts.

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff;
use std::time::Duration;

/// Returns the delay before attempt `attempt + 1`: half a second, doubled with each attempt, up to a minute,
/// and then up to a fifth more or less at random. Never less than `at_least`, the delay that a provider asked
/// for.
pub fn delay(attempt: i32, at_least: Option<Duration>) -> Duration {
    let mut backoff = ExponentialBackoff {
        current_interval: Duration::from_millis(500),
        initial_interval: Duration::from_millis(500),
        randomization_factor: 0.2,
        multiplier: 2.0,
        max_interval: Duration::from_secs(60),
        max_elapsed_time: None,
        ..ExponentialBackoff::default()
    };
    let mut delay = Duration::ZERO;
    for _ in 0..attempt.clamp(1, 16) {
        delay = backoff.next_backoff().unwrap_or(Duration::from_secs(60));
    }
    delay.max(at_least.unwrap_or_default())
}

/// Returns `every`, a quarter more or less at random, so that the processes of a fleet do not act at the same moment.
pub fn jittered(every: Duration) -> Duration {
    let mut backoff = ExponentialBackoff {
        current_interval: every,
        initial_interval: every,
        randomization_factor: 0.25,
        multiplier: 1.0,
        max_interval: every,
        max_elapsed_time: None,
        ..ExponentialBackoff::default()
    };
    backoff.next_backoff().unwrap_or(every)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_minute_and_no_further() {
        assert!(delay(1, None) <= Duration::from_millis(600));
        assert!(delay(4, None) >= Duration::from_millis(3200));
        for attempt in [8, 16, 1000, i32::MAX] {
            let delay = delay(attempt, None);
            assert!(
                delay >= Duration::from_secs(48) && delay <= Duration::from_secs(72),
                "{attempt}: {delay:?}"
            );
        }
    }

    #[test]
    fn a_jittered_time_is_a_quarter_off_at_most() {
        let every = Duration::from_secs(40);
        for _ in 0..100 {
            let jittered = jittered(every);
            assert!(
                jittered >= Duration::from_secs(30) && jittered <= Duration::from_secs(50),
                "{jittered:?}"
            );
        }
    }

    #[test]
    fn what_the_provider_asks_for_is_granted() {
        assert_eq!(delay(1, Some(Duration::from_secs(90))), Duration::from_secs(90));
    }
}
