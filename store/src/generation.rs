//! Model calls in flight: the intent of a call, and the text that live readers see while it streams.
//!
//! These rows are committed asynchronously, except for an intent that a step's commit writes
//! ([`crate::step::Performance`]): each statement sets `synchronous_commit` for itself, and Postgres reads it at the
//! commit. Losing the newest of them loses nothing, because the reply itself is a record. They touch neither the
//! session nor the journal, whose numbers must never be used twice. After a crash of the server, rows that readers
//! saw may be gone. The chunks that remain are the beginning of the text, without a gap.

use crate::queue::Lease;
use crate::{Result, Store};
use std::borrow::Cow;
use wakeful_workflow::generation::Purpose;
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::strategy::Strategy;

/// A model call that is about to start.
#[derive(Clone, Copy, Debug)]
pub struct NewGeneration<'a> {
    pub session_id: &'a SessionId,
    pub generation_id: &'a GenerationId,
    pub step_number: i64,
    pub attempt: i64,
    pub model: &'a str,
    /// Hash of the request's bytes.
    pub request_sha256: &'a str,
    /// Hash of the same request without its prefill.
    pub base_sha256: &'a str,
    /// Number of repairs that the projection made in the request.
    pub repairs: i64,
    /// The attempt whose text is the request's prefill.
    pub resumes: Option<&'a GenerationId>,
    pub purpose: Purpose,
    pub context_strategy: Strategy,
}

/// Streamed text of one model call, as chunks from number `first_chunk` on.
#[derive(Clone, Debug)]
pub struct NewChunks {
    pub session_id: SessionId,
    pub generation_id: GenerationId,
    pub first_chunk: i64,
    pub texts: Vec<String>,
}

/// State of a model call in flight for a live reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveGeneration {
    pub generation_id: String,
    pub attempt: i64,
    pub step_number: i64,
    /// Number of its last chunk; -1 if it has none.
    pub last_chunk: i64,
    /// The requested chunks as (number, text). The first chunk of a generation has number 0.
    pub chunks: Vec<(i64, String)>,
}

impl Store {
    /// Records that a model is about to be called, and returns the database's time. `None`: the lease is lost, so the
    /// caller must not call the model.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn begin_generation(&self, lease: &Lease, new: &NewGeneration<'_>) -> Result<Option<String>> {
        // Formatted as in JSON, because hydration reads it from JSON.
        let started_at = sqlx::query_scalar!(
            r#"insert into generations
                (space_id, session_id, generation_id, step_number, attempt, model, request_sha256, base_sha256, repairs,
                 resumes, purpose, context_strategy)
            select jobs.space_id, $1, $2, $3, $4, $5, $6, $7, $8, $9, $12, $13
            from jobs
            where job_id = $10 and lease = $11 and (select set_config('synchronous_commit', 'off', true)) is not null
            -- Waits for a claim that has not committed, and then compares the lease again. Without the lock this
            -- would read the old lease and begin a call after another worker has taken over.
            for no key update of jobs
            returning to_json(started_at) #>> '{}' as "started_at!""#,
            new.session_id.as_str(),
            new.generation_id.as_str(),
            new.step_number,
            new.attempt,
            new.model,
            new.request_sha256,
            new.base_sha256,
            new.repairs,
            new.resumes.map(GenerationId::as_str),
            lease.job_id,
            lease.token,
            new.purpose.as_str(),
            new.context_strategy.as_str()
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(started_at)
    }

