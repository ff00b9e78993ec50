//! Answers of the API that many open pages share.
//!
//! A page that looks again by itself says so. If another page of the same reach has just asked the same, it gets that answer, so
//! many pages that stay open cost the database as much as one. What a person loads is always read anew, and an act forgets
//! all answers: nobody sees a state that is older than what they saw.

use crate::refusal::Refusal;
use axum::body::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How old an answer may be. Less than the time between two looks of a page.
const LASTS: Duration = Duration::from_secs(4);
/// How many answers are kept, and how large each may be.
const MOST: usize = 128;
const BYTES: usize = 256 << 10;

/// One answer, and when it was given. The task that holds the lock asks for it; the others wait.
type Slot = Arc<tokio::sync::Mutex<Option<(Instant, Bytes)>>>;

/// The answers of the last seconds.
#[derive(Default)]
pub(crate) struct Recent(Mutex<HashMap<(Reach, String), Slot>>);

/// What a token lets somebody see. Those who have the same get the same answers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reach {
    pub scope: String,
    pub space_id: String,
    pub everywhere: bool,
    pub agent: Option<String>,
}

impl Recent {
    /// Returns the recent answer for this path, or asks.
    ///
    /// # Errors
    /// Those of `ask`, which are not kept.
    pub async fn answer(
        &self,
        reach: &Reach,
        path: &str,
        ask: impl Future<Output = Result<Bytes, Refusal>>,
    ) -> Result<Bytes, Refusal> {
        let Some(slot) = self.slot(reach, path) else { return ask.await };
        let mut kept = slot.lock().await;
        if let Some((at, body)) = &*kept
            && at.elapsed() < LASTS
        {
            return Ok(body.clone());
        }
        let began = Instant::now();
        let body = ask.await?;
        *kept = (body.len() <= BYTES).then(|| (began, body.clone()));
        Ok(body)
    }

    /// Something changed.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn slot(&self, reach: &Reach, path: &str) -> Option<Slot> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (reach.clone(), path.to_owned());
        if let Some(slot) = slots.get(&key) {
            return Some(Arc::clone(slot));
        }
        if slots.len() >= MOST {
            // One that is locked is being asked for.
            slots.retain(|_, slot| {
                slot.try_lock().map_or(true, |kept| matches!(&*kept, Some((at, _)) if at.elapsed() < LASTS))
            });
        }
        (slots.len() < MOST).then(|| Arc::clone(slots.entry(key).or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn reach(agent: Option<&str>) -> Reach {
        let (scope, space_id) = ("read".to_owned(), "default".to_owned());
        Reach { scope, space_id, everywhere: false, agent: agent.map(str::to_owned) }
    }

    #[tokio::test(start_paused = true)]
    async fn those_of_one_reach_share_an_answer_until_somebody_acts() {
        let (recent, asked) = (Recent::default(), AtomicUsize::new(0));
        let look = async |reach: &Reach, path: &str| {
            let ask = async {
                // The others come while this one asks.
                tokio::task::yield_now().await;
                Ok(Bytes::from(asked.fetch_add(1, Ordering::Relaxed).to_string()))
            };
            recent.answer(reach, path, ask).await.expect("an answer")
        };
        let (all, one) = (reach(None), reach(Some("sales")));
        let answers = tokio::join!(look(&all, "/a"), look(&all, "/a"), look(&one, "/a"), look(&all, "/b"));
        assert_eq!(answers.0, answers.1, "one asked for both");
        assert_eq!(asked.load(Ordering::Relaxed), 3, "another reach and another path are asked for");
        recent.forget();
        assert_eq!(look(&all, "/a").await, "3", "an act forgets all");
    }

    #[tokio::test]
    async fn a_refusal_and_a_large_answer_are_not_kept() {
        let (recent, all) = (Recent::default(), reach(None));
        let refused = async { Err(Refusal::new(axum::http::StatusCode::SERVICE_UNAVAILABLE, "away")) };
        assert!(recent.answer(&all, "/a", refused).await.is_err());
        let large = async { Ok(Bytes::from(vec![b' '; BYTES + 1])) };
        assert!(recent.answer(&all, "/a", large).await.is_ok());
        let then = recent.answer(&all, "/a", async { Ok(Bytes::from_static(b"then")) }).await;
        assert_eq!(then.expect("an answer"), "then");
        // With no room left it asks.
        for n in 0..MOST {
            let path = format!("/{n}");
            recent.answer(&all, &path, async { Ok(Bytes::new()) }).await.expect("an answer");
        }
        let over = recent.answer(&all, "/over", async { Ok(Bytes::from_static(b"over")) }).await;
        assert_eq!(over.expect("an answer"), "over");
    }
}
