//! Chunks: the text of a model call, written to the database while it streams. Readers see only committed
//! chunks.
//!
//! A call without a reader that no later attempt can continue writes no chunk: its text stays in memory until
//! its reply is committed. While a reader follows the session, chunks are written several times a second. A
//! reader that comes in the middle gets the text so far. If the model takes a prefill, chunks are written once a
//! second, so that a worker can continue the text after a crash. The end of the text is not written: the
//! commit of the reply has it.
//!
//! The calls of a process write at the same moments, so that one statement writes for all of them.
//!
//! A chunk can be written only after the chunk before it, so readers may miss the end of the text but never a
//! part in the middle. If Postgres crashes and loses chunks, the writer writes them again.

use crate::ctx::Ctx;
use std::mem::take;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::warn;
use wakeful_store::Store;
use wakeful_store::generation::NewChunks;
use wakeful_store::queue::Audience;
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::record::{Usage, without_nul};

/// While somebody reads, text is written at least this often …
const SHOWN: Duration = Duration::from_millis(250);
/// … and whenever this much has gathered.
const BYTES: usize = 1024;
/// For the next attempt, text is written this often.
const KEPT: Duration = Duration::from_secs(1);

/// What the model has said so far in one call. The call adds to it, and a [`Writer`] reads it.
#[derive(Debug)]
pub(super) struct Said {
    text: Mutex<Text>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Text {
    /// All chunks of the call, by chunk number. Kept because the database may lose some.
    chunks: Vec<String>,
    /// The beginning of the next chunk.
    open: String,
    /// The reply contains something other than text, so the attempt cannot be resumed.
    more_than_text: bool,
    /// What the provider has counted so far.
    counted: Usage,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Replied,
    Failed,
}

impl Text {
    fn cut(&mut self) {
        if !self.open.is_empty() {
            self.chunks.push(without_nul(take(&mut self.open)));
        }
    }
}

impl Said {
    /// `prefill` is the text of the attempt that this call continues. It is the first chunk, so readers keep what
    /// they have seen, and another attempt can continue it too.
    pub(super) fn starting_with(prefill: Option<&str>) -> Said {
        let chunks = prefill.into_iter().map(str::to_owned).collect();
        Said { text: Mutex::new(Text { chunks, ..Text::default() }), changed: Notify::new() }
    }

    pub(super) fn text(&self, more: &str) {
        let mut text = self.lock();
        if text.open.capacity() == 0 {
            // The text of a chunk grows by words.
            text.open.reserve(BYTES + BYTES / 4);
        }
        text.open.push_str(more);
        if text.open.len() >= BYTES {
            text.cut();
            self.changed.notify_one();
        }
    }

    pub(super) fn not_text(&self) {
        self.lock().more_than_text = true;
        self.changed.notify_one();
    }

    pub(super) fn counted(&self, so_far: Usage) {
        self.lock().counted = so_far;
    }

    /// The bytes that have come and what the provider has counted. `None`: the call has ended.
    pub(super) fn unfinished(&self) -> Option<(usize, Usage)> {
        let text = self.lock();
        let bytes = text.chunks.iter().map(String::len).sum::<usize>() + text.open.len();
        text.end.is_none().then_some((bytes, text.counted))
    }

    /// The call is over.
    pub(super) fn end(&self, replied: bool) {
        self.lock().end = Some(if replied { End::Replied } else { End::Failed });
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Text> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the chunks of one model call.
pub(super) struct Writer<'a> {
    ctx: &'a Ctx,
    session_id: &'a SessionId,
    generation_id: &'a GenerationId,
    said: &'a Said,
    readers: Audience,
    /// A later attempt can continue the text.
    resumable: bool,
    /// How many of the chunks are in the database.
    written: usize,
    /// The database knows that the attempt cannot be resumed.
    marked: bool,
}

impl<'a> Writer<'a> {
    /// `resumable`: the model takes a prefill.
    pub(super) fn new(
        ctx: &'a Ctx,
        session_id: &'a SessionId,
        generation_id: &'a GenerationId,
        said: &'a Said,
        resumable: bool,
    ) -> Self {
        let readers = ctx.bus.news.audience(session_id.as_str());
        Writer { ctx, session_id, generation_id, said, readers, resumable, written: 0, marked: false }
    }

    /// Writes chunks until the call ends. A lost chunk only delays what readers see: the commit stores the
    /// whole reply. So the call goes on while the database is away.
    pub(super) async fn write(mut self, prefilled: bool) {
        if prefilled && !self.catch_up().await {
            return;
        }
        let chunks = &self.ctx.chunks;
        let mut keep_at = chunks.moment(KEPT, Instant::now() + KEPT);
        loop {
            let read = self.readers.reads();
            let due = match (read, self.resumable) {
                (true, _) => Some(chunks.moment(SHOWN, Instant::now())),
                (false, true) => Some(keep_at),
                (false, false) => None,
            };
            let is_due = tokio::select! {
                () = self.said.changed.notified() => false,
                () = self.readers.comes(), if !read => true,
                () = sleep_until(due.unwrap_or(keep_at)), if due.is_some() => true,
            };
            let end = {
                let mut text = self.said.lock();
                self.resumable &= !text.more_than_text;
                let rest_counts = text.end == Some(End::Failed) && (self.resumable || self.readers.reads());
                if is_due || rest_counts {
                    text.cut();
                }
                if text.end.is_some() && !rest_counts {
                    return;
                }
                text.end
            };
            let tells = is_due || end.is_some() || self.readers.reads();
            if tells && !self.catch_up().await || end.is_some() {
                return;
            }
            self.mark_if_written().await;
            keep_at = keep_at.max(chunks.moment(KEPT, Instant::now()));
        }
    }

