//! Parts of a session as people see them: runs, messages, steps, calls, deliveries.

use crate::page::Page;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Value, json};
use wakeful_workflow::record::{Block, text_of};

/// One run as it is shown.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunView {
    pub run_id: String,
    #[cfg_attr(feature = "schema", schemars(with = "wakeful_workflow::bundle::RunStatus"))]
    pub status: String,
    /// The text of the message that opened the run.
    pub prompt: Option<String>,
    /// The number of that message. `None` until the run starts.
    pub prompt_message_number: Option<i64>,
    pub steps: i64,
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub tool_calls: i64,
    pub error: Option<String>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub completed_at: Option<DateTime<Utc>>,
}

/// One message as it is shown.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MessageView {
    pub message_number: i64,
    pub message_id: String,
    pub run_id: String,
    pub step_number: i64,
    pub role: String,
    pub text: String,
    pub content: Value,
    pub internal: bool,
    pub created_at: DateTime<Utc>,
}

/// One committed step as it is shown.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StepView {
    pub step_number: i64,
    pub run_id: String,
    pub from_message_number: i64,
    pub to_message_number: i64,
    pub finish_reason: String,
    pub usage: Value,
    pub executed_local_tool_count: i32,
    pub attempt: i32,
    pub worker_id: String,
    pub started_at: DateTime<Utc>,
    pub committed_at: DateTime<Utc>,
}

/// One tool call as it is shown: a row of the ledger.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CallView {
    pub call_id: String,
    pub name: String,
    #[cfg_attr(feature = "schema", schemars(with = "wakeful_workflow::effect::Effect"))]
    pub effect: String,
    #[cfg_attr(feature = "schema", schemars(with = "wakeful_workflow::session::CallStatus"))]
    pub status: String,
    pub attempts: i32,
    /// The arguments of an uncertain or unapproved call, as JSON: a person has to know them to resolve or approve it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// The hash of an unapproved call's arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub args_sha256: Option<String>,
    /// Why an uncertain call is uncertain. Without it, its worker died while it ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// One outgoing message as it is shown.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeliveryView {
    pub delivery_id: String,
    pub channel: String,
    #[cfg_attr(feature = "schema", schemars(extend("enum" = crate::outbox::STATUSES)))]
    pub status: String,
    pub attempt: i32,
    pub last_error: Option<String>,
    pub receipt: Option<Value>,
    /// Recipients that a sent delivery did not reach: a list of [`crate::bounce::Undelivered`].
    pub undelivered: Value,
    /// It came in a bundle and is never sent from this database.
    #[serde(skip)]
    pub imported: bool,
}

