//! Writes the rows of a bundle. One statement per batch takes its rows as JSON, so the columns get exactly
//! what the lines say.

use super::InboxIds;
use crate::Result;
use crate::encryption::Seal;
use crate::json::to_json;
use serde_json::{Map, Value};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres};
use wakeful_workflow::bundle::check::Summary;
use wakeful_workflow::bundle::import::{Adoption, origin};
use wakeful_workflow::bundle::{EventRow, Line, Section, SessionRow};

/// Takes a new id from the database for each inbox row.
pub(super) async fn inbox_ids(tx: &mut PgConnection, old: &[i64]) -> Result<InboxIds> {
    let new = sqlx::query_scalar!(
        r#"select nextval(pg_get_serial_sequence('session_inbox', 'inbox_id')) as "id!" from generate_series(1, $1)"#,
        old.len() as i64
    )
    .fetch_all(tx)
    .await?;
    Ok(old.iter().copied().zip(new).collect())
}

/// The statement that writes rows of one kind.
type Batch = Query<'static, Postgres, PgArguments>;

pub(crate) struct Writer {
    /// `None`: the rows are written as they are.
    adoption: Option<Adoption>,
    origin: Value,
    session_id: String,
    conversation_id: String,
    space_id: String,
    last_event_seq: i64,
    /// Of the new conversation.
    seal: Seal,
}

impl Writer {
    pub fn new(adoption: Adoption, summary: &Summary, seal: Seal) -> Writer {
        let mut origin = origin(&summary.session, summary.header.redacted, &summary.sha256);
        // Where replies go has the subject of a mail in it.
        seal.value(&mut origin["policy"]);
        Writer {
            seal,
            adoption: Some(adoption),
            origin,
            session_id: String::new(),
            conversation_id: String::new(),
            space_id: String::new(),
            last_event_seq: summary.session.last_event_seq,
        }
    }

    /// For rows that have their ids already. `origin` says where the session comes from.
    pub fn of_own(session_id: &str, conversation_id: &str, space_id: &str, origin: Value) -> Writer {
        Writer {
            seal: Seal::default(),
            adoption: None,
            origin,
            session_id: session_id.to_owned(),
            conversation_id: conversation_id.to_owned(),
            space_id: space_id.to_owned(),
            last_event_seq: 0,
        }
    }

    /// Writes rows of one section.
    pub async fn write(&mut self, tx: &mut PgConnection, rows: Vec<Line>) -> Result<()> {
        let rows: Vec<Line> = match &mut self.adoption {
            Some(adoption) => rows.into_iter().map(|row| adoption.adopt(row)).collect(),
            None => rows,
        };
        let Some(section) = rows.first().map(Line::section) else { return Ok(()) };
        let batch = match section {
            Section::Session => {
                for row in &rows {
                    if let Line::Session(row) = row {
                        self.session(tx, row).await?;
                    }
                }
                return Ok(());
            }
            // The blobs were written before.
            Section::Blob => return Ok(()),
            Section::Seed => self.seeds(&self.sealed(&rows)?),
            Section::Run => self.runs(&json_of(&self.with_words_sealed(rows))?),
            Section::Record => self.records(&self.sealed(&rows)?),
            Section::Step => self.steps(&json_of(&rows)?),
            Section::Event => self.events(&json_of(&self.with_words_sealed(rows))?),
            Section::Call => self.calls(&self.sealed(&rows)?),
            Section::Delivery => self.deliveries(&self.sealed(&rows)?),
            Section::Inbox => self.inbox(&self.sealed(&self.hashed(rows))?),
        };
        batch.execute(tx).await?;
        Ok(())
    }

    /// The rows as JSON, their texts sealed. In every kind of row that has texts, the fields that hold them have the names that
    /// [`Seal::value`] knows; errors, receipts, decisions, and what did not arrive have ways of their own.
    fn sealed(&self, rows: &[Line]) -> Result<String> {
        let json = json_of(rows)?;
        if !self.seal.is_on() {
            return Ok(json);
        }
        let mut rows: Vec<Map<String, Value>> = crate::json::from_text("row", &json)?;
        for row in &mut rows {
            let apart = ["last_error", "receipt", "resolution", "undelivered"];
            let apart: Vec<(&str, Value)> =
                apart.into_iter().filter_map(|name| Some((name, row.remove(name)?))).collect();
            let mut rest = Value::Object(std::mem::take(row));
            self.seal.value(&mut rest);
            if let Value::Object(sealed) = rest {
                *row = sealed;
            }
            row.extend(apart.into_iter().map(|(name, value)| {
                let sealed = match value {
                    Value::String(error) => self.seal.error(&error).into_owned().into(),
                    value if name == "receipt" => self.seal.receipt(value),
                    value => self.seal.with_reasons(value),
                };
                (name.to_owned(), sealed)
            }));
        }
        to_json(&rows)
    }

