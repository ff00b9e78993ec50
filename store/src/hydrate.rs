//! Hydration: reads a session from the database in one round trip.
//!
//! One statement is one snapshot. So `wake_seq` is never newer than the inbox and the ledger that are read
//! with it, and the transcript ends where the row says. Messages come as their stored text and are parsed
//! once.
//!
//! A message that arrives after a run's cancel was requested waits for the next run. Its inbox row has the
//! outcome `new_run`, and hydration leaves it out while the cancelled run is open.

use crate::{Error, Result, Store};
use serde::de::DeserializeOwned;
use serde_json::Value;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::generation::{InterruptedCall, Purpose};
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::{Attachment, Usage};
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::{Call, CallStatus, InboxMessage, Run, Session, SessionStatus, Totals};
use wakeful_workflow::strategy::Rebase;

/// Selects `columns` with `joins`, and every column that can change while a worker has the session.
macro_rules! select {
    ($columns:tt, $joins:tt, $session_id:expr) => {
        sqlx::query!(
            "select "
                + $columns
                + r#"
                s.wake_seq, s.last_event_seq, s.cancel_requested, s.state, s.rebase, s.compaction_failures,
                case when s.cancel_requested then s.cancel_reason end as cancel_reason,
                (select json_agg(json_build_object('id', i.inbox_id, 'text', i.content, 'attachments', coalesce(i.attachments, '[]')) order by i.inbox_id)
                    from session_inbox i
                    where i.session_id = s.session_id and i.status = 'pending' and i.outcome <> 'new_run') as inbox,
                (select json_agg(json_build_object('id', c.call_id, 'effect', c.effect, 'status', c.status,
                        'outcome', c.outcome) order by c.message_number, c.call_id collate "C")
                    from tool_calls c
                    where c.session_id = s.session_id and c.result_message_number is null) as calls,
                (select json_agg(json_build_object('generation_id', g.generation_id, 'attempt', g.attempt,
                        'model', g.model, 'request_sha256', g.request_sha256, 'base_sha256', g.base_sha256,
                        'started_at', g.started_at, 'repairs', g.repairs, 'resumes', g.resumes, 'resumable', g.resumable,
                        'purpose', g.purpose, 'context_strategy', g.context_strategy,
                        'last_chunk', (select coalesce(max(k.chunk_no), -1) from generation_chunks k
                            where k.session_id = g.session_id and k.generation_id = g.generation_id))
                        order by g.attempt, g.started_at)
                    from generations g where g.session_id = s.session_id) as generations
            from conversation_sessions s
            "#
                + $joins
                + " where s.session_id = $1",
            $session_id
        )
    };
}

impl Store {
    /// Rebuilds the session: row, seeds, transcript, state, totals, open calls, inbox, interrupted model
    /// calls. The result equals the copy in memory of the worker that committed last.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn hydrate(&self, session_id: &str) -> Result<Session> {
        let row = select!(
            r#"s.session_id, s.conversation_id, s.parent_session_id, s.space_id, s.mailbox_id, s.trigger_type, s.agent, s.policy,
                s.prefix_sha256, p.bytes as "prefix?", s.status,
                s.base_message_number, s.last_message_number, s.to_message_number,
                s.last_step_number, s.total_turns, s.total_input_tokens, s.total_output_tokens,
                s.total_cached_tokens, s.total_cache_write_tokens, s.total_cost_micros,
                r.run_id as "run_id?", r.steps as "steps?", (r.input_tokens + r.output_tokens) as "run_tokens?",
                (select json_agg(json_build_object('role', m.role, 'content', m.content, 'is_new', m.is_new)
                        order by m.ordinal)
                    from session_seed_messages m where m.session_id = s.session_id) as seeds,
                (select json_agg(json_build_object('message_number', m.message_number, 'run_id', m.run_id,
                        'step_number', m.step_number, 'role', m.role, 'content', m.content, 'internal', m.internal,
                        'details', m.details) order by m.message_number)::text
                    from conversation_records m
                    where m.session_id = s.session_id and m.message_number <= s.last_message_number) as records,"#,
            r#"left join session_runs r on r.session_id = s.session_id and r.status = 'running'
            left join blobs p on p.sha256 = s.prefix_sha256"#,
            session_id
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
        let records = match &row.records {
            Some(records) => from_text("messages", records)?,
            None => Vec::new(),
        };
        let policy = match row.policy {
            Some(policy) => {
                serde_json::from_value(policy).map_err(|error| Error::corrupt("policy", error))?
            }
            None => SessionPolicy::default(),
        };
        let prefix = match (&row.prefix_sha256, &row.prefix) {
            (Some(sha256), Some(bytes)) => {
                Some(Prefix::read(sha256, bytes).map_err(|error| Error::corrupt("pinned prefix", error))?)
            }
            (Some(sha256), None) => {
                return Err(Error::corrupt("pinned prefix", format!("there is no blob {sha256}")));
            }
            (None, _) => None,
        };
        let Value::Object(state) = row.state else {
            return Err(Error::corrupt("state", "not an object"));
        };
        Ok(Session {
            session_id: row.session_id.into(),
            conversation_id: row.conversation_id.into(),
            parent_session_id: row.parent_session_id.map(Into::into),
            space_id: row.space_id,
            mailbox_id: row.mailbox_id,
            trigger_type: row.trigger_type,
            agent: row.agent,
            policy,
            prefix,
            status: SessionStatus::parse(&row.status).ok_or_else(|| Error::corrupt("status", &row.status))?,
            cancel_requested: row.cancel_requested,
            cancel_reason: row.cancel_reason,
            wake_seq: row.wake_seq,
            base_message_number: row.base_message_number,
            last_message_number: row.last_message_number,
            to_message_number: row.to_message_number,
            last_event_seq: row.last_event_seq,
            last_step_number: row.last_step_number,
            totals: Totals {
                turns: row.total_turns.into(),
                usage: Usage {
                    input_tokens: row.total_input_tokens,
                    output_tokens: row.total_output_tokens,
                    cached_tokens: row.total_cached_tokens,
                    cache_write_tokens: row.total_cache_write_tokens,
                    cost_micros: row.total_cost_micros,
                },
            },
            state,
            rebase: rebase(row.rebase)?,
            compaction_failures: row.compaction_failures,
            run: row.run_id.map(|run_id| Run {
                run_id: run_id.into(),
                steps: row.steps.unwrap_or(0),
                tokens: row.run_tokens.unwrap_or(0),
            }),
            seeds: list::<Seed>("seeds", row.seeds)?,
            records,
            calls: calls(row.calls)?,
            inbox: inbox(row.inbox)?,
            interrupted: interrupted(row.generations)?,
        })
    }

