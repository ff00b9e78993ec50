//! History of a conversation, its parents and its forks: messages, replies, tool calls, deliveries and how
//! they ended. Newest first, in pages.

use crate::chain::chain;
use crate::session::shown;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Value, json};
use wakeful_workflow::record::{Block, text_of};
use wakeful_workflow::trigger::TriggerSource;

/// One entry of the history.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HistoryItem {
    pub at: DateTime<Utc>,
    /// `session`, `message` (came in), `reply`, `tool_call` or `delivery` (went out).
    #[serde(rename = "type")]
    pub kind: String,
    /// As in the API: without the space.
    pub conversation_id: String,
    pub session_id: String,
    /// Id of the session, message, call or delivery.
    pub id: String,
    #[serde(flatten)]
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
    /// Returns the history of `conversation_id`, its parents and its forks, newest first. `before` is a
    /// cursor of the previous page.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an unknown conversation, [`Error::Corrupt`] for an invalid cursor,
    /// [`Error::Database`].
    pub async fn history(
        &self,
        conversation_id: &str,
        before: Option<&str>,
        limit: i64,
    ) -> Result<Vec<HistoryItem>> {
        let (at, place, id) = match before {
            Some(cursor) => {
                let (at, place, id) =
                    parse(cursor).ok_or_else(|| Error::corrupt("cursor", "it is none of this list's"))?;
                (Some(at), place, id.to_owned())
            }
            None => (None, 0, String::new()),
        };
        let chain = self.chain_of(conversation_id).await?;
        let rows = sqlx::query!(
            r#"
            with happened as (
                select * from (
                    select s.started_at as at, 1 as place, s.session_id as id, s.session_id, s.conversation_id,
                        'session' as kind,
                        json_build_object('trigger_type', s.trigger_type, 'trigger_id', s.trigger_id,
                            'agent', s.agent, 'model_id', s.model_id, 'status', s.status, 'error', s.error,
                            'parent_session_id', s.parent_session_id, 'total_turns', s.total_turns,
                            'total_input_tokens', s.total_input_tokens,
                            'total_output_tokens', s.total_output_tokens,
                            'total_cost_micros', s.total_cost_micros)::text as facts,
                        null as content
                    from conversation_sessions s
                    where s.conversation_id = any ($1)
                        and ($2::timestamptz is null or (s.started_at, 1, s.session_id) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) sessions
                union all
                select * from (
                    select r.created_at, 2, r.message_id, r.session_id, r.conversation_id,
                        case r.role when 'assistant' then 'reply' else 'message' end,
                        json_build_object('message_number', r.message_number, 'sender', i.sender,
                            'attachments', i.attachments)::text,
                        r.content::text
                    from conversation_records r
                    left join session_inbox i
                        on i.session_id = r.session_id and i.inbox_id = (r.details ->> 'inbox_id')::bigint
                    where r.conversation_id = any ($1)
                        and (r.role = 'user' or i.inbox_id is not null or (r.role = 'assistant' and not r.internal))
                        and ($2::timestamptz is null or (r.created_at, 2, r.message_id) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) said
                union all
                select * from (
                    select r.created_at, 3, c.call_id, c.session_id, s.conversation_id, 'tool_call',
                        json_build_object('name', c.name, 'effect', c.effect, 'status', c.status,
                            'message_number', c.message_number, 'started_at', c.started_at,
                            'settled_at', c.settled_at)::text,
                        null
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
                    select d.created_at, 4, d.delivery_id, d.session_id, d.conversation_id, 'delivery',
                        json_build_object('channel', d.channel, 'status', d.status, 'content', d.content,
                            'attempt', d.attempt, 'last_error', d.last_error, 'receipt', d.receipt,
                            'undelivered', d.undelivered, 'settled_at', d.settled_at)::text,
                        null
                    from conversation_sessions s
                    join deliveries d on d.session_id = s.session_id
                    where s.conversation_id = any ($1)
                        and ($2::timestamptz is null or (d.created_at, 4, d.delivery_id) < ($2, $3, $4))
                    order by 1 desc, 3 desc
                    limit $5
                ) went_out
            )
            select at as "at!", place as "place!", id as "id!", session_id as "session_id!",
                conversation_id as "conversation_id!", kind as "kind!", facts as "facts!", content
            from happened
            order by at desc, place desc, id desc
            limit $5
            "#,
            &chain,
            at,
            place,
            id,
            limit
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter()
            .map(|row| {
                let mut facts: Value = crate::hydrate::from_text("history", &row.facts)?;
                if let Some(content) = &row.content {
                    let blocks: Vec<Block> = crate::hydrate::from_text("message", content)?;
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
            .collect()
    }

    /// Returns sums over the conversation, its parents and its forks.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an unknown conversation, [`Error::Database`].
    pub async fn history_totals(&self, conversation_id: &str) -> Result<HistoryTotals> {
        let chain = self.chain_of(conversation_id).await?;
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

    /// Returns the ids of the conversation, its parents and its forks.
    async fn chain_of(&self, conversation_id: &str) -> Result<Vec<String>> {
        let mut connection = self.pool.acquire().await?;
        let chain = chain(&mut connection, conversation_id).await?;
        if chain.is_empty() {
            return Err(Error::NotFound { what: "conversation", id: shown(conversation_id).to_owned() });
        }
        Ok(chain)
    }
}

/// Reads a cursor: time, kind of entry and id. `None`: it is not a cursor of this list.
pub fn parse(cursor: &str) -> Option<(DateTime<Utc>, i32, &str)> {
    let mut parts = cursor.splitn(3, '.');
    let at = DateTime::from_timestamp_micros(parts.next()?.parse().ok()?)?;
    let place: i32 = parts.next()?.parse().ok()?;
    Some((at, place, parts.next()?)).filter(|_| (1..=4).contains(&place))
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
