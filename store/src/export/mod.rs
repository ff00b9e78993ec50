//! Export: writes a session as a bundle, line by line, even while its run continues.
//!
//! One short snapshot reads what may still change (the session's row, its runs, open calls, unsent
//! deliveries, pending messages), and the numbers at which the logs end. The logs only grow, so pages read
//! them by key up to those numbers, without a transaction. Calls and deliveries have no key in the bundle's order, so one
//! statement each reads those that have settled, into a temporary file. A snapshot that stayed open for a slow reader
//! would keep every dead row of a busy queue. Whatever the session's size, memory holds only a page of it and
//! one blob.

mod pages;
mod record;
mod row;
mod snapshot;

use crate::encryption::Seal;
use crate::{Error, Result, Store};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pages::Page;
pub(crate) use record::taken;
pub use record::{Taken, VERB};
use sha2::{Digest, Sha256};
use snapshot::{Snapshot, SnapshotRows};
use std::collections::{BTreeMap, VecDeque};
use wakeful_workflow::bundle::redact::{KEY_BYTES, Redaction, media_type};
use wakeful_workflow::bundle::{BlobPart, Header, Line, PART_BYTES, Trailer, blobs_of, line};

/// Approximate number of bytes read at a time.
const PAGE_BYTES: i64 = 1 << 20;
/// Maximum number of rows read at a time.
const PAGE_ROWS: i64 = 500;

/// An export in progress.
pub struct Export {
    store: Store,
    snapshot: Snapshot,
    /// Opens the texts: a bundle is in clear.
    seal: Seal,
    /// For a redacted bundle.
    redaction: Option<Redaction>,
    stage: Stage,
    hash: Sha256,
    /// Blobs to write: the stored name, by the name in the bundle.
    blobs: BTreeMap<String, String>,
    pager: Pager,
    /// Rows of the present section that are not in the last page, if one statement read all of the section.
    settled: Option<SnapshotRows>,
    /// Rows of the last page that are not written yet, and the stage after them if there is no further page.
    queue: VecDeque<Line>,
    ended: Option<Stage>,
    places: i64,
}

/// What to write next.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    Head,
    Seeds(i32),
    Runs,
    Records(i64),
    Steps(i64),
    Events(i64),
    Calls(i64, String),
    Deliveries(i64),
    Inbox(i64),
    Blobs,
    Trailer,
    Done,
}

impl Stage {
    /// The stage at which reading continues after `line`.
    fn after(line: &Line) -> Stage {
        match line {
            Line::Session(_) => Stage::Head.section_after(),
            Line::Seed(row) => Stage::Seeds(row.ordinal),
            Line::Run(_) => Stage::Runs,
            Line::Record(row) => Stage::Records(row.message_number),
            Line::Step(row) => Stage::Steps(row.step_number),
            Line::Event(row) => Stage::Events(row.seq),
            Line::Call(row) => Stage::Calls(row.message_number, row.call_id.clone()),
            Line::Delivery(row) => Stage::Deliveries(row.place),
            Line::Inbox(row) => Stage::Inbox(row.inbox_id),
            Line::Blob(_) => Stage::Blobs,
        }
    }

    /// The start of the next section.
    fn section_after(&self) -> Stage {
        match self {
            // A page starts after the given number, and seeds are numbered from 0.
            Stage::Head => Stage::Seeds(-1),
            Stage::Seeds(_) => Stage::Runs,
            Stage::Runs => Stage::Records(0),
            Stage::Records(_) => Stage::Steps(0),
            Stage::Steps(_) => Stage::Events(0),
            Stage::Events(_) => Stage::Calls(0, String::new()),
            Stage::Calls(..) => Stage::Deliveries(0),
            Stage::Deliveries(_) => Stage::Inbox(0),
            Stage::Inbox(_) => Stage::Blobs,
            Stage::Blobs => Stage::Trailer,
            Stage::Trailer | Stage::Done => Stage::Done,
        }
    }
}

/// Number of rows to read for the next page: about [`PAGE_BYTES`], estimated by the size of the last page.
#[derive(Clone, Copy, Debug)]
struct Pager {
    rows: i64,
}

impl Pager {
    fn weighed(&mut self, rows: usize, bytes: i64) {
        let each = (bytes / (rows as i64).max(1)).max(1);
        self.rows = (PAGE_BYTES / each).clamp(1, PAGE_ROWS);
    }
}

