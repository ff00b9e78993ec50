//! A button that is pressed twice acts once: each form carries a word of its own, and the second request with that word
//! waits for the first one and gets its answer.
//!
//! The API has keys of its own against duplicates, and refuses an act that no longer fits. This is for the person who
//! double-clicks, so it is in memory and of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::OnceCell;

/// How many presses are remembered.
const REMEMBERED: usize = 4096;

/// Where a person is led after an act, and what the page says there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub to: String,
    pub said: String,
    pub went_well: bool,
    /// What a person may want to look at then: its words, and where it is.
    pub next: Option<(String, String)>,
}

#[derive(Default)]
pub(crate) struct Presses(Mutex<Remembered>);

#[derive(Default)]
struct Remembered {
    by_key: HashMap<String, Arc<OnceCell<Outcome>>>,
    order: VecDeque<String>,
}

impl Presses {
    /// Does `act` at the first press of `key`, and returns its outcome at each. A failed act may be repeated.
    pub async fn once<E>(
        &self,
        key: String,
        act: impl Future<Output = Result<Outcome, E>>,
    ) -> Result<Outcome, E> {
        let cell = self.cell(key);
        cell.get_or_try_init(|| act).await.cloned()
    }

    fn cell(&self, key: String) -> Arc<OnceCell<Outcome>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cell) = known.by_key.get(&key) {
            return Arc::clone(cell);
        }
        if known.order.len() >= REMEMBERED
            && let Some(oldest) = known.order.pop_front()
        {
            known.by_key.remove(&oldest);
        }
        known.order.push_back(key.clone());
        Arc::clone(known.by_key.entry(key).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test]
    async fn a_press_acts_once_and_a_failed_one_may_be_repeated() {
        let (presses, acts) = (Presses::default(), AtomicUsize::new(0));
        let outcome = Outcome { to: "/".to_owned(), said: String::new(), went_well: true, next: None };
        let press = async |fails: bool| {
            let act = async {
                acts.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                if fails { Err(()) } else { Ok(outcome.clone()) }
            };
            presses.once("key".to_owned(), act).await
        };
        assert_eq!(press(true).await, Err(()));
        let (first, second) = tokio::join!(press(false), press(false));
        assert_eq!((first, second), (Ok(outcome.clone()), Ok(outcome.clone())));
        assert_eq!(acts.load(Ordering::SeqCst), 2);
        for other in 0..REMEMBERED {
            let _: Result<Outcome, ()> = presses.once(other.to_string(), async { Ok(outcome.clone()) }).await;
        }
        assert!(presses.0.lock().unwrap().by_key.len() <= REMEMBERED);
    }
}
