//! Sessions as people see them: rows, messages and steps for the API and the command line.

use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Value, json};
use wakeful_workflow::record::{Block, text_of};

/// A session's row as it is shown.
#[derive(Clone, Debug, Serialize)]
pub struct SessionSummary {
    pub session_id: String,
    /// As the API gives it: without the space.
    pub conversation_id: String,
    pub space_id: String,
    pub mailbox_id: String,
    pub trigger_type: String,
    pub agent: String,
    pub model_id: String,
    pub status: String,
    pub cancel_requested: bool,
    pub to_message_number: i64,
    pub total_turns: i32,
    pub total_input_tokens: i64,
    pub total_output_tokens: i64,
    pub total_cached_tokens: i64,
    pub total_cost_cents: i32,
    pub total_cost_micros: i64,
    pub state: Value,
    pub started_at: DateTime<Utc>,
    pub completed_at: Option<DateTime<Utc>>,
    pub error: Option<String>,
    /// The open question, while the run waits for its answer.
    pub question: Option<String>,
    /// The step job's row: who holds it, and what it last failed of.
    pub job: Option<Value>,
}

/// One message as it is shown.
#[derive(Clone, Debug, Serialize)]
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

/// One effect as it is shown: a ledger row or a delivery.
#[derive(Clone, Debug, Serialize)]
pub struct CallView {
    pub call_id: String,
    pub name: String,
    pub effect: String,
    pub status: String,
    pub attempts: i32,
}

/// One outgoing message as it is shown.
#[derive(Clone, Debug, Serialize)]
pub struct DeliveryView {
    pub delivery_id: String,
    pub channel: String,
    pub status: String,
    pub attempt: i32,
    pub last_error: Option<String>,
    pub receipt: Option<Value>,
}

/// Which sessions to list.
#[derive(Clone, Debug, Default)]
pub struct SessionFilter {
    pub space_id: Option<String>,
    pub status: Option<String>,
    /// As it is stored: `space/id`.
    pub conversation_id: Option<String>,
    /// The last session id of the page before.
    pub before: Option<String>,
    pub limit: i64,
}