    /// Appends the streamed text of several model calls. Returns one value for each call: `false`, and nothing of it
    /// is written, if the chunk before is missing (for the first chunk: the generation), because that would leave a
    /// gap. A chunk that is there already stays as it is.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; the chunks may have been written.
    pub async fn append_chunks(&self, calls: &[NewChunks]) -> Result<Vec<bool>> {
        let sessions: Vec<&str> = calls.iter().map(|call| call.session_id.as_str()).collect();
        let generations: Vec<&str> = calls.iter().map(|call| call.generation_id.as_str()).collect();
        let firsts: Vec<i64> = calls.iter().map(|call| call.first_chunk).collect();
        let mut seals = Vec::with_capacity(calls.len());
        for call in calls {
            seals.push(self.seal_of_row(call.session_id.as_str()).await?);
        }
        let chunks = calls.iter().zip(1_i64..).flat_map(|(call, member)| {
            call.texts.iter().zip(call.first_chunk..).map(move |(text, chunk_no)| (member, chunk_no, text))
        });
        let (mut members, mut numbers, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        for (member, chunk_no, text) in chunks {
            // Without its key the text of one session is not kept. Those of the others are.
            let Some(seal) = &seals[member as usize - 1] else { continue };
            members.push(member);
            numbers.push(chunk_no);
            texts.push(seal.text(text));
        }
        // The last lines do not see the insert. That is safe: only this caller writes chunks of these generations.
        let appended = sqlx::query_scalar!(
            r#"
            with given as materialized (
                select *
                from unnest($1::text[], $2::text[], $3::bigint[])
                    with ordinality as given (session_id, generation_id, first_chunk, member)
            ), g as materialized (
                select given.member, g.space_id, g.session_id, g.generation_id
                from given
                join generations g on g.session_id = given.session_id and g.generation_id = given.generation_id
                where (select set_config('synchronous_commit', 'off', true)) is not null
                    and (given.first_chunk = 0 or exists (
                        select from generation_chunks k
                        where k.session_id = given.session_id
                            and k.generation_id = given.generation_id
                            and k.chunk_no = given.first_chunk - 1))
                -- One order for all such statements. Commits of several sessions go by conversation first; should the two wait for
                -- each other, the lane's `lock_timeout` ends its statement, and its commits are written alone.
                order by g.session_id, g.generation_id
                -- Waits for a reply that deletes the generation, so that no chunk is left behind.
                for key share of g
            ), chunk as (
                insert into generation_chunks (space_id, session_id, generation_id, chunk_no, "text")
                select g.space_id, g.session_id, g.generation_id, r.chunk_no, r."text"
                from g
                join unnest($4::bigint[], $5::bigint[], $6::text[]) as r (member, chunk_no, "text")
                    on r.member = g.member
                on conflict do nothing
            )
            select exists (select from g where g.member = given.member) as "appended!"
            from given
            order by given.member
            "#,
            &sessions as &[&str],
            &generations as &[&str],
            &firsts,
            &members,
            &numbers,
            &texts as &[Cow<'_, str>]
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(appended.into_iter().zip(&seals).map(|(appended, seal)| appended && seal.is_some()).collect())
    }

    /// Deletes the intent of a model call that was not made. Writes nothing if the lease is lost: the next worker may
    /// have read the row.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn withdraw_generation(
        &self,
        lease: &Lease,
        session_id: &SessionId,
        generation_id: &GenerationId,
    ) -> Result<()> {
        sqlx::query!(
            "with j as (
                select job_id from jobs
                where job_id = $1 and lease = $2
                    and (select set_config('synchronous_commit', 'off', true)) is not null
                for no key update
            )
            delete from generations
            using j
            where session_id = $3 and generation_id = $4",
            lease.job_id,
            lease.token,
            session_id.as_str(),
            generation_id.as_str()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Records that no later attempt may continue this generation's text.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn never_resume(&self, session_id: &SessionId, generation_id: &GenerationId) -> Result<()> {
        sqlx::query!(
            "update generations
            set resumable = false
            where session_id = $1 and generation_id = $2
                and (select set_config('synchronous_commit', 'off', true)) is not null",
            session_id.as_str(),
            generation_id.as_str()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Returns the text of a generation's chunks.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn generation_text(
        &self,
        session_id: &SessionId,
        generation_id: &GenerationId,
    ) -> Result<String> {
        let text = sqlx::query_scalar!(
            r#"select string_agg("text", '' order by chunk_no)
            from generation_chunks
            where session_id = $1 and generation_id = $2"#,
            session_id.as_str(),
            generation_id.as_str()
        )
        .fetch_one(&self.pool)
        .await?;
        self.seal_of(session_id.as_str()).await?.open(text.unwrap_or_default())
    }

    /// Returns the newest model call in flight whose reply the user will read, with its chunks after `after_chunk` if it is
    /// still the `known` one, else with all chunks.
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
            r#"select g.generation_id, g.attempt, g.step_number,
                (select coalesce(max(k.chunk_no), -1) from generation_chunks k
                    where k.session_id = g.session_id and k.generation_id = g.generation_id) as "last_chunk!"
            from generations g
            where g.session_id = $1 and g.purpose = 'reply'
            order by g.attempt desc, g.started_at desc
            limit 1"#,
            session_id
        )
        .fetch_optional(&self.pool)
        .await?
        else {
            return Ok(None);
        };
        let after_chunk = if known == Some(generation.generation_id.as_str()) { after_chunk } else { -1 };
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
        let seal = self.seal_of(session_id).await?;
        let chunks = chunks.into_iter().map(|chunk| Ok((chunk.chunk_no, seal.open(chunk.text)?)));
        Ok(Some(LiveGeneration {
            generation_id: generation.generation_id,
            attempt: generation.attempt,
            step_number: generation.step_number,
            last_chunk: generation.last_chunk,
            chunks: chunks.collect::<Result<_>>()?,
        }))
    }
}
