//! Sessions as people see them: rows, messages and steps for the API and the command line.

mod earlier;
mod first_message;
#[cfg(feature = "schema")]
mod job;
mod parts;

pub use earlier::EarlierMessage;
pub use parts::{CallView, DeliveryView, MessageView, RunView, StepView};

use crate::encryption::{Seal, hide};
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Value, json};
use wakeful_workflow::access::Reach;
use wakeful_workflow::record::{Block, Usage};
use wakeful_workflow::session::{DebugMeta, Totals};
use wakeful_workflow::trigger::{self, TriggerSource};

/// A session's row as it is shown.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SessionSummary {
    pub session_id: String,
    /// As the API gives it: without the space.
    pub conversation_id: String,
    /// The conversation from which this session's conversation was forked, and the last message that the fork
    /// copied.
    pub parent_conversation_id: Option<String>,
    pub forked_at_message_number: Option<i64>,
    pub parent_session_id: Option<String>,
    pub forked_from_message_id: Option<String>,
    /// The tenant, for example an organisation.
    pub space_id: String,
    pub mailbox_id: String,
    pub trigger_type: String,
    pub trigger_id: String,
    pub trigger_source: TriggerSource,
    pub repository_id: Option<String>,
    pub agent: String,
    pub model_id: String,
    pub model_context_window: i32,
    pub tool_names: Vec<String>,
    pub policy: Value,
    /// Hash of the pinned prefix. `None` in sessions that are older than pinning.
    pub prefix_sha256: Option<String>,
    #[cfg_attr(feature = "schema", schemars(extend("enum" = wakeful_workflow::session::SessionStatus::WORDS)))]
    pub status: String,
    pub cancel_requested: bool,
    pub seed_message_count: i32,
    /// The conversation's last number before this session's first message.
    pub base_message_number: i64,
    /// The newest message number, including messages of an unfinished step.
    pub last_message_number: i64,
    /// The newest message number of a committed step.
    pub to_message_number: i64,
    pub total_turns: i32,
    pub total_input_tokens: i64,
    pub total_output_tokens: i64,
    pub total_cached_tokens: i64,
    pub total_cost_cents: i32,
    pub total_cost_micros: i64,
    /// Figures derived from the totals.
    pub debug_meta: DebugMeta,
    pub state: Value,
    pub started_at: DateTime<Utc>,
    pub completed_at: Option<DateTime<Utc>>,
    pub error: Option<String>,
    /// The text of the open question, while the run waits for an answer.
    pub question: Option<String>,
    /// The step job's row: the worker that holds it, its attempts, and its last error.
    #[cfg_attr(feature = "schema", schemars(with = "Option<job::StepJob>"))]
    pub job: Option<Value>,
}

/// Which sessions to list.
#[derive(Clone, Debug, Default)]
pub struct SessionFilter {
    pub space_id: Option<String>,
    pub agent: Option<String>,
    /// Only sessions in conversations of this user.
    pub user_id: Option<String>,
    pub status: Option<String>,
    /// As it is stored: `space/id`.
    pub conversation_id: Option<String>,
    pub trigger_type: Option<String>,
    /// Leaves out replays and imports.
    pub only_live: bool,
    /// Only sessions in conversations of this user, as a caller asks for it.
    pub user: Option<String>,
    /// Words that were said. See [`crate::search`] for this and what follows.
    pub text: Option<String>,
    /// Who wrote to it.
    pub from: Option<String>,
    /// A tool that its model asked for.
    pub tool: Option<String>,
    /// The fingerprint of a group of errors, or a part of its text.
    pub error: Option<String>,
    pub since: Option<DateTime<Utc>>,
    pub until: Option<DateTime<Utc>>,
    pub cost_over_micros: Option<i64>,
    pub steps_over: Option<i64>,
    /// With tool calls that failed.
    pub failed_calls: bool,
    /// The most recently active first, instead of the newest.
    pub by_activity: bool,
    /// The last session id of the page before.
    pub before: Option<String>,
    /// When that session had been active last, as that page had it. It may have moved since: with `by_activity` this is the place that
    /// the next page begins at.
    pub before_active_at: Option<DateTime<Utc>>,
    pub limit: i64,
}

/// Where a page of sessions ended: [`SessionFilter::before`] and [`SessionFilter::before_active_at`] of the next one.
#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
pub struct SessionPlace {
    pub session_id: String,
    /// Of a list by activity.
    #[sqlx(default)]
    pub active_at: Option<DateTime<Utc>>,
}

impl SessionFilter {
    /// Everything that a caller reaches.
    pub fn of(reach: &Reach) -> SessionFilter {
        let Reach { space_id, agent, user_id } = reach.clone();
        SessionFilter { space_id, agent, user_id, ..SessionFilter::default() }
    }
}