impl Store {
    /// Sessions, newest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn sessions(&self, filter: &SessionFilter) -> Result<Vec<SessionSummary>> {
        self.summaries(filter, None).await
    }

    /// One session.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn session(&self, space_id: Option<&str>, session_id: &str) -> Result<SessionSummary> {
        let filter =
            SessionFilter { space_id: space_id.map(str::to_owned), limit: 1, ..SessionFilter::default() };
        let mut found = self.summaries(&filter, Some(session_id)).await?;
        found.pop().ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })
    }

    async fn summaries(
        &self,
        filter: &SessionFilter,
        session_id: Option<&str>,
    ) -> Result<Vec<SessionSummary>> {
        let rows = sqlx::query!(
            r#"
            select s.session_id, s.conversation_id, s.space_id, s.mailbox_id, s.trigger_type, s.agent, s.model_id,
                s.status, s.cancel_requested, s.to_message_number, s.total_turns, s.total_input_tokens,
                s.total_output_tokens, s.total_cached_tokens, s.total_cost_cents as "total_cost_cents!",
                s.total_cost_micros, s.state, s.started_at, s.completed_at, s.error,
                q.content::text as "asked?", q.call_id as "asked_by?",
                case when j.job_id is not null then json_build_object(
                    'step_number', j.step_number, 'attempt', j.attempt, 'stuck', j.stuck, 'worker_id', j.worker_id,
                    'leased', j.lease is not null, 'run_at', j.run_at, 'last_error', j.last_error) end as job
            from conversation_sessions s
            left join jobs j on j.kind = 'step' and j.session_id = s.session_id
            left join lateral (
                select r.content, c.call_id
                from tool_calls c
                join conversation_records r
                    on r.conversation_id = s.conversation_id and r.message_number = c.message_number
                where c.session_id = s.session_id and c.status = 'waiting' and c.result_message_number is null
                limit 1
            ) q on true
            where ($1::text is null or s.space_id = $1)
                and ($2::text is null or s.status = $2)
                and ($3::text is null or s.conversation_id = $3)
                and ($4::text is null or s.session_id < $4)
                and ($5::text is null or s.session_id = $5)
            order by s.session_id desc
            limit $6
            "#,
            filter.space_id,
            filter.status,
            filter.conversation_id,
            filter.before,
            session_id,
            filter.limit
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter()
            .map(|row| {
                let question = match (&row.asked, &row.asked_by) {
                    (Some(content), Some(call_id)) => question(content, call_id)?,
                    (_, _) => None,
                };
                Ok(SessionSummary {
                    session_id: row.session_id,
                    conversation_id: row
                        .conversation_id
                        .split_once('/')
                        .map_or(row.conversation_id.clone(), |(_, id)| id.to_owned()),
                    space_id: row.space_id,
                    mailbox_id: row.mailbox_id,
                    trigger_type: row.trigger_type,
                    agent: row.agent,
                    model_id: row.model_id,
                    status: row.status,
                    cancel_requested: row.cancel_requested,
                    to_message_number: row.to_message_number,
                    total_turns: row.total_turns,
                    total_input_tokens: row.total_input_tokens,
                    total_output_tokens: row.total_output_tokens,
                    total_cached_tokens: row.total_cached_tokens,
                    total_cost_cents: row.total_cost_cents,
                    total_cost_micros: row.total_cost_micros,
                    state: row.state,
                    started_at: row.started_at,
                    completed_at: row.completed_at,
                    error: row.error,
                    question,
                    job: row.job,
                })
            })
            .collect()
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
        let rows = sqlx::query!(
            r#"
            select message_number, message_id, run_id, step_number, role, content::text as "content!", internal,
                created_at
            from conversation_records
            where session_id = $1 and ($2::bigint is null or message_number < $2)
            order by message_number desc
            limit $3
            "#,
            session_id,
            before,
            limit
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter()
            .rev()
            .map(|row| {
                let blocks: Vec<Block> = crate::hydrate::from_text("message", &row.content)?;
                Ok(MessageView {
                    message_number: row.message_number,
                    message_id: row.message_id,
                    run_id: row.run_id,
                    step_number: row.step_number,
                    role: row.role,
                    text: text_of(&blocks),
                    content: crate::hydrate::from_text("message", &row.content)?,
                    internal: row.internal,
                    created_at: row.created_at,
                })
            })
            .collect()
    }

    /// The newest `limit` steps below `before`, oldest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn steps(&self, session_id: &str, before: Option<i64>, limit: i64) -> Result<Vec<StepView>> {
        let rows = sqlx::query!(
            "select step_number, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
                output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt,
                worker_id, started_at, committed_at
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
                usage: json!({
                    "input_tokens": row.input_tokens,
                    "output_tokens": row.output_tokens,
                    "cached_tokens": row.cached_tokens,
                    "cache_write_tokens": row.cache_write_tokens,
                    "cost_micros": row.cost_micros,
                }),
                executed_local_tool_count: row.executed_local_tool_count,
                attempt: row.attempt,
                worker_id: row.worker_id,
                started_at: row.started_at,
                committed_at: row.committed_at,
            })
            .collect())
    }

    /// The session's ledger, in the order in which the calls were asked for.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn calls(&self, session_id: &str) -> Result<Vec<CallView>> {
        Ok(sqlx::query_as!(
            CallView,
            "select call_id, name, effect, status, attempts from tool_calls
            where session_id = $1
            order by message_number, call_id
            limit 1000",
            session_id
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// The session's outgoing messages, in the order in which they are sent.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn deliveries(&self, session_id: &str) -> Result<Vec<DeliveryView>> {
        Ok(sqlx::query_as!(
            DeliveryView,
            r#"select delivery_id, channel, status, attempt, last_error, receipt from deliveries
            where session_id = $1
            order by ordinal
            limit 1000"#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// How many sessions there are in each status.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn session_counts(&self) -> Result<Vec<(String, i64)>> {
        let rows = sqlx::query!(
            r#"select status, count(*) as "count!" from conversation_sessions group by status order by status"#
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(|row| (row.status, row.count)).collect())
    }
}

fn question(content: &str, call_id: &str) -> Result<Option<String>> {
    let blocks: Vec<Block> = crate::hydrate::from_text("message", content)?;
    Ok(blocks.into_iter().find_map(|block| match block {
        Block::ToolCall(call) if call.call_id.as_str() == call_id => {
            Some(call.arguments["question"].as_str().unwrap_or_default().to_owned())
        }
        Block::ToolCall(_) | Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => None,
    }))
}