    /// Runs and journal entries with their words sealed.
    fn with_words_sealed(&self, mut rows: Vec<Line>) -> Vec<Line> {
        if !self.seal.is_on() {
            return rows;
        }
        let seal = &self.seal;
        for row in &mut rows {
            match row {
                Line::Run(row) => {
                    row.error = row.error.take().map(|error| seal.error(&error).into_owned());
                }
                Line::Event(row) => {
                    row.dedupe_key = row.dedupe_key.take().map(|key| self.dedupe_key(key));
                    seal.payload(&row.kind, &mut row.payload);
                }
                Line::Session(_)
                | Line::Seed(_)
                | Line::Record(_)
                | Line::Step(_)
                | Line::Call(_)
                | Line::Delivery(_)
                | Line::Inbox(_)
                | Line::Blob(_) => {}
            }
        }
        rows
    }

    /// The key by which an entry is written once. That of a message has the message's own key in it.
    fn dedupe_key(&self, key: String) -> String {
        match key.strip_prefix("message/") {
            Some(client_key) => format!("message/{}", self.seal.text(client_key)),
            None => key,
        }
    }

    /// The session's row, as it is stored.
    fn sealed_session(&self, row: &SessionRow) -> SessionRow {
        let mut row = row.clone();
        let seal = &self.seal;
        row.error = row.error.take().map(|error| seal.error(&error).into_owned());
        row.cancel_reason = row.cancel_reason.take().map(|reason| seal.text(&reason).into_owned());
        row.initial_state = seal.state(std::mem::take(&mut row.initial_state));
        row.state = seal.state(std::mem::take(&mut row.state));
        if let Some(policy) = &mut row.policy {
            policy.values_mut().for_each(|value| seal.value(value));
        }
        row
    }

    /// The rows of an inbox, with the hashes that a repeated message is compared with here.
    fn hashed(&self, mut rows: Vec<Line>) -> Vec<Line> {
        for row in &mut rows {
            if let Line::Inbox(row) = row {
                row.content_sha256 = self.seal.hash(std::mem::take(&mut row.content_sha256));
                row.client_key = self.seal.text(&row.client_key).into_owned();
            }
        }
        rows
    }

    /// Writes the journal entries that follow the bundle's last one, and has the search read the session.
    pub async fn end(&mut self, tx: &mut PgConnection) -> Result<()> {
        let Some(adoption) = &self.adoption else { return Ok(()) };
        let mut ending: Vec<EventRow> = adoption.ending(self.last_event_seq);
        ending.iter_mut().for_each(|row| self.seal.payload(&row.kind, &mut row.payload));
        if !ending.is_empty() {
            self.events(&to_json(&ending)?).execute(&mut *tx).await?;
        }
        crate::search::enter(tx, &self.session_id, &self.space_id).await
    }

