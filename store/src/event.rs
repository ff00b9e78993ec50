//! Reads the journal in order, without a gap, and resolves its pointers. So a printed entry is complete by itself.
#![deny(missing_docs)]

use crate::page::Page;
use crate::{Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;

/// One journal entry with the contents that it refers to.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct JournalEntry {
    /// Number within the session, from 1 on, without gaps.
    pub seq: i64,
    /// When it was committed, by the database's clock.
    pub ts: DateTime<Utc>,
    /// The type of the entry, such as `state_transition`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The run that it belongs to, if any.
    pub run_id: Option<String>,
    /// The step that it belongs to, if any.
    pub step_number: Option<i64>,
    /// An object whose keys depend on the type.
    pub payload: Value,
}

/// How far a session is, for somebody who follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newest {
    /// Number of the newest entry.
    pub seq: i64,
    /// A model call whose reply the user will read is in progress.
    pub calls: bool,
}

impl Store {
    /// How far each of these sessions is.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn newest(&self, session_ids: &[String]) -> Result<Vec<(String, Newest)>> {
        let rows = sqlx::query!(
            r#"select s.session_id, s.last_event_seq,
                exists (select from generations g
                    where g.session_id = s.session_id and g.purpose = 'reply') as "calls!"
            from conversation_sessions s
            where s.session_id = any($1)"#,
            session_ids
        )
        .fetch_all(&self.pool)
        .await?;
        let newest = rows
            .into_iter()
            .map(|row| (row.session_id, Newest { seq: row.last_event_seq, calls: row.calls }));
        Ok(newest.collect())
    }

    /// Number of the session's newest entry; 0 if there is none.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Database`].
    pub async fn last_event_seq(&self, session_id: &str) -> Result<i64> {
        sqlx::query_scalar!(
            "select last_event_seq from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| crate::Error::NotFound { what: "session", id: session_id.to_owned() })
    }

    /// Returns up to `limit` entries after `after`, each with the `text` of the message, the `context_state` or the
    /// `value` that it points at. Numbers are given in commit order, so a reader that asks for entries after the last
    /// one it has seen misses none.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] for a blob that is not JSON, [`crate::Error::Database`].
    pub async fn journal(&self, session_id: &str, after: i64, limit: i64) -> Result<Vec<JournalEntry>> {
        Ok(self.journal_page(session_id, after, limit, i64::MAX).await?.items)
    }

    /// Like [`Store::journal`], but only as many entries as have about `bytes` bytes together, and at least one.
    ///
    /// # Errors
    /// Like [`Store::journal`].
    pub async fn journal_page(
        &self,
        session_id: &str,
        after: i64,
        limit: i64,
        bytes: i64,
    ) -> Result<Page<JournalEntry>> {
        self.entries(session_id, after, limit, bytes, false).await
    }

    /// The newest entries, in their order: up to `limit`, and only as many as have about `bytes` bytes together, and at least one.
    ///
    /// # Errors
    /// Like [`Store::journal`], and [`crate::Error::NotFound`].
    pub async fn newest_entries(
        &self,
        session_id: &str,
        limit: i64,
        bytes: i64,
    ) -> Result<Vec<JournalEntry>> {
        // Numbers of entries have no gaps.
        let after = (self.last_event_seq(session_id).await? - limit).max(0);
        Ok(self.entries(session_id, after, limit, bytes, true).await?.items)
    }

    /// A page that is cut at its end, or at its beginning if it is `of_newest`.
    async fn entries(
        &self,
        session_id: &str,
        after: i64,
        limit: i64,
        bytes: i64,
        of_newest: bool,
    ) -> Result<Page<JournalEntry>> {
        // The page is read before the joins, with all that they need. A policy lets no function that may tell of its arguments, as
        // `->>` may, into an index condition; and Postgres, which expects a conversation to have few messages, takes its id
        // from one table and does without the number of another. Each entry would read all messages of its conversation.
        let rows = sqlx::query!(
            r#"
            with page as materialized (
                select e.seq, e.ts, e.type, e.run_id, e.step_number, e.payload, e.session_id, e.space_id, s.conversation_id,
                    s.data_key,
                    case when e.type in ('GEN_COMPLETE', 'TOOL_RESULT') then (e.payload ->> 'message_number')::bigint end
                        as message_number,
                    case when e.type = 'MESSAGE_RECEIVED' then (e.payload ->> 'inbox_id')::bigint end as inbox_id,
                    case when e.type = 'TOOL_RESULT' then e.payload ->> 'call_id' end as call_id,
                    case when e.type in ('checkpoint', 'context_update')
                        then coalesce(e.payload ->> 'state_sha256', e.payload ->> 'value_sha256') end as sha256
                from session_events e
                join conversation_sessions s on s.session_id = e.session_id
                where e.session_id = $1 and e.seq > $2
                order by e.seq
                limit $3
            )
            select seq as "seq!", ts as "ts!", type as "kind!", run_id, step_number, payload as "payload!", content as "content?",
                inbox_text as "inbox_text?", tool_name as "tool_name?", blob as "blob?", sealed as "sealed?", found as "found!"
            from (
                select whole.*, count(*) over () as found, row_number() over page as place,
                    sum(octet_length(payload::text) + coalesce(octet_length(content), 0) + coalesce(octet_length(inbox_text), 0)
                        + coalesce(octet_length(blob), 0) + coalesce(octet_length(sealed), 0))
                        over page as weighed
                from (
                    select e.seq, e.ts, e.type, e.run_id, e.step_number, e.payload, r.content::text as content,
                        i.content as inbox_text, c.name as tool_name, b.bytes as blob, k.bytes as sealed
                    from page e
                    left join sealed_blobs k on k.data_key = e.data_key and k.sha256 = e.sha256
                    left join conversation_records r
                        on r.conversation_id = e.conversation_id and r.message_number = e.message_number
                    left join session_inbox i on i.session_id = e.session_id and i.inbox_id = e.inbox_id
                    left join tool_calls c on c.session_id = e.session_id and c.call_id = e.call_id
                    left join blobs b on b.sha256 = e.sha256 and b.space_id = e.space_id
                    -- Keeps Postgres from turning each message into text twice.
                    offset 0
                ) whole
                window page as (order by case when $5 then -seq else seq end rows unbounded preceding)
            ) weighed
            where place = 1 or weighed <= $4
            order by seq
            "#,
            session_id,
            after,
            limit,
            bytes,
            of_newest
        )
        .fetch_all(&self.pool)
        .await?;
        let found = rows.first().map_or(0, |row| row.found);
        let seal = self.seal_of(session_id).await?;
        let entries: Result<Vec<JournalEntry>> = rows
            .into_iter()
            .map(|row| {
                let mut payload = seal.open_value(row.payload)?;
                let sealed = row.sealed.map(|sealed| seal.open_bytes(sealed)).transpose()?;
                if let Value::Object(fields) = &mut payload {
                    if let Some(content) = row.content {
                        let blocks: Vec<wakeful_workflow::record::Block> =
                            crate::json::from_text("message", &seal.open_json(content)?)?;
                        fields.insert("text".to_owned(), wakeful_workflow::record::text_of(&blocks).into());
                    }
                    if let Some(text) = row.inbox_text {
                        fields.insert("text".to_owned(), seal.open(text)?.into());
                    }
                    if let Some(name) = row.tool_name {
                        fields.insert("name".to_owned(), name.into());
                    }
                    if let Some(blob) = sealed.as_ref().or(row.blob.as_ref()) {
                        let resolved = if row.kind == "checkpoint" { "context_state" } else { "value" };
                        fields.insert(resolved.to_owned(), crate::json::from_bytes("blob", blob)?);
                    }
                }
                Ok(JournalEntry {
                    seq: row.seq,
                    ts: row.ts,
                    kind: row.kind,
                    run_id: row.run_id,
                    step_number: row.step_number,
                    payload,
                })
            })
            .collect();
        Ok(Page::of(entries?, found, limit))
    }
}
