//! Recovers a state from any journal: in this database, in a file of lines, or in memory.
//!
//! The fold is in `workflow` and does no IO. All readers of journals are in this module, so that other
//! programs find them in one place.

mod lines;
mod memory;
pub(crate) mod postgres;

pub use lines::{Lines, LinesError};
pub use memory::Memory;
pub use postgres::Postgres;

use crate::Result;
use std::future::Future;
use wakeful_workflow::recover::{self, Checkpoint, Entry, Recovered};

/// A store of journal entries in order.
pub trait Journal {
    /// Returns the newest checkpoint of `id` with its state. `None`: there is no checkpoint or no such journal.
    fn last_checkpoint(&self, id: &str) -> impl Future<Output = Result<Option<Checkpoint>>> + Send;

    /// Returns every entry of `id` with a number above `seq`, in order.
    fn entries_after(&self, id: &str, seq: i64) -> impl Future<Output = Result<Vec<Entry>>> + Send;
}

/// Recovers `id` from its newest checkpoint and the entries after it.
///
/// # Errors
/// Those of `journal`.
pub async fn recover(journal: &impl Journal, id: &str) -> Result<Recovered> {
    let checkpoint = journal.last_checkpoint(id).await?;
    // Entries that arrive between the two reads come after the checkpoint, so they are included.
    let entries = journal.entries_after(id, checkpoint.as_ref().map_or(0, |one| one.seq)).await?;
    Ok(recover::recover(checkpoint, entries))
}
