//! Pages: reads rows that no longer change, by key, up to the cut, about a megabyte at a time.

use super::row::{self, object, time, word};
use super::{Export, PAGE_BYTES, PAGE_ROWS, Stage, snapshot};
use crate::json::from_text;
use crate::{Error, Result};
use wakeful_workflow::bundle::{
    EventRow, InboxStatus, Line, PART_BYTES, RecordRow, SeedRow, StepRow, payload_of,
};

/// The rows of a page, the stage after them, and their size.
pub(super) struct Page {
    pub lines: Vec<Line>,
    pub next: Stage,
    pub bytes: i64,
}

/// The rows of a page, each with its approximate size in memory.
type Rows = Vec<(Line, i64)>;

impl Export {
    /// Reads the next rows of `stage`. The stage after them begins after the last row, or with the next
    /// section.
    pub(super) async fn page(&mut self, stage: &Stage) -> Result<Page> {
        let rows = match stage {
            Stage::Seeds(after) => self.seeds(*after).await?,
            Stage::Records(after) => self.records(*after).await?,
            Stage::Steps(after) => self.steps(*after).await?,
            Stage::Events(after) => self.events(*after).await?,
            Stage::Calls(..) | Stage::Deliveries(_) => self.settled(stage).await?,
            Stage::Inbox(after) => self.inbox(*after).await?,
            // The snapshot has all runs; the other stages have no rows.
            Stage::Runs | Stage::Head | Stage::Blobs | Stage::Trailer | Stage::Done => Vec::new(),
        };
        let bytes = rows.iter().map(|(_, weight)| weight).sum();
        let lines: Vec<Line> = rows.into_iter().map(|(line, _)| line).collect();
        let next = lines.last().map_or_else(|| stage.section_after(), Stage::after);
        Ok(Page { lines, next, bytes })
    }

    /// The next rows of a section that one statement read.
    async fn settled(&mut self, stage: &Stage) -> Result<Rows> {
        let mut rows = match self.settled.take() {
            Some(rows) => rows,
            None if matches!(stage, Stage::Calls(..)) => {
                let last = self.snapshot.header.cut.message_number;
                snapshot::settled_calls(&self.store, self.id(), last).await?
            }
            None => snapshot::sent_deliveries(&self.store, self.id(), self.snapshot.last_ordinal).await?,
        };
        let page = rows.take_page(PAGE_BYTES)?;
        // An empty page ends the section.
        self.settled = if page.is_empty() { None } else { Some(rows) };
        Ok(page)
    }

    async fn seeds(&self, after: i32) -> Result<Rows> {
        let rows = sqlx::query!(
            r#"
            select ordinal as "ordinal!", role as "role!", content as "content!", is_new as "is_new!", "timestamp",
                details, weight as "weight!"
            from (
                select seeds.*, row_number() over page as place, sum(weight) over page as weighed
                from (
                    select *, octet_length(content) as weight
                    from (
                        -- A chat about a notice gets more seeds when its first run starts. The limit leaves out
                        -- those that were added after the snapshot.
                        select * from session_seed_messages
                        where session_id = $1
                        order by ordinal
                        limit $5
                    ) begun
                    where ordinal > $2
                    order by ordinal
                    limit $3
                ) seeds
                window page as (order by ordinal)
            ) weighed
            where place = 1 or weighed <= $4
            order by ordinal
            "#,
            self.id(),
            after,
            self.pager.rows,
            PAGE_BYTES,
            self.snapshot.header.counts.seeds
        )
        .fetch_all(&self.store.pool)
        .await?;
        let rows = rows.into_iter().map(|row| {
            let line = Line::Seed(SeedRow {
                ordinal: row.ordinal,
                role: word("role", row.role)?,
                content: row.content,
                is_new: row.is_new,
                timestamp: row.timestamp,
                details: row.details,
            });
            Ok((line, i64::from(row.weight)))
        });
        rows.collect()
    }

    async fn records(&self, after: i64) -> Result<Rows> {
        let rows = sqlx::query!(
            r#"
            select message_number as "message_number!", message_id as "message_id!", run_id as "run_id!",
                step_number as "step_number!", role as "role!", content as "content!", internal as "internal!",
                details as "details!", created_at as "created_at!", weight as "weight!"
            from (
                select records.*, row_number() over page as place, sum(weight) over page as weighed
                from (
                    select message_number, message_id, run_id, step_number, role, content::text as content, internal,
                        details::text as details, created_at,
                        octet_length(content::text) + octet_length(details::text) as weight
                    from conversation_records
                    where session_id = $1 and message_number > $2 and message_number <= $3
                    order by message_number
                    limit $4
                ) records
                window page as (order by message_number)
            ) weighed
            where place = 1 or weighed <= $5
            order by message_number
            "#,
            self.id(),
            after,
            self.snapshot.header.cut.message_number,
            self.pager.rows,
            PAGE_BYTES
        )
        .fetch_all(&self.store.pool)
        .await?;
        let rows = rows.into_iter().map(|row| {
            let line = Line::Record(RecordRow {
                message_number: row.message_number,
                message_id: row.message_id,
                run_id: row.run_id,
                step_number: row.step_number,
                role: word("role", row.role)?,
                content: from_text("message", &row.content)?,
                internal: row.internal,
                details: object("message details", from_text("message details", &row.details)?)?,
                created_at: time(row.created_at),
            });
            Ok((line, i64::from(row.weight)))
        });
        rows.collect()
    }

