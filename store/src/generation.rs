//! Model calls in flight: the intent of a call and the text that readers are shown while it streams.
//!
//! Committed asynchronously, since losing the newest of it loses nothing: the answer itself is a record. These rows
//! touch neither the session nor the journal, whose numbers must never be used twice.

use crate::queue::Lease;
use crate::{Result, Store};
use wakeful_workflow::id::{GenerationId, SessionId};

/// A model call about to be made.
#[derive(Clone, Debug)]
pub struct NewGeneration<'a> {
    pub session_id: &'a SessionId,
    pub generation_id: &'a GenerationId,
    pub step_number: i64,
    pub attempt: i64,
    pub model: &'a str,
    pub request_sha256: &'a str,
}

/// What a live reader is shown of a model call in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveGeneration {
    pub generation_id: String,
    pub attempt: i64,
    pub step_number: i64,
    /// Chunks from the asked number on: (number, text).
    pub chunks: Vec<(i64, String)>,
}

impl Store {
    /// Writes down that a model is about to be called, and gives the database's time of it. `None`: the lease is lost,
    /// so the call must not be made.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn begin_generation(&self, lease: &Lease, new: &NewGeneration<'_>) -> Result<Option<String>> {
        // As JSON writes it, which is how hydration reads it.
        let started_at = sqlx::query_scalar!(
            r#"insert into generations (session_id, generation_id, step_number, attempt, model, request_sha256)
            select $1, $2, $3, $4, $5, $6
            from jobs
            where job_id = $7 and lease = $8
            returning to_json(started_at) #>> '{}' as "started_at!""#,
            new.session_id.as_str(),
            new.generation_id.as_str(),
            new.step_number,
            new.attempt,
            new.model,
            new.request_sha256,
            lease.job_id,
            lease.token
        )
        .fetch_optional(&self.streams)
        .await?;
        Ok(started_at)
    }

    /// Appends streamed text. Nothing is written once the generation is over.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn append_chunk(
        &self,
        session_id: &SessionId,
        generation_id: &GenerationId,
        chunk_no: i64,
        text: &str,
    ) -> Result<()> {
        sqlx::query!(
            r#"insert into generation_chunks (session_id, generation_id, chunk_no, "text")
            select session_id, generation_id, $3, $4
            from generations
            where session_id = $1 and generation_id = $2"#,
            session_id.as_str(),
            generation_id.as_str(),
            chunk_no,
            text
        )
        .execute(&self.streams)
        .await?;
        Ok(())
    }

    /// The newest model call in flight of a session, with its chunks after `after_chunk` if it is still `known`, else
    /// with all of them.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn live_generation(
        &self,
        session_id: &str,
        known: Option<&str>,
        after_chunk: i64,
    ) -> Result<Option<LiveGeneration>> {
        let Some(generation) = sqlx::query!(
            "select generation_id, attempt, step_number from generations
            where session_id = $1
            order by attempt desc, started_at desc
            limit 1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?
        else {
            return Ok(None);
        };
        let after_chunk = if known == Some(generation.generation_id.as_str()) { after_chunk } else { 0 };
        let chunks = sqlx::query!(
            r#"select chunk_no, "text" from generation_chunks
            where session_id = $1 and generation_id = $2 and chunk_no > $3
            order by chunk_no"#,
            session_id,
            generation.generation_id,
            after_chunk
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(Some(LiveGeneration {
            generation_id: generation.generation_id,
            attempt: generation.attempt,
            step_number: generation.step_number,
            chunks: chunks.into_iter().map(|chunk| (chunk.chunk_no, chunk.text)).collect(),
        }))
    }
}
