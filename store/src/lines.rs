//! The tasks of a process that want to write the same session stand in line for it, and only the first has a connection.
//!
//! Another transaction may hold a session's row for seconds: a person's, or that of a process that was stopped in the middle of
//! it. Each statement that waits for such a row keeps its connection meanwhile, and a process has few. So those that would
//! wait behind it in the database wait here, without one, and all other sessions go on. The first gives up after the time that
//! a connection waits for a lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long one waits to be first: a little shorter than a statement waits for a lock. So when the first gives up, those behind it
/// have done so, and do not begin to wait for the same lock.
pub const WAITS: Duration = Duration::from_secs(4);

/// The lines of a process. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Lines(Arc<Mutex<HashMap<Arc<str>, Line>>>);

#[derive(Debug)]
struct Line {
    front: Arc<Semaphore>,
    /// How many stand in it, with the first.
    length: usize,
}

/// The first place of a line. Dropping it lets the next one go first.
#[derive(Debug)]
pub struct Front {
    _place: Place,
    _front: OwnedSemaphorePermit,
}

/// A place in a line.
#[derive(Debug)]
struct Place {
    lines: Lines,
    key: Arc<str>,
}

/// Why the first place was not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotReached {
    /// Too many stand in this line already.
    TooMany,
    /// The first one took too long: another transaction holds its row.
    TooLate,
}

/// A row is held by another transaction. Inside of an `sqlx::Error`, as the pool reports it.
#[derive(Debug, thiserror::Error)]
#[error("another task of this process waits for the same row")]
pub(crate) struct Held;

impl Lines {
    /// Stands in the line of `key`, in which at most `most` may stand, until it is first there, for at most `wait` ([`WAITS`]).
    ///
    /// # Errors
    /// See [`NotReached`].
    pub async fn front(&self, key: &Arc<str>, most: usize, wait: Duration) -> Result<Front, NotReached> {
        let (place, front) = self.enter(key, most).ok_or(NotReached::TooMany)?;
        match tokio::time::timeout(wait, front.acquire_owned()).await {
            Ok(Ok(front)) => Ok(Front { _place: place, _front: front }),
            // It is never closed.
            Ok(Err(_)) | Err(_) => Err(NotReached::TooLate),
        }
    }

    fn enter(&self, key: &Arc<str>, most: usize) -> Option<(Place, Arc<Semaphore>)> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Line { front: Arc::new(Semaphore::new(1)), length: 0 };
        let line = lines.entry(Arc::clone(key)).or_insert_with(new);
        if line.length >= most {
            return None;
        }
        line.length += 1;
        Some((Place { lines: self.clone(), key: Arc::clone(key) }, Arc::clone(&line.front)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lines = self.lines.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.get_mut(&self.key) {
            line.length -= 1;
            if line.length == 0 {
                lines.remove(&self.key);
            }
        }
    }
}

impl From<NotReached> for sqlx::Error {
    fn from(_: NotReached) -> sqlx::Error {
        sqlx::Error::AnyDriverError(Box::new(Held))
    }
}

impl From<NotReached> for crate::Error {
    fn from(not_reached: NotReached) -> crate::Error {
        crate::Error::Database(not_reached.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn one_is_first_and_a_line_that_is_left_is_forgotten() {
        let lines = Lines::default();
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let first = lines.front(&a, 2, SOON).await.unwrap();
        assert_eq!(lines.front(&a, 1, SOON).await.unwrap_err(), NotReached::TooMany);
        assert_eq!(lines.front(&a, 2, SOON).await.unwrap_err(), NotReached::TooLate);
        let other = lines.front(&b, 1, SOON).await.unwrap();
        let next = lines.front(&a, 2, Duration::from_secs(60));
        let (next, ()) = tokio::join!(next, async { drop(first) });
        drop((next.unwrap(), other));
        assert!(lines.0.lock().unwrap().is_empty());
    }
}
