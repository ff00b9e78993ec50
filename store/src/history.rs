//! History of a conversation, its parents and its forks: messages, replies, tool calls, deliveries and how
//! they ended. Newest first, in pages.

#[cfg(feature = "schema")]
mod facts;

use crate::chain::chain;
use crate::encryption::hide;
use crate::page::Page;
use crate::session::shown;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Value, json};
use wakeful_workflow::record::{Block, text_of};
use wakeful_workflow::trigger::TriggerSource;

/// One entry of the history.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(extend("unevaluatedProperties" = false))
)]
pub struct HistoryItem {
    pub at: DateTime<Utc>,
    /// `session`, `message` (came in), `reply`, `tool_call` or `delivery` (went out). A message or a reply with `earlier` was said
    /// before the first session, as an imported chat has it.
    #[serde(rename = "type")]
    pub kind: String,
    /// As in the API: without the space.
    pub conversation_id: String,
    pub session_id: String,
    /// Id of the session, message, call or delivery.
    pub id: String,
    #[serde(flatten)]
    #[cfg_attr(feature = "schema", schemars(with = "facts::Facts"))]
    pub facts: Value,
    /// Cursor that continues with the entries before this one.
    #[serde(skip)]
    pub cursor: String,
}

/// Sums over all sessions of the conversations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HistoryTotals {
    pub conversations: i64,
    pub sessions: i64,
    pub turns: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub cost_micros: i64,
    pub tool_calls: i64,
    pub deliveries: i64,
    pub deliveries_sent: i64,
    /// Deliveries that failed, expired, or are uncertain.
    pub deliveries_not_sent: i64,
    /// Deliveries that were sent, and refused or returned for at least one recipient.
    pub deliveries_undelivered: i64,
}