impl Store {
    /// Returns ids of sessions that begin with `prefix`, which ends with a hexadecimal digit; at most `limit`.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn sessions_that_begin(&self, prefix: &str, limit: i64) -> Result<Vec<String>> {
        // `g` comes after every digit of an id, so this is a range of the primary key.
        Ok(sqlx::query_scalar!(
            "select session_id from conversation_sessions
            where session_id >= $1 and session_id < $1 || 'g'
            order by session_id
            limit $2",
            prefix,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// The session's newest `limit` runs before the run `before`, oldest first, and no more than have about `bytes` bytes together.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn runs(
        &self,
        session_id: &str,
        before: Option<&str>,
        limit: i64,
        bytes: i64,
    ) -> Result<Page<RunView>> {
        let rows = sqlx::query!(
            r#"
            select run_id as "run_id!", status as "status!", prompt_message_number, steps as "steps!",
                input_tokens as "input_tokens!", output_tokens as "output_tokens!", tool_calls as "tool_calls!", error,
                created_at as "created_at!", started_at, completed_at, prompt as "prompt?", waiting as "waiting?",
                found as "found!"
            from (
                select newest.*, count(*) over () as found, row_number() over runs as place,
                    sum(coalesce(octet_length(prompt), 0) + coalesce(octet_length(waiting), 0)) over runs as weighed
                from (
                    select r.run_id, r.status, r.prompt_message_number, used.steps, used.input_tokens, used.output_tokens,
                        used.tool_calls, r.error, r.created_at, r.started_at, r.completed_at, m.content::text as prompt,
                        i.content as waiting
                    from session_runs r
                    cross join lateral used_by_run(r) used
                    left join conversation_records m
                        on m.conversation_id = r.conversation_id and m.message_number = r.prompt_message_number
                    left join lateral (
                        select content from session_inbox
                        where session_id = r.session_id and run_id = r.run_id
                        order by inbox_id
                        limit 1
                    ) i on r.prompt_message_number is null
                    where r.session_id = $1
                        and ($4::text is null or (r.created_at, r.run_id) < (
                            select b.created_at, b.run_id from session_runs b where b.session_id = $1 and b.run_id = $4))
                    order by r.created_at desc, r.run_id desc
                    limit $2
                ) newest
                window runs as (order by created_at desc, run_id desc rows unbounded preceding)
            ) weighed
            where place = 1 or weighed <= $3
            order by created_at desc, run_id desc
            "#,
            session_id,
            limit,
            bytes,
            before
        )
        .fetch_all(&self.pool)
        .await?;
        let found = rows.first().map_or(0, |row| row.found);
        let seal = self.seal_of(session_id).await?;
        let runs: Vec<RunView> = rows
            .into_iter()
            .rev()
            .map(|row| {
                let said = row.prompt.map(|content| {
                    let content = seal.open_json(content)?;
                    let blocks: Vec<Block> = crate::json::from_text("message", &content)?;
                    Ok::<_, Error>(text_of(&blocks))
                });
                let waiting = row.waiting.map(|text| seal.open(text)).transpose()?;
                Ok(RunView {
                    run_id: row.run_id,
                    status: row.status,
                    prompt: said.transpose()?.or(waiting),
                    prompt_message_number: row.prompt_message_number,
                    steps: row.steps,
                    input_tokens: row.input_tokens,
                    output_tokens: row.output_tokens,
                    tool_calls: row.tool_calls,
                    error: seal.open_some(row.error)?,
                    created_at: row.created_at,
                    started_at: row.started_at,
                    completed_at: row.completed_at,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Page::of(runs, found, limit))
    }

    /// The newest `limit` messages below `before`, oldest first.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn messages(
        &self,
        session_id: &str,
        before: Option<i64>,
        limit: i64,
    ) -> Result<Vec<MessageView>> {
        Ok(self.messages_page(None, session_id, before, limit, i64::MAX).await?.items)
    }

    /// Like [`Store::messages`], but only internal messages (`true`) or only the others (`false`; `None`: all), and only as many as
    /// have about `bytes` bytes together, and at least one.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn messages_page(
        &self,
        internal: Option<bool>,
        session_id: &str,
        before: Option<i64>,
        limit: i64,
        bytes: i64,
    ) -> Result<Page<MessageView>> {
        let rows = sqlx::query!(
            r#"
            select message_number as "message_number!", message_id as "message_id!", run_id as "run_id!", step_number, role as "role!",
                content as "content!", internal as "internal!", created_at as "created_at!", found as "found!"
            from (
                select m.*, count(*) over () as found, row_number() over (order by message_number desc) as place,
                    sum(octet_length(content)) over (order by message_number desc) as weighed
                from (
                    select message_number, message_id, run_id, step_number, role, content::text as content, internal, created_at
                    from conversation_records
                    where session_id = $1 and ($2::bigint is null or message_number < $2)
                        and ($4::boolean is null or internal = $4)
                    order by message_number desc
                    limit $3
                ) m
            ) weighed
            where place = 1 or weighed <= $5
            order by message_number desc
            "#,
            session_id,
            before,
            limit,
            internal,
            bytes
        )
        .fetch_all(&self.pool)
        .await?;
        let found = rows.first().map_or(0, |row| row.found);
        let seal = self.seal_of(session_id).await?;
        let messages: Result<Vec<MessageView>> = rows
            .into_iter()
            .rev()
            .map(|row| {
                let content = seal.open_json(row.content)?;
                let blocks: Vec<Block> = crate::json::from_text("message", &content)?;
                Ok(MessageView {
                    message_number: row.message_number,
                    message_id: row.message_id,
                    run_id: row.run_id,
                    step_number: row.step_number,
                    role: row.role,
                    text: text_of(&blocks),
                    content: crate::json::from_text("message", &content)?,
                    internal: row.internal,
                    created_at: row.created_at,
                })
            })
            .collect();
        Ok(Page::of(messages?, found, limit))
    }

    /// The newest `limit` steps below `before`, oldest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn steps(&self, session_id: &str, before: Option<i64>, limit: i64) -> Result<Vec<StepView>> {
        let rows = sqlx::query!(
            "select step_number, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
                output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt,
                worker_id, started_at, committed_at, usage_unknown
            from session_steps
            where session_id = $1 and ($2::bigint is null or step_number < $2)
            order by step_number desc
            limit $3",
            session_id,
            before,
            limit
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .rev()
            .map(|row| StepView {
                step_number: row.step_number,
                run_id: row.run_id,
                from_message_number: row.from_message_number,
                to_message_number: row.to_message_number,
                finish_reason: row.finish_reason,
                // A step that came from another system may have none.
                usage: match row.usage_unknown {
                    true => Value::Null,
                    false => json!({
                        "input_tokens": row.input_tokens,
                        "output_tokens": row.output_tokens,
                        "cached_tokens": row.cached_tokens,
                        "cache_write_tokens": row.cache_write_tokens,
                        "cost_micros": row.cost_micros,
                    }),
                },
                executed_local_tool_count: row.executed_local_tool_count,
                attempt: row.attempt,
                worker_id: row.worker_id,
                started_at: row.started_at,
                committed_at: row.committed_at,
            })
            .collect())
    }

    /// The session's tool calls, in the order of the messages that asked for them. Of more than 1000, those that are open or
    /// uncertain, and the newest.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn calls(&self, session_id: &str) -> Result<Vec<CallView>> {
        let mut calls = sqlx::query_as!(
            CallView,
            "select c.call_id, c.name, c.effect, c.status, c.attempts,
                case when c.status = 'unapproved' then c.args_sha256 end as args_sha256,
                case when c.status in ('uncertain', 'unapproved') then (
                    select block ->> 'arguments'
                    from conversation_sessions s, conversation_records r,
                        jsonb_array_elements(r.content::jsonb) block
                    where s.session_id = c.session_id and r.conversation_id = s.conversation_id
                        and r.message_number = c.message_number and block ->> 'call_id' = c.call_id
                    limit 1
                ) end as arguments,
                case when c.status = 'uncertain' then (
                    select e.payload ->> 'reason' from session_events e
                    where e.session_id = c.session_id and e.type = 'TOOL_FAILED_UNCERTAIN'
                        and e.payload ->> 'call_id' = c.call_id
                    limit 1
                ) end as reason
            from (
                select * from tool_calls
                where session_id = $1
                order by result_message_number is null or status = 'uncertain' desc, message_number desc, call_id desc
                limit 1000
            ) c
            order by c.message_number, c.call_id",
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let seal = self.seal_of(session_id).await?;
        for call in &mut calls {
            call.arguments = call.arguments.take().map(|sealed| seal.open(sealed)).transpose()?;
            call.reason = seal.open_some(call.reason.take())?;
        }
        Ok(calls)
    }

    /// The session's outgoing messages, in the order in which they are sent.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn deliveries(&self, session_id: &str) -> Result<Vec<DeliveryView>> {
        let mut deliveries = sqlx::query_as!(
            DeliveryView,
            r#"select delivery_id, channel, status, attempt, last_error, receipt, undelivered, imported
            from deliveries
            where session_id = $1
            order by ordinal
            limit 1000"#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let seal = self.seal_of(session_id).await?;
        for one in &mut deliveries {
            one.last_error = seal.open_some(one.last_error.take())?;
            one.receipt = one.receipt.take().map(|receipt| seal.open_value(receipt)).transpose()?;
            one.undelivered = seal.open_value(one.undelivered.take())?;
        }
        Ok(deliveries)
    }
}
