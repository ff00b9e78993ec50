//! Import: turns a bundle into a session of this database, completely or not at all.
//!
//! It reads the file three times, and checks it each time. The first reading writes nothing. The second
//! writes the blobs, if there are any, each on its own (see `blobs.rs`). The third writes the rows in one
//! transaction, which commits only if all readings gave the same checksum. The written rows start nothing: no
//! job, no open run, nothing to send (see `workflow::bundle::import`).

mod blobs;
mod source;
pub(crate) mod write;

use crate::audit::act;
use crate::encryption::Seal;
use crate::{Error, Result, Store, new_id};
use blobs::Blobs;
use serde::Serialize;
use source::{Source, failed};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;
use wakeful_workflow::bundle::check::{Checked, Summary};
use wakeful_workflow::bundle::import::Adoption;
use wakeful_workflow::bundle::{Checker, Counts, Limits, Line, Section};
use write::Writer;

/// Approximate number of bytes of rows written at a time.
const BATCH_BYTES: usize = 1 << 20;

/// The result of an import or of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Imported {
    /// `None` if the bundle was only checked.
    pub session_id: Option<String>,
    /// Without the space, as in the API.
    pub conversation_id: Option<String>,
    /// The session's id in the database that exported it.
    pub exported_session_id: String,
    /// Its status at the export. A session that was open becomes `failed` here.
    pub exported_status: &'static str,
    pub redacted: bool,
    /// Rows by kind, blobs included.
    pub counts: BTreeMap<&'static str, i64>,
    pub bytes: u64,
    pub sha256: String,
}

impl Imported {
    fn of(summary: &Summary) -> Imported {
        let counts: Counts = summary.header.counts;
        Imported {
            session_id: None,
            conversation_id: None,
            exported_session_id: summary.header.session_id.clone(),
            exported_status: summary.session.status.as_str(),
            redacted: summary.header.redacted,
            counts: counts.each().into_iter().chain([("blobs", summary.blobs)]).collect(),
            bytes: summary.bytes,
            sha256: summary.sha256.clone(),
        }
    }
}

/// Checks a whole bundle and writes nothing. Calls `told` with the number of bytes of the file read so far.
///
/// # Errors
/// [`Error::Bundle`], [`Error::NotFound`] for a missing file, [`Error::File`].
pub async fn check(file: &Path, limits: Limits, told: impl Fn(u64) + Send + 'static) -> Result<Imported> {
    Ok(Imported::of(&checked(file.to_owned(), limits, told).await?))
}

async fn checked(file: PathBuf, limits: Limits, told: impl Fn(u64) + Send + 'static) -> Result<Summary> {
    let check = move || {
        let mut source = Source::open(&file, limits)?;
        let mut checker = Checker::new(limits);
        while let Some(line) = source.line(&checker)? {
            checker.line(line)?;
            told(source.read());
        }
        Ok(checker.finish()?)
    };
    tokio::task::spawn_blocking(check).await.map_err(|error| Error::corrupt("check", error))?
}