    /// Records that the attempt cannot be resumed, if it contains more than text and a chunk of it is written. An
    /// attempt without a chunk is never resumed.
    async fn mark_if_written(&mut self) {
        if self.written > 0 {
            self.mark().await;
        }
    }

    async fn mark(&mut self) {
        if self.marked || !self.said.lock().more_than_text {
            return;
        }
        match self.ctx.store.never_resume(self.session_id, self.generation_id).await {
            Ok(()) => self.marked = true,
            Err(error) => {
                warn!(%error, "A model call with more than text could not be marked as not resumable");
            }
        }
    }

    /// Writes the chunks that are not in the database yet. Returns `false` if no more can be written.
    async fn catch_up(&mut self) -> bool {
        loop {
            let texts = {
                let text = self.said.lock();
                if text.end == Some(End::Replied) {
                    return false;
                }
                text.chunks.get(self.written..).unwrap_or_default().to_vec()
            };
            if texts.is_empty() {
                return true;
            }
            self.mark().await;
            let count = texts.len();
            let chunks = NewChunks {
                session_id: self.session_id.clone(),
                generation_id: self.generation_id.clone(),
                first_chunk: self.written as i64,
                texts,
            };
            match self.ctx.chunks.append(&self.ctx.store, chunks).await {
                Some(true) => {
                    self.written += count;
                    wakeful_store::failpoint!("K9");
                    self.ctx.bus.notifier.session(self.session_id.as_str());
                    wakeful_store::failpoint!("K8");
                }
                // The server crashed and lost chunks: write them all again.
                Some(false) if self.written > 0 => self.written = 0,
                Some(false) => {
                    warn!(session.id = %self.session_id, "The database lost a model call in flight; readers see its text when it is committed");
                    return false;
                }
                None => {
                    if self.said.lock().end.is_some() {
                        // The call is over, and the next commit or the next attempt replaces the chunks.
                        return false;
                    }
                    sleep(SHOWN).await;
                }
            }
        }
    }
}

/// Writes the chunks of all model calls of a process. Calls that write at one moment share a statement.
#[derive(Debug)]
pub struct Chunks {
    due: Mutex<Vec<Due>>,
    /// The call that holds this writes for all.
    writing: tokio::sync::Mutex<()>,
    start: Instant,
}

#[derive(Debug)]
struct Due {
    chunks: NewChunks,
    report: oneshot::Sender<bool>,
}

impl Default for Chunks {
    fn default() -> Chunks {
        Chunks { due: Mutex::default(), writing: tokio::sync::Mutex::default(), start: Instant::now() }
    }
}

impl Chunks {
    /// Returns the first moment after `after` at which all calls of the process write that write every `every`.
    fn moment(&self, every: Duration, after: Instant) -> Instant {
        let times = (after - self.start).as_millis() / every.as_millis() + 1;
        self.start + every * u32::try_from(times).unwrap_or(u32::MAX)
    }

    /// Returns what [`Store::append_chunks`] returns for `chunks`. `None`: the statement failed.
    async fn append(&self, store: &Store, chunks: NewChunks) -> Option<bool> {
        let (report, mut reported) = oneshot::channel();
        self.due().push(Due { chunks, report });
        tokio::select! {
            biased;
            appended = &mut reported => return appended.ok(),
            _writing = self.writing.lock() => {
                // Others whose moment is the same get their turn to enter theirs.
                tokio::task::yield_now().await;
                let due = take(&mut *self.due());
                self.write(store, due).await;
            }
        }
        // There is no report if the statement failed, or if the call that was writing was dropped.
        reported.await.ok()
    }

    async fn write(&self, store: &Store, due: Vec<Due>) {
        let due = due.into_iter().filter(|due| !due.report.is_closed());
        let (chunks, reports): (Vec<_>, Vec<_>) = due.map(|due| (due.chunks, due.report)).unzip();
        if chunks.is_empty() {
            return;
        }
        match store.append_chunks(&chunks).await {
            Ok(appended) => {
                for (report, appended) in reports.into_iter().zip(appended) {
                    // A call that went away needs no report.
                    let _ = report.send(appended);
                }
            }
            Err(error) => {
                warn!(%error, calls = chunks.len(), "Chunks were not written; readers see the text when it is committed");
            }
        }
    }

    fn due(&self) -> MutexGuard<'_, Vec<Due>> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
