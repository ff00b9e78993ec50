//! The record of what has happened outside: a call that took effect, a message that went out.

use std::time::Duration;
use tracing::warn;
use wakeful_store::Result;
use wakeful_store::queue::{self, Lease};

/// Longest pause before the next try. When the database is back, that must come before another worker's claim.
pub(crate) const LONGEST: Duration = Duration::from_millis(500);

/// Records the outcome of `what`, such as "call call_1", by `record`, which is fenced by the lease. Tries again while the database is
/// away, even after the end of the lease, because no worker can claim the job meanwhile. Without the record, what has happened would
/// be done again or count as uncertain.
///
/// # Errors
/// Those of `record` which another try cannot mend, and any error once another worker has the job.
pub async fn record<T, F>(lease: &Lease, what: &str, mut record: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let mut faults = 0;
    loop {
        match record().await {
            Err(error) if error.is_transient() && !lease.lost().is_cancelled() => {
                faults += 1;
                warn!(%error, what, "An outcome was not recorded; trying again");
                tokio::time::sleep(queue::delay(faults, None).min(LONGEST)).await;
            }
            recorded => return recorded,
        }
    }
}