impl Store {
    /// Imports the bundle in `file` (plain or gzip) into the space, as a new session of a new conversation.
    /// Importing the same bundle twice gives two sessions. Calls `told` with the number of bytes of the file
    /// read so far.
    ///
    /// # Errors
    /// [`Error::Bundle`] for an incomplete or inconsistent bundle, [`Error::NotFound`] for a missing file,
    /// [`Error::File`], [`Error::Database`]. No row is written then. A refused bundle leaves no blob either.
    pub async fn import(
        &self,
        file: &Path,
        space_id: &str,
        limits: Limits,
        told: impl Fn(u64) + Send + 'static,
    ) -> Result<Imported> {
        let summary = checked(file.to_owned(), limits, told).await?;
        let (session_id, conversation) = (new_id("sess"), new_id("conv"));
        let stored = format!("{space_id}/{conversation}");
        let mut connection = self.pool.acquire().await?;
        let data_key = self.vault.begin(&mut connection, &summary.session.agent, &stored).await?;
        drop(connection);
        let seal = self.vault.seal(data_key.as_deref()).await?;
        if summary.blobs > 0 {
            self.import_blobs(file, (space_id, &session_id), limits, &summary, &seal).await?;
        }
        let mut tx = self.pool.begin_long().await?;
        let inbox = write::inbox_ids(&mut tx, &summary.inbox).await?;
        let adoption = Adoption::new(&session_id, space_id, &conversation, inbox);
        let mut writer = Writer::new(adoption, &summary, seal);
        let mut batches = batches(file.to_owned(), limits, Reading::Rows);
        let mut again = None;
        while let Some(batch) = batches.recv().await {
            match batch? {
                Batch::Rows(rows) => writer.write(&mut tx, rows).await?,
                Batch::End(sha256) => again = Some(sha256),
            }
        }
        // An error drops the transaction, which undoes it.
        unchanged(file, again.as_deref(), &summary.sha256)?;
        writer.end(&mut tx).await?;
        crate::failpoint!("K42");
        act::on(&session_id);
        tx.commit().await?;
        Ok(Imported {
            session_id: Some(session_id),
            conversation_id: Some(conversation),
            ..Imported::of(&summary)
        })
    }

    async fn import_blobs(
        &self,
        file: &Path,
        owner: (&str, &str),
        limits: Limits,
        summary: &Summary,
        seal: &Seal,
    ) -> Result<()> {
        let prefix = summary.session.prefix_sha256.as_deref();
        let mut blobs = Blobs::default();
        let mut batches = batches(file.to_owned(), limits, Reading::Blobs);
        let mut again = None;
        while let Some(batch) = batches.recv().await {
            match batch? {
                Batch::Rows(rows) => {
                    for row in &rows {
                        if let Line::Blob(part) = row {
                            blobs.write(self, seal, prefix, owner, part).await?;
                        }
                    }
                }
                Batch::End(sha256) => again = Some(sha256),
            }
        }
        unchanged(file, again.as_deref(), &summary.sha256)
    }
}

/// Fails unless a later reading gave the same checksum as the first.
fn unchanged(file: &Path, again: Option<&str>, first: &str) -> Result<()> {
    if again == Some(first) {
        return Ok(());
    }
    Err(failed(file, std::io::Error::other("the file changed while it was being imported")))
}

/// The rows that a reading of the file writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    Blobs,
    Rows,
}

/// Rows of one section, or the checksum of the whole.
enum Batch {
    Rows(Vec<Line>),
    End(String),
}

/// A later reading. Sends lines in batches as they are checked, slightly ahead of the writer.
fn batches(file: PathBuf, limits: Limits, reading: Reading) -> mpsc::Receiver<Result<Batch>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::task::spawn_blocking(move || {
        let read = send_batches(&file, limits, reading, &sender);
        if let Err(error) = read {
            // If the receiver is gone, the import has stopped already.
            let _ = sender.blocking_send(Err(error));
        }
    });
    receiver
}

fn send_batches(
    file: &Path,
    limits: Limits,
    reading: Reading,
    sender: &mpsc::Sender<Result<Batch>>,
) -> Result<()> {
    let mut source = Source::open(file, limits)?;
    let mut checker = Checker::new(limits);
    let (mut rows, mut bytes, mut section) = (Vec::new(), 0, Section::Session);
    while let Some(line) = source.line(&checker)? {
        let length = line.len();
        let Checked::Row(row) = checker.line(line)? else { continue };
        if (row.section() == Section::Blob) != (reading == Reading::Blobs) {
            continue;
        }
        let full = bytes + length > BATCH_BYTES || row.section() != section;
        if full && !rows.is_empty() {
            if sender.blocking_send(Ok(Batch::Rows(std::mem::take(&mut rows)))).is_err() {
                return Ok(());
            }
            bytes = 0;
        }
        section = row.section();
        bytes += length;
        rows.push(*row);
    }
    let summary = checker.finish()?;
    let last = [Batch::Rows(rows), Batch::End(summary.sha256)];
    for batch in last {
        if sender.blocking_send(Ok(batch)).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// New ids of inbox rows, by their ids in the bundle.
type InboxIds = HashMap<i64, i64>;
