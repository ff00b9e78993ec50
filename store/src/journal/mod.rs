//! Recovery over any journal: this database, a file of lines, or memory.
//!
//! The fold is in `workflow` and reads nothing. The readers of all three journals are here, so that a program
//! finds them in one place.

mod lines;
mod memory;
pub(crate) mod postgres;

pub use lines::{Lines, LinesError};
pub use memory::Memory;
pub use postgres::Postgres;

use crate::Result;
use std::future::Future;
use wakeful_workflow::recover::{self, Checkpoint, Entry, Recovered};

/// A journal: entries in the order in which they happened.
pub trait Journal {
    /// The newest checkpoint of `id` with its state. `None` if there is no checkpoint or no such journal.
    fn last_checkpoint(&self, id: &str) -> impl Future<Output = Result<Option<Checkpoint>>> + Send;

    /// Every entry of `id` whose number is above `seq`, in order.
    fn entries_after(&self, id: &str, seq: i64) -> impl Future<Output = Result<Vec<Entry>>> + Send;
}

/// Recovers `id`: its newest checkpoint, and the entries after it.
///
/// # Errors
/// Those of `journal`.
pub async fn recover(journal: &impl Journal, id: &str) -> Result<Recovered> {
    let checkpoint = journal.last_checkpoint(id).await?;
    // Entries that are written between the two reads come after the checkpoint, so the fold includes them.
    let entries = journal.entries_after(id, checkpoint.as_ref().map_or(0, |one| one.seq)).await?;
    Ok(recover::recover(checkpoint, entries))
}