impl Store {
    /// Returns the history of `conversation_id`, its parents and its forks, newest first, with or without the
    /// replays of its sessions. `before` is a cursor of the previous page. The page has up to `limit` entries, and only as many as
    /// have about `bytes` bytes together, and at least one.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an unknown conversation, [`Error::Corrupt`] for an invalid cursor,
    /// [`Error::Database`].
    pub async fn history(
        &self,
        conversation_id: &str,
        replays: bool,
        before: Option<&str>,
        limit: i64,
        bytes: i64,
    ) -> Result<Page<HistoryItem>> {
        let (at, place, id) = match before {
            Some(cursor) => {
                let (at, place, id) =
                    parse(cursor).ok_or_else(|| Error::corrupt("cursor", "it is none of this list's"))?;
                (Some(at), place, id.to_owned())
            }
            None => (None, 0, String::new()),
        };
        let chain = self.chain_of(conversation_id, replays).await?;
        let rows = sqlx::query!(
            r#"
            -- First where each entry is, and only for those of the page what it says: a long conversation is not read as a whole.
            with happened as (
                select * from (
                    select s.started_at as at, 1 as place, s.session_id as id, s.session_id, s.conversation_id,
                        null::bigint as number
                    from conversation_sessions s
                    where s.conversation_id = any ($1)
                        and ($2::timestamptz is null or (s.started_at, 1, s.session_id) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) sessions
                union all
                select * from (
                    select r.created_at, 2, r.message_id, r.session_id, r.conversation_id, r.message_number
                    -- Taken out before it is compared: a policy lets no `->>` into an index condition.
                    from (
                        select created_at, message_id, session_id, conversation_id, message_number,
                            role = 'user' or (role = 'assistant' and not internal) as is_said,
                            case when role = 'user' or (role = 'assistant' and not internal) then null
                                else (details ->> 'inbox_id')::bigint end as inbox_id
                        from conversation_records
                        where conversation_id = any ($1) and ($2::timestamptz is null or created_at <= $2)
                        offset 0
                    ) r
                    where (r.is_said or (r.inbox_id is not null and exists (
                            select from session_inbox i where i.session_id = r.session_id and i.inbox_id = r.inbox_id)))
                        and ($2::timestamptz is null or (r.created_at, 2, r.message_id) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) said
                union all
                -- What was said before the line's first session, as an imported chat has it. It sorts before that session.
                select * from (
                    select least(coalesce(to_timestamp(m."timestamp" / 1000.0), s.started_at), s.started_at), 0,
                        s.session_id || '/' || lpad(m.ordinal::text, 6, '0'), s.session_id, s.conversation_id,
                        m.ordinal::bigint
                    from conversation_sessions s
                    join session_seed_messages m on m.session_id = s.session_id
                    where s.conversation_id = any ($1) and m.role <> 'system' and s.parent_session_id is null
                        and not exists (select from conversation_sessions p
                            where p.conversation_id = s.conversation_id and p.ordinal < s.ordinal)
                        and ($2::timestamptz is null
                            or (least(coalesce(to_timestamp(m."timestamp" / 1000.0), s.started_at), s.started_at), 0,
                                s.session_id || '/' || lpad(m.ordinal::text, 6, '0')) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) earlier
                union all
                select * from (
                    select r.created_at, 3, c.call_id, c.session_id, s.conversation_id, null::bigint
                    from conversation_sessions s
                    join tool_calls c on c.session_id = s.session_id
                    join conversation_records r
                        on r.conversation_id = s.conversation_id and r.message_number = c.message_number
                    where s.conversation_id = any ($1)
                        and ($2::timestamptz is null or (r.created_at, 3, c.call_id) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) called
                union all
                select * from (
                    select d.created_at, 4, d.delivery_id, d.session_id, d.conversation_id, null::bigint
                    from conversation_sessions s
                    join deliveries d on d.session_id = s.session_id
                    where s.conversation_id = any ($1)
                        and ($2::timestamptz is null or (d.created_at, 4, d.delivery_id) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) went_out
            ), page as materialized (
                select * from happened order by at desc, place desc, id desc limit $5
            )
            select at as "at!", place as "place!", id as "id!", session_id as "session_id!",
                conversation_id as "conversation_id!", kind as "kind!", facts as "facts!", content, found as "found!"
            from (
            select page.at, page.place, page.id, page.session_id, page.conversation_id, told.kind, told.facts, told.content,
                count(*) over () as found, row_number() over page as ordinal,
                sum(octet_length(told.facts) + coalesce(octet_length(told.content), 0)) over page as weighed
            from page
            cross join lateral (
                select 'session' as kind,
                    json_build_object('trigger_type', s.trigger_type, 'trigger_id', s.trigger_id,
                        'agent', s.agent, 'model_id', s.model_id, 'status', s.status, 'error', s.error,
                        'parent_session_id', s.parent_session_id, 'total_turns', s.total_turns,
                        'total_input_tokens', s.total_input_tokens,
                        'total_output_tokens', s.total_output_tokens,
                        'total_cost_micros', s.total_cost_micros)::text as facts,
                    null as content
                from conversation_sessions s
                where page.place = 1 and s.session_id = page.id
                union all
                select case r.role when 'assistant' then 'reply' else 'message' end,
                    json_build_object('message_number', r.message_number, 'sender', i.sender,
                        'attachments', i.attachments)::text,
                    r.content::text
                from (
                    select *, (details ->> 'inbox_id')::bigint as inbox_id from conversation_records
                    where page.place = 2 and conversation_id = page.conversation_id and message_number = page.number
                    offset 0
                ) r
                left join session_inbox i on i.session_id = r.session_id and i.inbox_id = r.inbox_id
                union all
                select case m.role when 'assistant' then 'reply' else 'message' end,
                    json_build_object('earlier', true, 'ordinal', m.ordinal)::text,
                    json_build_array(json_build_object('type', 'text', 'text', m.content))::text
                from session_seed_messages m
                where page.place = 0 and m.session_id = page.session_id and m.ordinal = page.number
                union all
                select 'tool_call',
                    json_build_object('name', c.name, 'effect', c.effect, 'status', c.status,
                        'message_number', c.message_number, 'started_at', c.started_at,
                        'settled_at', c.settled_at)::text,
                    null
                from tool_calls c
                where page.place = 3 and c.session_id = page.session_id and c.call_id = page.id
                union all
                select 'delivery',
                    json_build_object('channel', d.channel, 'status', d.status, 'content', d.content,
                        'attempt', d.attempt, 'last_error', d.last_error, 'receipt', d.receipt,
                        'undelivered', d.undelivered, 'settled_at', d.settled_at)::text,
                    null
                from deliveries d
                where page.place = 4 and d.delivery_id = page.id
                -- Keeps Postgres from turning each text into JSON twice.
                offset 0
            ) told
            window page as (order by page.at desc, page.place desc, page.id desc rows unbounded preceding)
            ) weighed
            where weighed <= $6 or ordinal = 1
            order by at desc, place desc, id desc
            "#,
            &chain,
            at,
            place,
            id,
            limit,
            bytes
        )
        .fetch_all(&self.pool)
        .await?;
        let found = rows.first().map_or(0, |row| row.found);
        let mut seals = Vec::with_capacity(rows.len());
        for row in &rows {
            seals.push(self.seal_of_row(&row.session_id).await?);
        }
        let items: Vec<HistoryItem> = rows
            .into_iter()
            .zip(seals)
            .map(|(row, seal)| {
                let open = |json: String| match &seal {
                    Some(seal) => seal.open_json(json),
                    None => Ok(hide(&json)),
                };
                let mut facts: Value = crate::json::from_text("history", &open(row.facts)?)?;
                if let Some(content) = row.content {
                    let blocks: Vec<Block> = crate::json::from_text("message", &open(content)?)?;
                    let calls = blocks.iter().filter(|block| matches!(block, Block::ToolCall(_))).count();
                    // The answer to a question is stored as the result of the call that asked it.
                    let answers = blocks.iter().filter_map(|block| match block {
                        Block::ToolResult(answer) => Some(answer.content.as_str()),
                        Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => None,
                    });
                    let answer: String = answers.collect();
                    facts["text"] = if answer.is_empty() { text_of(&blocks) } else { answer }.into();
                    facts["tool_calls"] = calls.into();
                }
                if row.kind == "session" {
                    let trigger_type = facts["trigger_type"].as_str().unwrap_or_default();
                    facts["trigger_source"] = json!(TriggerSource::of(trigger_type).as_str());
                }
                Ok(HistoryItem {
                    cursor: format!("{}.{}.{}", row.at.timestamp_micros(), row.place, row.id),
                    at: row.at,
                    kind: row.kind,
                    conversation_id: shown(&row.conversation_id).to_owned(),
                    session_id: row.session_id,
                    id: row.id,
                    facts,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Page::of(items, found, limit))
    }

    /// Returns sums over the conversation, its parents and its forks, with or without the replays of its sessions.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an unknown conversation, [`Error::Database`].
    pub async fn history_totals(&self, conversation_id: &str, replays: bool) -> Result<HistoryTotals> {
        let chain = self.chain_of(conversation_id, replays).await?;
        Ok(sqlx::query_as!(
            HistoryTotals,
            r#"
            with s as (
                select count(*) as sessions, coalesce(sum(total_turns), 0)::bigint as turns,
                    coalesce(sum(total_input_tokens), 0)::bigint as input_tokens,
                    coalesce(sum(total_output_tokens), 0)::bigint as output_tokens,
                    coalesce(sum(total_cost_micros), 0)::bigint as cost_micros
                from conversation_sessions
                where conversation_id = any ($1)
            ), c as (
                select count(*) as calls
                from conversation_sessions o
                join tool_calls t on t.session_id = o.session_id
                where o.conversation_id = any ($1)
            ), d as (
                select count(*) as all_of_them,
                    count(*) filter (where d.status = 'sent') as sent,
                    count(*) filter (where d.status in ('failed', 'expired', 'uncertain')) as not_sent,
                    count(*) filter (where d.undelivered <> '[]') as undelivered
                from conversation_sessions o
                join deliveries d on d.session_id = o.session_id
                where o.conversation_id = any ($1)
            )
            select cardinality($1::text[])::bigint as "conversations!", s.sessions as "sessions!", s.turns as "turns!",
                s.input_tokens as "input_tokens!", s.output_tokens as "output_tokens!",
                s.cost_micros as "cost_micros!", c.calls as "tool_calls!", d.all_of_them as "deliveries!",
                d.sent as "deliveries_sent!", d.not_sent as "deliveries_not_sent!",
                d.undelivered as "deliveries_undelivered!"
            from s, c, d
            "#,
            &chain
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Returns the ids of the conversation, its parents and its forks, with or without the replays of its sessions.
    async fn chain_of(&self, conversation_id: &str, replays: bool) -> Result<Vec<String>> {
        let mut connection = self.pool.acquire().await?;
        let chain = chain(&mut connection, conversation_id).await?;
        if chain.is_empty() {
            return Err(Error::NotFound { what: "conversation", id: shown(conversation_id).to_owned() });
        }
        if replays {
            return Ok(chain);
        }
        // A replay has a conversation of its own. The one that was asked for stays.
        Ok(sqlx::query_scalar!(
            r#"select id as "id!" from unnest($1::text[]) id
            where id = $2 or not exists (
                select from conversation_sessions s where s.conversation_id = id and s.trigger_type = 'replay')"#,
            &chain,
            conversation_id
        )
        .fetch_all(&mut *connection)
        .await?)
    }
}

/// Reads a cursor: time, kind of entry and id. `None`: it is not a cursor of this list.
pub fn parse(cursor: &str) -> Option<(DateTime<Utc>, i32, &str)> {
    let mut parts = cursor.splitn(3, '.');
    let at = DateTime::from_timestamp_micros(parts.next()?.parse().ok()?)?;
    let place: i32 = parts.next()?.parse().ok()?;
    Some((at, place, parts.next()?)).filter(|_| (0..=4).contains(&place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_back_and_anything_else_is_none() {
        let (at, place, id) = parse("1700000000000001.3.call.with.dots").unwrap();
        assert_eq!((at.timestamp_micros(), place, id), (1_700_000_000_000_001, 3, "call.with.dots"));
        for odd in ["", "x", "1.2", "1.9.a", "x.1.a", "99999999999999999999.1.a"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
    }
}
