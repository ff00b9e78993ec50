//! Tells whether the database would accept a write now. A read cannot tell: a server with a full disk answers
//! queries and refuses inserts. So the store remembers the last refusal until a write succeeds.

use crate::error::Outage;
use crate::pool::Use;
use crate::{Error, Result, Store};
use sqlx::Connection;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a refusal is remembered without a write. A process that only takes messages gets no messages
/// while it is not ready. Without this limit it would never write again, and the refusal would never be
/// cleared.
const REMEMBERED: Duration = Duration::from_secs(90);

/// Longest wait for the pool.
const ANSWER: Duration = Duration::from_secs(2);

/// The last write that the database refused as a whole. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusal(Arc<Mutex<Writes>>);

#[derive(Clone, Copy, Debug, Default)]
struct Writes {
    refused: Option<(Outage, Instant)>,
    taken_at: Option<Instant>,
}

impl Refusal {
    fn writes(&self) -> MutexGuard<'_, Writes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> Option<Outage> {
        let refusal = self.writes().refused;
        refusal.filter(|(_, at)| at.elapsed() < REMEMBERED).map(|(outage, _)| outage)
    }
}

impl Store {
    /// Checks that the database answers and takes writes. Returns `None`, or the outage.
    ///
    /// # Errors
    /// [`Error::Database`] when it does not answer.
    pub async fn readiness(&self) -> Result<Option<Outage>> {
        let asked = sqlx::query_scalar!(
            r#"select pg_is_in_recovery() or current_setting('transaction_read_only')::boolean as "read_only!""#
        );
        match tokio::time::timeout(ANSWER, asked.fetch_one(&self.pool)).await {
            Ok(Ok(true)) => Ok(Some(Outage::ReadOnly)),
            // The server itself reports that it is read-only. It does not report a full disk, so use the remembered
            // refusal.
            Ok(Ok(false)) => Ok(self.refusal.get().filter(|outage| *outage != Outage::ReadOnly)),
            Ok(Err(error)) if !matches!(error, sqlx::Error::PoolTimedOut) => Err(error.into()),
            // A pool only reports that it waited. A separate connection gives the reason.
            Ok(Err(_)) | Err(_) => match tokio::time::timeout(ANSWER, self.server.connect(&[])).await {
                Ok(Ok(connection)) => {
                    // The connection was opened only for this check.
                    let _ = connection.close().await;
                    Ok(Some(Outage::Crowded))
                }
                Ok(Err(error)) => Err(error.into()),
                Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()).into()),
            },
        }
    }

    /// Returns the connections that this process has lost and not got back: what each is for, and for how long it has been lost.
    pub fn lost_connections(&self) -> Vec<(&'static str, Duration)> {
        self.server.links.all_lost()
    }

    /// Since when no statement of this process has got a connection. `None`: they have some.
    pub fn no_statement_since(&self) -> Option<Instant> {
        self.server.links.lost_since(Use::Statements)
    }

    /// When the work last found the database to be well: a write was taken, or a lost connection came back.
    pub fn last_well(&self) -> Option<Instant> {
        self.refusal.writes().taken_at.max(self.server.links.back_at())
    }

    /// Returns how many steps the database fails again and again, although it answers. `None`: that cannot be said now.
    pub async fn count_faulty_steps(&self) -> Option<i64> {
        let asked = sqlx::query_scalar!(
            r#"select count(*) as "steps!" from (
                select from jobs where fault_since is not null and faults > 1 limit 1000
            ) faulty"#
        );
        tokio::time::timeout(ANSWER, asked.fetch_one(&self.pool)).await.ok()?.ok()
    }

    /// Remembers the result of a write that adds rows.
    pub(crate) fn note_refusal<T>(&self, done: Result<T>) -> Result<T> {
        match &done {
            Ok(_) => *self.refusal.writes() = Writes { refused: None, taken_at: Some(Instant::now()) },
            Err(error) => self.note(error),
        }
        done
    }

    fn note(&self, error: &Error) {
        if let Some(outage) = error.outage().filter(|outage| outage.refuses_writes()) {
            self.refusal.writes().refused = Some((outage, Instant::now()));
        }
    }
}