    /// Updates a worker's copy after `wake_seq` changed or a model call was interrupted. Reads inbox, ledger,
    /// model calls in flight, the cancel flag, and the state, which an operator may have rebuilt.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn refresh(&self, session: &mut Session) -> Result<()> {
        let row = select!("", "", session.session_id.as_str())
            .fetch_optional(&self.pool)
            .await?
            .ok_or_else(|| Error::NotFound { what: "session", id: session.session_id.to_string() })?;
        session.wake_seq = row.wake_seq;
        session.last_event_seq = row.last_event_seq;
        session.cancel_requested = row.cancel_requested;
        let Value::Object(state) = row.state else {
            return Err(Error::corrupt("state", "not an object"));
        };
        session.state = state;
        session.rebase = rebase(row.rebase)?;
        session.compaction_failures = row.compaction_failures;
        session.cancel_reason = row.cancel_reason;
        session.inbox = inbox(row.inbox)?;
        session.calls = calls(row.calls)?;
        session.interrupted = interrupted(row.generations)?;
        Ok(())
    }
}

#[derive(serde::Deserialize)]
struct GenerationRow {
    generation_id: String,
    attempt: i64,
    model: String,
    request_sha256: String,
    started_at: String,
    base_sha256: Option<String>,
    repairs: i64,
    resumes: Option<String>,
    resumable: bool,
    purpose: Purpose,
    context_strategy: String,
    last_chunk: i64,
}

#[derive(serde::Deserialize)]
struct CallRow {
    id: String,
    effect: String,
    status: String,
    outcome: Option<wakeful_workflow::session::CallOutcome>,
}

#[derive(serde::Deserialize)]
struct InboxRow {
    id: i64,
    text: String,
    attachments: Vec<Attachment>,
}

fn rebase(column: Option<Value>) -> Result<Option<Rebase>> {
    column.map(serde_json::from_value).transpose().map_err(|error| Error::corrupt("rebase", error))
}

fn calls(rows: Option<Value>) -> Result<Vec<Call>> {
    list::<CallRow>("tool calls", rows)?
        .into_iter()
        .map(|row| {
            Ok(Call {
                call_id: row.id.into(),
                effect: Effect::parse(&row.effect).ok_or_else(|| Error::corrupt("effect", &row.effect))?,
                status: CallStatus::parse(&row.status)
                    .ok_or_else(|| Error::corrupt("call status", &row.status))?,
                outcome: row.outcome,
            })
        })
        .collect()
}

fn inbox(rows: Option<Value>) -> Result<Vec<InboxMessage>> {
    let rows = list::<InboxRow>("inbox", rows)?;
    Ok(rows
        .into_iter()
        .map(|row| InboxMessage { inbox_id: row.id, text: row.text, attachments: row.attachments })
        .collect())
}

fn interrupted(rows: Option<Value>) -> Result<Vec<InterruptedCall>> {
    let rows = list::<GenerationRow>("generations", rows)?;
    Ok(rows
        .into_iter()
        .map(|row| InterruptedCall {
            generation_id: row.generation_id.as_str().into(),
            attempt: row.attempt,
            model: row.model,
            request_sha256: row.request_sha256,
            started_at: row.started_at,
            base_sha256: row.base_sha256,
            repairs: row.repairs,
            last_chunk: row.last_chunk,
            resumes: row.resumes.as_deref().map(Into::into),
            resumable: row.resumable,
            purpose: row.purpose,
            context_strategy: row.context_strategy,
        })
        .collect())
}

fn list<T: DeserializeOwned>(what: &'static str, rows: Option<Value>) -> Result<Vec<T>> {
    match rows {
        Some(rows) => serde_json::from_value(rows).map_err(|error| Error::corrupt(what, error)),
        None => Ok(Vec::new()),
    }
}

pub(crate) fn from_text<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::corrupt(what, error))
}

pub(crate) fn from_bytes<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::corrupt(what, error))
}
