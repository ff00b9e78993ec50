//! Whether the database would accept a write now. A query cannot tell: a server with a full disk answers
//! every query and refuses only writes that need space. So the store remembers the last refusal until a write
//! succeeds.

use crate::error::Outage;
use crate::{Error, Result, Store};
use sqlx::{ConnectOptions, Connection};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a refusal counts if no write follows. A process that only accepts messages gets none while it is
/// not ready, so it would never notice that the database has recovered.
const REMEMBERED: Duration = Duration::from_secs(90);

/// How long the pool may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

/// The last write that the database refused because of its own state. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusal(Arc<Mutex<Option<(Outage, Instant)>>>);

impl Refusal {
    fn set(&self, refusal: Option<(Outage, Instant)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = refusal;
    }

    fn get(&self) -> Option<Outage> {
        let refusal = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        refusal.filter(|(_, at)| at.elapsed() < REMEMBERED).map(|(outage, _)| outage)
    }
}

impl Store {
    /// Whether the database answers and accepts writes. Returns `None` if so, otherwise what is wrong.
    ///
    /// # Errors
    /// [`Error::Database`] when it does not answer.
    pub async fn readiness(&self) -> Result<Option<Outage>> {
        let asked = sqlx::query_scalar!(
            r#"select pg_is_in_recovery() or current_setting('transaction_read_only')::boolean as "read_only!""#
        );
        match tokio::time::timeout(ANSWER, asked.fetch_one(&self.pool)).await {
            Ok(Ok(true)) => Ok(Some(Outage::ReadOnly)),
            // A server that is writable again says so in its settings. A full disk is not visible there.
            Ok(Ok(false)) => Ok(self.refusal.get().filter(|outage| *outage != Outage::ReadOnly)),
            Ok(Err(error)) if !matches!(error, sqlx::Error::PoolTimedOut) => Err(error.into()),
            // The pool reports only that it waited. A separate connection shows the reason.
            Ok(Err(_)) | Err(_) => match tokio::time::timeout(ANSWER, self.options.connect()).await {
                Ok(Ok(connection)) => {
                    // The connection was only a test.
                    let _ = connection.close().await;
                    Ok(Some(Outage::Crowded))
                }
                Ok(Err(error)) => Err(error.into()),
                Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()).into()),
            },
        }
    }

    /// Remembers the result of a write that adds rows.
    pub(crate) fn noted<T>(&self, done: Result<T>) -> Result<T> {
        match &done {
            Ok(_) => self.refusal.set(None),
            Err(error) => self.note(error),
        }
        done
    }

    fn note(&self, error: &Error) {
        if let Some(outage) = error.outage().filter(|outage| outage.refuses_writes()) {
            self.refusal.set(Some((outage, Instant::now())));
        }
    }
}
