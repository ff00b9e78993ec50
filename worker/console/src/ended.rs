//! Logins that their person has ended. The cookie alone does not tell: a copy of it looks like the cookie of a login that lasts.
//!
//! They are in memory and of one process, as the presses are: another process of the API learns nothing of them.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};

/// How many are remembered. What was ended longest ago gives way.
const MOST: usize = 10_000;

#[derive(Default)]
pub(crate) struct Ended(Mutex<Remembered>);

#[derive(Default)]
struct Remembered {
    ids: HashSet<String>,
    /// Each with the time at which it would have ended by itself, in seconds since 1970.
    order: VecDeque<(String, i64)>,
}

impl Ended {
    /// Ends a login that would last until `until`.
    pub fn end(&self, id: &str, until: i64, now: i64) {
        let mut ended = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.ids.insert(id.to_owned()) {
            ended.order.push_back((id.to_owned(), until));
        }
        loop {
            let is_over = ended.order.front().is_some_and(|(_, until)| *until <= now);
            if !is_over && ended.order.len() <= MOST {
                return;
            }
            let Some((oldest, _)) = ended.order.pop_front() else { return };
            ended.ids.remove(&oldest);
        }
    }

    pub fn has(&self, id: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).ids.contains(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_remembered_as_long_as_it_could_last_and_the_oldest_give_way() {
        let ended = Ended::default();
        ended.end("a", 100, 1);
        ended.end("a", 100, 1);
        ended.end("b", 200, 2);
        assert!(ended.has("a") && ended.has("b") && !ended.has("c"));
        ended.end("c", 300, 100);
        assert!(!ended.has("a") && ended.has("b") && ended.has("c"));
        for n in 0..MOST {
            ended.end(&n.to_string(), 300, 100);
        }
        assert!(!ended.has("b") && !ended.has("c") && ended.has("0"));
    }
}