    async fn session(&mut self, tx: &mut PgConnection, row: &SessionRow) -> Result<()> {
        self.session_id.clone_from(&row.session_id);
        self.conversation_id.clone_from(&row.conversation_id);
        self.space_id.clone_from(&row.space_id);
        if self.adoption.is_some() {
            sqlx::query!(
                "insert into conversation_counters
                (conversation_id, space_id, mailbox_id, last_message_number, data_key)
            values ($1, $2, $3, $4, $5)",
                row.conversation_id,
                row.space_id,
                row.mailbox_id,
                row.last_message_number.max(i64::from(row.seed_message_count)),
                self.seal.key_id()
            )
            .execute(&mut *tx)
            .await?;
        }
        sqlx::query!(
            "insert into conversation_sessions
                (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
                 model_context_window, status, error, policy, tool_names, prefix_sha256, initial_state, state,
                 seed_message_count, base_message_number, last_message_number, to_message_number, last_step_number,
                 last_event_seq, total_turns, total_input_tokens, total_output_tokens, total_cached_tokens,
                 total_cache_write_tokens, total_cost_micros, started_at, completed_at, repository_id,
                 base_step_number, forked_at_message_number, rebase, compaction_failures, imported_from, data_key)
            select session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
                model_context_window, status, error, policy, tool_names, prefix_sha256, initial_state, state,
                seed_message_count, base_message_number, last_message_number, to_message_number, last_step_number,
                last_event_seq, total_turns, total_input_tokens, total_output_tokens, total_cached_tokens,
                total_cache_write_tokens, total_cost_micros, started_at, completed_at, repository_id,
                coalesce(base_step_number, 0), forked_at_message_number, rebase, coalesce(compaction_failures, 0), $2, $3
            from json_to_record($1::text::json) as row (
                session_id text, conversation_id text, space_id text, mailbox_id text, trigger_type text,
                trigger_id text, agent text, model_id text, model_context_window integer, status text, error text,
                policy jsonb, tool_names text[], prefix_sha256 text, initial_state jsonb, state jsonb,
                seed_message_count integer, base_message_number bigint, last_message_number bigint,
                to_message_number bigint, last_step_number bigint, last_event_seq bigint, total_turns integer,
                total_input_tokens bigint, total_output_tokens bigint, total_cached_tokens bigint,
                total_cache_write_tokens bigint, total_cost_micros bigint, started_at timestamptz,
                completed_at timestamptz, repository_id text, base_step_number bigint, forked_at_message_number bigint,
                rebase jsonb, compaction_failures bigint)",
            to_json(&self.sealed_session(row))?,
            self.origin,
            self.seal.key_id()
        )
        .execute(tx)
        .await?;
        Ok(())
    }

    fn seeds(&self, rows: &str) -> Batch {
        sqlx::query!(
            r#"insert into session_seed_messages
                (space_id, session_id, ordinal, role, content, is_new, "timestamp", details)
            select $3, $1, ordinal, role, content, is_new, "timestamp", details
            from json_to_recordset($2::text::json) as row (
                ordinal integer, role text, content text, is_new boolean, "timestamp" bigint, details jsonb)"#,
            self.session_id,
            rows,
            self.space_id
        )
    }

    fn runs(&self, rows: &str) -> Batch {
        sqlx::query!(
            "insert into session_runs
                (space_id, run_id, session_id, conversation_id, status, prompt_message_number, steps, input_tokens,
                 output_tokens, tool_calls, error, created_at, started_at, completed_at)
            select $4, run_id, $1, $2, status, prompt_message_number, steps, input_tokens, output_tokens, tool_calls, error,
                created_at, started_at, completed_at
            from json_to_recordset($3::text::json) as row (
                run_id text, status text, prompt_message_number bigint, steps bigint, input_tokens bigint,
                output_tokens bigint, tool_calls bigint, error text, created_at timestamptz, started_at timestamptz,
                completed_at timestamptz)",
            self.session_id,
            self.conversation_id,
            rows,
            self.space_id
        )
    }

    fn records(&self, rows: &str) -> Batch {
        sqlx::query!(
            "insert into conversation_records
                (space_id, conversation_id, message_number, message_id, session_id, run_id, step_number, role, content,
                 internal, details, created_at)
            select $4, $2, message_number, message_id, $1, run_id, step_number, role, content, internal, details, created_at
            from json_to_recordset($3::text::json) as row (
                message_number bigint, message_id text, run_id text, step_number bigint, role text, content json,
                internal boolean, details json, created_at timestamptz)",
            self.session_id,
            self.conversation_id,
            rows,
            self.space_id
        )
    }

    /// Lease and worker belong to another database, so these columns get placeholders.
    fn steps(&self, rows: &str) -> Batch {
        sqlx::query!(
            "insert into session_steps
                (space_id, session_id, step_number, run_id, from_message_number, to_message_number, finish_reason,
                 input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt,
                 event_seq, lease, worker_id, started_at, committed_at, workspace_sha256)
            select $3, $1, step_number, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
                output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt,
                event_seq, 0, 'import', started_at, committed_at, workspace_sha256
            from json_to_recordset($2::text::json) as row (
                step_number bigint, run_id text, from_message_number bigint, to_message_number bigint,
                finish_reason text, input_tokens integer, output_tokens integer, cached_tokens integer,
                cache_write_tokens integer, cost_micros bigint, executed_local_tool_count integer, attempt integer,
                event_seq bigint, started_at timestamptz, committed_at timestamptz, workspace_sha256 text)",
            self.session_id,
            rows,
            self.space_id
        )
    }