impl Store {
    /// Sessions, newest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn sessions(&self, filter: &SessionFilter) -> Result<Vec<SessionSummary>> {
        Ok(self.sessions_page(filter).await?.0)
    }

    /// Sessions, newest first, and where this page ended, if there may be more.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn sessions_page(
        &self,
        filter: &SessionFilter,
    ) -> Result<(Vec<SessionSummary>, Option<SessionPlace>)> {
        let places = self.find_sessions(filter).await?;
        let next = places.last().filter(|_| places.len() as i64 == filter.limit).cloned();
        let ids: Vec<String> = places.into_iter().map(|place| place.session_id).collect();
        if ids.is_empty() {
            return Ok((Vec::new(), None));
        }
        let mut sessions = self.sessions_by_id(&ids).await?;
        if filter.by_activity {
            let place = |id: &str| ids.iter().position(|one| one == id);
            sessions.sort_by_key(|session| place(&session.session_id));
        }
        Ok((sessions, next))
    }

    /// Returns whether a filter may name this trigger type: it is one of Wakeful's own types, or a session that the
    /// caller reaches has it.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn knows_trigger_type(&self, reach: &Reach, trigger_type: &str) -> Result<bool> {
        if trigger::OWN.contains(&trigger_type) {
            return Ok(true);
        }
        Ok(sqlx::query_scalar!(
            r#"select exists (
                select from conversation_sessions s
                left join conversation_counters c on c.conversation_id = s.conversation_id
                where s.trigger_type = $1
                    and ($2::text is null or s.space_id = $2)
                    and ($3::text is null or s.agent = $3)
                    and ($4::text is null or c.user_id = $4)
            ) as "made!""#,
            trigger_type,
            reach.space_id,
            reach.agent,
            reach.user_id
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Returns those of these sessions that exist.
    pub(crate) async fn sessions_by_id(&self, ids: &[String]) -> Result<Vec<SessionSummary>> {
        let filter = SessionFilter { limit: ids.len() as i64, ..SessionFilter::default() };
        self.summaries(&filter, Some(ids)).await
    }

    /// One session.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn session(&self, space_id: Option<&str>, session_id: &str) -> Result<SessionSummary> {
        let filter =
            SessionFilter { space_id: space_id.map(str::to_owned), limit: 1, ..SessionFilter::default() };
        let mut found = self.summaries(&filter, Some(&[session_id.to_owned()])).await?;
        found.pop().ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })
    }

    /// One session that the caller reaches. Any other does not exist for the caller.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn session_within(&self, reach: &Reach, session_id: &str) -> Result<SessionSummary> {
        let filter = SessionFilter { limit: 1, ..SessionFilter::of(reach) };
        let mut found = self.summaries(&filter, Some(&[session_id.to_owned()])).await?;
        found.pop().ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })
    }

    async fn summaries(&self, filter: &SessionFilter, ids: Option<&[String]>) -> Result<Vec<SessionSummary>> {
        let rows = sqlx::query!(
            r#"
            select s.session_id, s.conversation_id, c.parent_conversation_id as "parent_conversation_id?",
                c.forked_at_message_number as "forked_at_message_number?", s.parent_session_id,
                s.forked_from_message_id, s.space_id, s.mailbox_id, s.trigger_type, s.trigger_id, s.repository_id,
                s.agent, s.model_id, s.model_context_window, s.tool_names, s.policy, s.prefix_sha256, s.status,
                s.cancel_requested, s.seed_message_count, s.base_message_number, s.last_message_number,
                s.to_message_number, s.total_turns, s.total_input_tokens, s.total_output_tokens,
                s.total_cached_tokens, s.total_cache_write_tokens,
                ((s.total_cost_micros + 5000) / 10000)::integer as "total_cost_cents!", s.total_cost_micros, s.state,
                s.started_at, s.completed_at, s.error, s.data_key,
                q.content::text as "asked?", q.call_id as "asked_by?", q.question as "question?",
                case when j.job_id is not null then json_build_object(
                    'step_number', j.step_number, 'attempt', j.attempt, 'stuck', j.stuck, 'worker_id', j.worker_id,
                    'leased', j.lease is not null, 'run_at', j.run_at, 'last_error', j.last_error,
                    'fault_since', j.fault_since, 'faults', j.faults, 'held_by', j.held_by,
                    'held_for', (select p.reason from pauses p where p.pause_id = j.held_by),
                    'outage_since', j.outage_since, 'outage_faults', j.outage_faults, 'waits_for', g.provider,
                    'provider_down_since', g.since, 'next_probe_at', g.probe_at) end as job
            from conversation_sessions s
            left join conversation_counters c on c.conversation_id = s.conversation_id
            left join jobs j on j.kind = 'step' and j.session_id = s.session_id
            left join provider_gates g on g.gate_id = j.waits_for
            left join lateral (
                select r.content, c.call_id, (
                    -- The newest change of the status is the one to waiting_input. Sessions that asked before this was journalled
                    -- have no text there.
                    select e.payload ->> 'reason'
                    from session_events e
                    where e.session_id = s.session_id and e.type = 'state_transition'
                    order by e.seq desc
                    limit 1
                ) as question
                from tool_calls c
                join conversation_records r
                    on r.conversation_id = s.conversation_id and r.message_number = c.message_number
                where c.session_id = s.session_id and c.status = 'waiting' and c.result_message_number is null
                    and c.outcome is null
                limit 1
            ) q on true
            where ($1::text is null or s.space_id = $1)
                and ($2::text is null or s.status = $2)
                and ($3::text is null or s.conversation_id = $3)
                and ($4::text is null or s.session_id < $4)
                and ($5::text[] is null or s.session_id = any ($5))
                and ($7::text is null or s.trigger_type = $7)
                and not ($8 and s.trigger_type in ('replay', 'import'))
                and ($9::text is null or s.agent = $9)
                and ($10::text is null or c.user_id = $10)
            order by s.session_id desc
            limit $6
            "#,
            filter.space_id,
            filter.status,
            filter.conversation_id,
            filter.before,
            ids,
            filter.limit,
            filter.trigger_type,
            filter.only_live,
            filter.agent,
            filter.user_id
        )
        .fetch_all(&self.pool)
        .await?;
        let mut seals = Vec::with_capacity(rows.len());
        for row in &rows {
            seals.push(match &row.data_key {
                // A process without [encryption] shows a word in place of what it cannot open.
                Some(_) if !self.vault.is_open() => None,
                Some(_) => self.seal_of_row(&row.session_id).await?,
                None => Some(Seal::default()),
            });
        }
        rows.into_iter()
            .zip(seals)
            .map(|(row, seal)| {
                let asked = row.question.filter(|_| row.status == "waiting_input");
                let question = match (row.asked, &row.asked_by) {
                    (Some(_), Some(_)) if asked.is_some() => match &seal {
                        Some(seal) => seal.open_some(asked)?,
                        None => asked.map(|text| hide(&text)),
                    },
                    (Some(content), Some(call_id)) => {
                        let content =
                            seal.as_ref().map_or(Ok(content.clone()), |seal| seal.open_json(content))?;
                        question(&content, call_id)?
                    }
                    (_, _) => None,
                };
                let text = |text: Option<String>| match &seal {
                    Some(seal) => seal.open_some(text),
                    None => Ok(text.map(|text| hide(&text))),
                };
                let value = |value: serde_json::Value| match &seal {
                    Some(seal) => seal.open_value(value),
                    None => crate::json::from_text("session", &hide(&value.to_string())),
                };
                let totals = Totals {
                    turns: row.total_turns.into(),
                    usage: Usage {
                        input_tokens: row.total_input_tokens,
                        output_tokens: row.total_output_tokens,
                        cached_tokens: row.total_cached_tokens,
                        cache_write_tokens: row.total_cache_write_tokens,
                        cost_micros: row.total_cost_micros,
                    },
                };
                Ok(SessionSummary {
                    session_id: row.session_id,
                    conversation_id: shown(&row.conversation_id).to_owned(),
                    parent_conversation_id: row.parent_conversation_id.map(|id| shown(&id).to_owned()),
                    forked_at_message_number: row.forked_at_message_number,
                    parent_session_id: row.parent_session_id,
                    forked_from_message_id: row.forked_from_message_id,
                    space_id: row.space_id,
                    mailbox_id: row.mailbox_id,
                    trigger_source: TriggerSource::of(&row.trigger_type),
                    trigger_type: row.trigger_type,
                    trigger_id: row.trigger_id,
                    repository_id: row.repository_id,
                    agent: row.agent,
                    model_id: row.model_id,
                    model_context_window: row.model_context_window,
                    tool_names: row.tool_names.unwrap_or_default(),
                    policy: row.policy.map(value).transpose()?.unwrap_or_else(|| json!({})),
                    prefix_sha256: row.prefix_sha256,
                    status: row.status,
                    cancel_requested: row.cancel_requested,
                    seed_message_count: row.seed_message_count,
                    base_message_number: row.base_message_number,
                    last_message_number: row.last_message_number,
                    to_message_number: row.to_message_number,
                    total_turns: row.total_turns,
                    total_input_tokens: row.total_input_tokens,
                    total_output_tokens: row.total_output_tokens,
                    total_cached_tokens: row.total_cached_tokens,
                    total_cost_cents: row.total_cost_cents,
                    total_cost_micros: row.total_cost_micros,
                    debug_meta: DebugMeta::of(&totals),
                    state: value(row.state)?,
                    started_at: row.started_at,
                    completed_at: row.completed_at,
                    error: text(row.error)?,
                    question,
                    job: row.job.map(value).transpose()?,
                })
            })
            .collect()
    }
}

fn question(content: &str, call_id: &str) -> Result<Option<String>> {
    let blocks: Vec<Block> = crate::json::from_text("message", content)?;
    Ok(blocks.into_iter().find_map(|block| match block {
        Block::ToolCall(call) if call.call_id.as_str() == call_id => {
            // Sealed arguments are a string: their key cannot be had here.
            let asked =
                if call.arguments.is_string() { &call.arguments } else { &call.arguments["question"] };
            Some(hide(asked.as_str().unwrap_or_default()))
        }
        Block::ToolCall(_) | Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => None,
    }))
}

/// Returns a stored conversation's id without its space, as people know it.
pub(crate) fn shown(conversation_id: &str) -> &str {
    conversation_id.split_once('/').map_or(conversation_id, |(_, id)| id)
}