    async fn steps(&self, after: i64) -> Result<Rows> {
        let rows = sqlx::query!(
            "select step_number, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
                output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt,
                event_seq, started_at, committed_at, workspace_sha256
            from session_steps
            where session_id = $1 and step_number > $2 and step_number <= $3
            order by step_number
            limit $4",
            self.id(),
            after,
            self.snapshot.header.cut.step_number,
            PAGE_ROWS
        )
        .fetch_all(&self.store.pool)
        .await?;
        let rows = rows.into_iter().map(|row| {
            let line = Line::Step(StepRow {
                step_number: row.step_number,
                run_id: row.run_id,
                from_message_number: row.from_message_number,
                to_message_number: row.to_message_number,
                finish_reason: row.finish_reason,
                input_tokens: row.input_tokens,
                output_tokens: row.output_tokens,
                cached_tokens: row.cached_tokens,
                cache_write_tokens: row.cache_write_tokens,
                cost_micros: row.cost_micros,
                executed_local_tool_count: row.executed_local_tool_count,
                attempt: row.attempt,
                event_seq: row.event_seq,
                started_at: time(row.started_at),
                committed_at: time(row.committed_at),
                workspace_sha256: row.workspace_sha256,
            });
            (line, 0)
        });
        Ok(rows.collect())
    }

    async fn events(&self, after: i64) -> Result<Rows> {
        let rows = sqlx::query!(
            r#"
            select seq as "seq!", ts as "ts!", type as "kind!", run_id, step_number, payload as "payload!", dedupe_key,
                weight as "weight!"
            from (
                select events.*, row_number() over page as place, sum(weight) over page as weighed
                from (
                    select *, octet_length(payload::text) as weight from session_events
                    where session_id = $1 and seq > $2 and seq <= $3
                    order by seq
                    limit $4
                ) events
                window page as (order by seq)
            ) weighed
            where place = 1 or weighed <= $5
            order by seq
            "#,
            self.id(),
            after,
            self.snapshot.header.cut.event_seq,
            self.pager.rows,
            PAGE_BYTES
        )
        .fetch_all(&self.store.pool)
        .await?;
        let rows = rows.into_iter().map(|row| {
            let line = Line::Event(EventRow {
                seq: row.seq,
                ts: time(row.ts),
                payload: payload_of(&row.kind, row.payload),
                kind: row.kind,
                run_id: row.run_id,
                step_number: row.step_number,
                dedupe_key: row.dedupe_key,
            });
            (line, i64::from(row.weight))
        });
        Ok(rows.collect())
    }

    async fn inbox(&self, after: i64) -> Result<Rows> {
        let rows = sqlx::query!(
            r#"
            select inbox_id as "inbox_id!", client_key as "client_key!", content as "content!",
                content_sha256 as "content_sha256!", sender, attachments, run_id as "run_id!", outcome as "outcome!",
                created_at as "created_at!", weight as "weight!"
            from (
                select taken.*, row_number() over page as place, sum(weight) over page as weighed
                from (
                    select *, octet_length(content) as weight from session_inbox
                    where session_id = $1 and inbox_id > $2 and inbox_id <= $3 and status = 'drained'
                    order by inbox_id
                    limit $4
                ) taken
                window page as (order by inbox_id)
            ) weighed
            where place = 1 or weighed <= $5
            order by inbox_id
            "#,
            self.id(),
            after,
            self.snapshot.last_inbox,
            self.pager.rows,
            PAGE_BYTES
        )
        .fetch_all(&self.store.pool)
        .await?;
        let rows =
            rows.into_iter().map(|row| Ok((row::inbox!(row, InboxStatus::Drained), i64::from(row.weight))));
        rows.collect()
    }

    pub(super) async fn blob_size(&self, sha256: &str) -> Result<(i64, String)> {
        if let Some(blob) = self.store.sealed_blob(&self.seal, sha256).await? {
            return Ok((blob.bytes.len() as i64, blob.media_type));
        }
        let row = sqlx::query!(
            "select size, media_type from blobs
            where sha256 = $1 and space_id = (select space_id from conversation_sessions where session_id = $2)",
            sha256,
            self.id()
        )
            .fetch_optional(&self.store.pool)
            .await?
            .ok_or_else(|| missing(sha256))?;
        Ok((row.size, row.media_type))
    }

    pub(super) async fn whole_blob(&self, sha256: &str) -> Result<Vec<u8>> {
        if let Some(blob) = self.store.sealed_blob(&self.seal, sha256).await? {
            return Ok(blob.bytes);
        }
        sqlx::query_scalar!(
            "select bytes from blobs
            where sha256 = $1 and space_id = (select space_id from conversation_sessions where session_id = $2)",
            sha256,
            self.id()
        )
            .fetch_optional(&self.store.pool)
            .await?
            .ok_or_else(|| missing(sha256))
    }

    pub(super) async fn blob_part(&self, sha256: &str, at: i64) -> Result<Vec<u8>> {
        match self.store.pack_part(self.id(), sha256, at.unsigned_abs(), PART_BYTES).await {
            Err(Error::Corrupt { .. }) => Err(missing(sha256)),
            part => part,
        }
    }

    fn id(&self) -> &str {
        &self.snapshot.header.session_id
    }
}

fn missing(sha256: &str) -> Error {
    Error::corrupt("blob", format!("a row points at {sha256}, which is missing"))
}