    fn events(&self, rows: &str) -> Batch {
        sqlx::query!(
            "insert into session_events (space_id, session_id, seq, ts, type, run_id, step_number, payload, dedupe_key)
            select $3, $1, seq, ts, type, run_id, step_number, payload, dedupe_key
            from json_to_recordset($2::text::json) as row (
                seq bigint, ts timestamptz, type text, run_id text, step_number bigint, payload jsonb,
                dedupe_key text)",
            self.session_id,
            rows,
            self.space_id
        )
    }

    fn calls(&self, rows: &str) -> Batch {
        sqlx::query!(
            "insert into tool_calls
                (space_id, session_id, call_id, run_id, step_number, message_number, result_message_number, name, args_sha256,
                 effect, status, attempts, outcome, receipt, resolution, started_at, settled_at)
            select $3, $1, call_id, run_id, step_number, message_number, result_message_number, name, args_sha256, effect,
                status, attempts, outcome, receipt, resolution, started_at, settled_at
            from json_to_recordset($2::text::json) as row (
                call_id text, run_id text, step_number bigint, message_number bigint, result_message_number bigint,
                name text, args_sha256 text, effect text, status text, attempts integer, outcome json, receipt json,
                resolution jsonb, started_at timestamptz, settled_at timestamptz)",
            self.session_id,
            rows,
            self.space_id
        )
    }

    fn deliveries(&self, rows: &str) -> Batch {
        sqlx::query!(
            "insert into deliveries
                (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content, status,
                 attempt, not_after, receipt, last_error, resolution, undelivered, created_at, settled_at, imported)
            select delivery_id, $2, $3, channel, nextval('delivery_ordinals'), $1, source_key, content, status, attempt,
                not_after, receipt, last_error, resolution, coalesce(undelivered, '[]'), created_at, settled_at, true
            from (
                select *
                from json_to_recordset($4::text::json) as row (
                    place bigint, delivery_id text, channel text, source_key text, content json, status text,
                    attempt integer, not_after timestamptz, receipt json, last_error text, resolution jsonb,
                    undelivered jsonb, created_at timestamptz, settled_at timestamptz)
                order by place
            ) placed",
            self.session_id,
            self.space_id,
            self.conversation_id,
            rows
        )
    }

    fn inbox(&self, rows: &str) -> Batch {
        sqlx::query!(
            "insert into session_inbox
                (space_id, session_id, inbox_id, client_key, content, content_sha256, sender, attachments, status, run_id,
                 outcome, created_at)
            overriding system value
            select $3, $1, inbox_id, client_key, content, content_sha256, sender, attachments, status, run_id, outcome,
                created_at
            from json_to_recordset($2::text::json) as row (
                inbox_id bigint, client_key text, content text, content_sha256 text, sender text, attachments jsonb,
                status text, run_id text, outcome text, created_at timestamptz)",
            self.session_id,
            rows,
            self.space_id
        )
    }
}

/// The rows as a JSON array, without the section's word before each row.
fn json_of(rows: &[Line]) -> Result<String> {
    let mut text = String::from("[");
    for row in rows {
        if text.len() > 1 {
            text.push(',');
        }
        match row {
            Line::Seed(row) => text.push_str(&to_json(row)?),
            Line::Run(row) => text.push_str(&to_json(row)?),
            Line::Record(row) => text.push_str(&to_json(row)?),
            Line::Step(row) => text.push_str(&to_json(row)?),
            Line::Event(row) => text.push_str(&to_json(row)?),
            Line::Call(row) => text.push_str(&to_json(row)?),
            Line::Delivery(row) => text.push_str(&to_json(row)?),
            Line::Inbox(row) => text.push_str(&to_json(row)?),
            Line::Session(_) | Line::Blob(_) => {}
        }
    }
    text.push(']');
    Ok(text)
}
