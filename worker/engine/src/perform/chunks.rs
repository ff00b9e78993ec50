//! Chunks: the text of a model call, written to the database while it streams. Readers see only committed
//! chunks.
//!
//! A chunk can be written only after the chunk before it, so readers may miss the end of the text but never a
//! part in the middle. If Postgres crashes and loses chunks, the writer writes them again.

use crate::ctx::Ctx;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::warn;
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::record::without_nul;

/// While text arrives, a chunk is written at least this often …
const EVERY: Duration = Duration::from_millis(250);
/// … and whenever this much text has gathered.
const BYTES: usize = 1024;

/// One message from the model call to the writer.
pub(super) enum Piece {
    Text(String),
    /// End the chunk here.
    Flush,
    /// The reply contains something other than text, so the attempt cannot be resumed.
    NotText,
}

/// Writes the chunks of one model call.
pub(super) struct Writer<'a> {
    ctx: &'a Ctx,
    session_id: &'a SessionId,
    generation_id: &'a GenerationId,
    /// All chunks of the call, by chunk number. Kept because the database may lose some.
    chunks: Vec<String>,
    /// How many of `chunks` are in the database.
    written: usize,
    only_text: bool,
}

impl<'a> Writer<'a> {
    pub(super) fn new(ctx: &'a Ctx, session_id: &'a SessionId, generation_id: &'a GenerationId) -> Self {
        Writer { ctx, session_id, generation_id, chunks: Vec::new(), written: 0, only_text: true }
    }

    /// Writes chunks until the call ends. A lost chunk only delays what readers see: the commit stores the
    /// whole reply. So the call goes on while the database is away.
    pub(super) async fn write(mut self, mut pieces: UnboundedReceiver<Piece>) {
        let mut open = true;
        while open {
            let Some(first) = pieces.recv().await else { return };
            let mut text = String::new();
            let mut over = self.take(first, &mut text).await;
            let due = tokio::time::sleep(EVERY);
            tokio::pin!(due);
            while !over && text.len() < BYTES {
                tokio::select! {
                    () = &mut due => break,
                    piece = pieces.recv() => match piece {
                        Some(piece) => over = self.take(piece, &mut text).await,
                        None => { open = false; break; }
                    }
                }
            }
            if !text.is_empty() {
                self.chunks.push(without_nul(text));
                open &= self.catch_up(&pieces).await;
            }
        }
    }

    /// Adds a piece to `text`. Returns `true` if the piece ends the chunk.
    async fn take(&mut self, piece: Piece, text: &mut String) -> bool {
        match piece {
            Piece::Text(more) => text.push_str(&more),
            Piece::Flush => return true,
            Piece::NotText if self.only_text => {
                self.only_text = false;
                if let Err(error) = self.ctx.store.never_resume(self.session_id, self.generation_id).await {
                    warn!(%error, "A model call with more than text could not be marked as not resumable");
                }
            }
            Piece::NotText => {}
        }
        false
    }

    /// Writes the chunks that are not in the database yet, in order. Returns `false` if no more can be
    /// written.
    async fn catch_up(&mut self, pieces: &UnboundedReceiver<Piece>) -> bool {
        while let Some(chunk) = self.chunks.get(self.written) {
            let chunk_no = self.written as i64;
            match self.ctx.store.append_chunk(self.session_id, self.generation_id, chunk_no, chunk).await {
                Ok(true) => {
                    self.written += 1;
                    wakeful_store::failpoint!("K9");
                    self.ctx.bus.notifier.session(self.session_id.as_str());
                    wakeful_store::failpoint!("K8");
                }
                // The server crashed and lost the previous chunk: write that one again first.
                Ok(false) if self.written > 0 => self.written -= 1,
                Ok(false) => {
                    warn!(session.id = %self.session_id, "The database lost a model call in flight; readers see its text when it is committed");
                    return false;
                }
                Err(error) => {
                    warn!(%error, "A chunk was not written; readers see the text when it is committed");
                    if pieces.is_closed() {
                        // The reply has arrived, and its commit deletes the chunks anyway.
                        return false;
                    }
                    tokio::time::sleep(EVERY).await;
                }
            }
        }
        true
    }
}
