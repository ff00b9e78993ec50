//! Lines of the log that strangers, or a whole outage's requests, could cause without end: one of a kind in a while, with a count
//! of those that were left out.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines of a kind.
const QUIET: Duration = Duration::from_secs(60);

/// When a line of each kind was written last.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<BTreeMap<&'static str, Kind>>);

#[derive(Debug)]
struct Kind {
    written: Instant,
    left_out: u64,
}

impl Seldom {
    /// No line was written yet.
    pub const fn new() -> Seldom {
        Seldom(Mutex::new(BTreeMap::new()))
    }

    /// Returns whether a line of this kind is to be written now: how many were left out since the last one.
    pub fn turn(&self, kind: &'static str) -> Option<u64> {
        self.turn_at(kind, Instant::now())
    }

    fn turn_at(&self, kind: &'static str, now: Instant) -> Option<u64> {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match kinds.get_mut(kind) {
            Some(one) if now.duration_since(one.written) < QUIET => {
                one.left_out += 1;
                None
            }
            Some(one) => {
                one.written = now;
                Some(std::mem::take(&mut one.left_out))
            }
            None => {
                kinds.insert(kind, Kind { written: now, left_out: 0 });
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_has_one_line_in_a_while_which_counts_those_that_were_left_out() {
        let (seldom, start) = (Seldom::new(), Instant::now());
        let at = |kind, seconds| seldom.turn_at(kind, start + Duration::from_secs(seconds));
        assert_eq!(at("one", 0), Some(0));
        assert_eq!((at("one", 1), at("one", 59)), (None, None));
        assert_eq!(at("other", 59), Some(0), "each kind has its own line");
        assert_eq!(at("one", 60), Some(2));
        assert_eq!((at("one", 61), at("one", 130)), (None, Some(1)));
    }
}