impl Store {
    /// Begins a bundle of the session as it is now. With `redacted`, the bundle contains no texts. If the task is an act,
    /// the audit says so before anything is read, so that an erasure knows of the bundle.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn export(&self, session_id: &str, redacted: bool) -> Result<Export> {
        self.record_export(session_id).await?;
        Ok(Export {
            seal: self.own_seal_of(session_id).await?,
            snapshot: Snapshot::take(self, session_id, redacted).await?,
            store: self.clone(),
            redaction: redacted.then(redaction).transpose()?,
            stage: Stage::Head,
            hash: Sha256::new(),
            blobs: BTreeMap::new(),
            pager: Pager { rows: 50 },
            settled: None,
            queue: VecDeque::new(),
            ended: None,
            places: 0,
        })
    }
}

/// A redaction with a key of its own.
fn redaction() -> Result<Redaction> {
    let mut key = [0; KEY_BYTES];
    aws_lc_rs::rand::fill(&mut key)
        .map_err(|_| Error::corrupt("export", "the system gives no random bytes"))?;
    Ok(Redaction::new(key))
}

impl Export {
    /// The bundle's first line.
    pub fn header(&self) -> &Header {
        &self.snapshot.header
    }

    /// The next complete lines of the bundle; `None` after the last one.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Database`]. The output so far is then not a valid bundle, because its
    /// last line is missing.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            let stage = self.stage.clone();
            let chunk = match stage {
                Stage::Head => self.head().await?,
                Stage::Blobs => self.blob().await?,
                Stage::Trailer => {
                    self.stage = stage.section_after();
                    let sha256 = hex::encode(self.hash.clone().finalize());
                    line(&Trailer { sha256 })
                }
                Stage::Done => return Ok(None),
                Stage::Seeds(_)
                | Stage::Runs
                | Stage::Records(_)
                | Stage::Steps(_)
                | Stage::Events(_)
                | Stage::Calls(..)
                | Stage::Deliveries(_)
                | Stage::Inbox(_) => self.rows(&stage).await?,
            };
            if !chunk.is_empty() {
                self.hash.update(&chunk);
                return Ok(Some(chunk));
            }
        }
    }

    async fn head(&mut self) -> Result<Vec<u8>> {
        self.stage = self.stage.section_after();
        let mut chunk = line(&self.snapshot.header);
        let session = Line::Session(self.snapshot.session.clone());
        chunk.extend(self.written(session).await?);
        Ok(chunk)
    }

    /// About a page of rows: settled rows from the pages, merged in order with the rows of the snapshot.
    async fn rows(&mut self, stage: &Stage) -> Result<Vec<u8>> {
        if self.queue.is_empty() && self.ended.is_none() {
            let Page { lines, next, bytes } = self.page(stage).await?;
            if lines.is_empty() {
                self.ended = Some(next);
            } else {
                self.pager.weighed(lines.len(), bytes);
                self.stage = next;
                self.queue.extend(lines);
            }
        }
        let mut chunk = Vec::new();
        while chunk.len() < PAGE_BYTES as usize {
            match self.pick()? {
                Some(line) => chunk.extend(self.written(line).await?),
                None => {
                    if let Some(next) = self.ended.take() {
                        self.stage = next;
                    }
                    break;
                }
            }
        }
        Ok(chunk)
    }

    /// The next row of the section. `None` if another page must be read, or if the section has ended.
    fn pick(&mut self) -> Result<Option<Line>> {
        let spool = match &self.stage {
            Stage::Runs => Some(&mut self.snapshot.runs),
            Stage::Calls(..) => Some(&mut self.snapshot.calls),
            Stage::Deliveries(_) => Some(&mut self.snapshot.deliveries),
            Stage::Inbox(_) => Some(&mut self.snapshot.inbox),
            Stage::Head
            | Stage::Seeds(_)
            | Stage::Records(_)
            | Stage::Steps(_)
            | Stage::Events(_)
            | Stage::Blobs
            | Stage::Trailer
            | Stage::Done => None,
        };
        let open = spool.as_ref().and_then(|spool| spool.peek()).map(key);
        let picked = match (self.queue.front().map(key), open, spool) {
            (Some(row), Some(open), Some(spool)) if open <= row => {
                // The row has settled since the snapshot. Write it as it was at the cut.
                if open == row {
                    self.queue.pop_front();
                }
                spool.take()?
            }
            (None, Some(_), Some(spool)) if self.ended.is_some() => spool.take()?,
            _ => self.queue.pop_front(),
        };
        Ok(picked.map(|line| match line {
            Line::Delivery(mut row) => {
                self.places += 1;
                row.place = self.places;
                Line::Delivery(row)
            }
            other => other,
        }))
    }

    /// The line as written to the bundle. Notes the blobs that it refers to.
    async fn written(&mut self, line: Line) -> Result<Vec<u8>> {
        // A redacted bundle has no files.
        let left =
            self.redaction.is_some() && matches!(&line, Line::Event(row) if row.kind == "WORKSPACE_SNAPSHOT");
        let pointed = if left { Vec::new() } else { blobs_of(&line) };
        let pointed: Vec<String> = pointed.into_iter().map(str::to_owned).collect();
        for old in pointed {
            let Some(redaction) = &self.redaction else {
                self.blobs.insert(old.clone(), old);
                continue;
            };
            if !redaction.renamed.contains_key(&old) {
                let redacted = redaction.blob(&self.whole_blob(&old).await?);
                let new = hex::encode(Sha256::digest(&redacted));
                let place = (new.clone(), redacted.len() as i64);
                self.blobs.insert(new, old.clone());
                if let Some(redaction) = &mut self.redaction {
                    redaction.renamed.insert(old, place);
                }
            }
        }
        let line = self.opened(line)?;
        let line = match &self.redaction {
            Some(redaction) => redaction.redact(line),
            None => line,
        };
        Ok(line.to_bytes())
    }

    /// The line as it was written by people and models: a bundle is in clear.
    fn opened(&self, line: Line) -> Result<Line> {
        if !self.seal.is_on() {
            return Ok(line);
        }
        crate::json::from_text("row", &self.seal.open_json(crate::json::to_json(&line)?)?)
    }

    /// All lines of the next blob.
    async fn blob(&mut self) -> Result<Vec<u8>> {
        let Some((sha256, stored)) = self.blobs.pop_first() else {
            self.stage = self.stage.section_after();
            return Ok(Vec::new());
        };
        let (bytes, mut kind) = self.blob_size(&stored).await?;
        if self.redaction.is_some() {
            kind = media_type(&kind).to_owned();
        }
        let whole = match (&self.redaction, self.store.sealed_blob(&self.seal, &stored).await?) {
            (Some(redaction), _) => Some(redaction.blob(&self.whole_blob(&stored).await?)),
            (None, sealed) => sealed.map(|blob| blob.bytes),
        };
        if let Some(whole) = whole {
            let bytes = whole.len() as i64;
            let parts = whole.chunks(PART_BYTES).enumerate();
            return Ok(parts
                .flat_map(|(index, part)| {
                    let at = (index * PART_BYTES) as i64;
                    part_of(&sha256, &kind, bytes, at, part)
                })
                .collect());
        }
        let mut chunk = Vec::new();
        let mut at = 0;
        loop {
            let part = self.blob_part(&stored, at).await?;
            let next = at + part.len() as i64;
            if part.is_empty() && bytes > 0 {
                return Err(Error::corrupt("blob", format!("{stored} has fewer bytes than its row says")));
            }
            chunk.extend(part_of(&sha256, &kind, bytes, at, &part));
            at = next;
            if at >= bytes {
                return Ok(chunk);
            }
        }
    }
}

fn part_of(sha256: &str, media_type: &str, bytes: i64, at: i64, part: &[u8]) -> Vec<u8> {
    let part = BlobPart {
        sha256: sha256.to_owned(),
        media_type: media_type.to_owned(),
        bytes,
        at,
        base64: STANDARD.encode(part),
    };
    Line::Blob(part).to_bytes()
}

/// The sort key of rows that come both from the snapshot and from pages.
fn key(line: &Line) -> (i64, String) {
    match line {
        Line::Call(row) => (row.message_number, row.call_id.clone()),
        Line::Delivery(row) => (row.place, String::new()),
        Line::Inbox(row) => (row.inbox_id, String::new()),
        Line::Session(_)
        | Line::Seed(_)
        | Line::Run(_)
        | Line::Record(_)
        | Line::Step(_)
        | Line::Event(_)
        | Line::Blob(_) => (0, String::new()),
    }
}
