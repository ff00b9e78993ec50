//! Chunks: the text of a model call as it streams, written down before anybody is shown it.
//!
//! A chunk is written after the one before it or not at all, so that readers are shown a beginning and never a gap. What a
//! server that crashed has lost of them is written again.

use crate::ctx::Ctx;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::warn;
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::record::without_nul;

/// A chunk is written at least this often while text arrives …
const EVERY: Duration = Duration::from_millis(250);
/// … and as soon as so much has gathered.
const BYTES: usize = 1024;

/// What a model call sends as it goes.
pub(super) enum Piece {
    Text(String),
    /// The text so far is a chunk.
    Flush,
    /// What comes now is no text.
    NotText,
}

/// Writes the chunks of one model call.
pub(super) struct Writer<'a> {
    ctx: &'a Ctx,
    session_id: &'a SessionId,
    generation_id: &'a GenerationId,
    /// All of them by number, for those that the database may lose.
    chunks: Vec<String>,
    /// How many of them are written.
    written: usize,
    only_text: bool,
}

impl<'a> Writer<'a> {
    pub(super) fn new(ctx: &'a Ctx, session_id: &'a SessionId, generation_id: &'a GenerationId) -> Self {
        Writer { ctx, session_id, generation_id, chunks: Vec::new(), written: 0, only_text: true }
    }

    /// Writes what comes until the call ends. Losing a chunk loses nothing but the sight of it, so a database that is
    /// away does not stop the call.
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

    /// Adds a piece to `text`. `true`: it ends the chunk.
    async fn take(&mut self, piece: Piece, text: &mut String) -> bool {
        match piece {
            Piece::Text(more) => text.push_str(&more),
            Piece::Flush => return true,
            Piece::NotText if self.only_text => {
                self.only_text = false;
                if let Err(error) = self.ctx.store.never_resume(self.session_id, self.generation_id).await {
                    warn!(%error, "A model call was not marked as more than text");
                }
            }
            Piece::NotText => {}
        }
        false
    }

    /// Writes the chunks that are not written yet, in order. `false`: no more can be written.
    async fn catch_up(&mut self, pieces: &UnboundedReceiver<Piece>) -> bool {
        while let Some(chunk) = self.chunks.get(self.written) {
            let chunk_no = self.written as i64;
            match self.ctx.store.append_chunk(self.session_id, self.generation_id, chunk_no, chunk).await {
                Ok(true) => {
                    self.written += 1;
                    crate::failpoint("K9");
                    self.ctx.bus.notifier.session(self.session_id.as_str());
                    crate::failpoint("K8");
                }
                // The server crashed and has lost the one before.
                Ok(false) if self.written > 0 => self.written -= 1,
                Ok(false) => {
                    warn!(session.id = %self.session_id, "The database lost a model call in flight; readers see its text when it is committed");
                    return false;
                }
                Err(error) => {
                    warn!(%error, "A chunk was not written; readers see the text when it is committed");
                    if pieces.is_closed() {
                        // The answer is here, and its commit makes the chunks void.
                        return false;
                    }
                    tokio::time::sleep(EVERY).await;
                }
            }
        }
        true
    }
}
