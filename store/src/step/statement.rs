//! The statement that commits steps: the step of one session, or the steps of several sessions at once.
//!
//! It is one statement with data-modifying CTEs, so it needs one round trip and no explicit transaction. The
//! CTE `given` has one row for each commit. The CTE `s` locks and updates the sessions' rows, but only those
//! that still are as they were planned on. The CTE `j` does the same with the jobs' rows, and checks the
//! leases. The CTE `b` has the commits that passed both checks, and every other CTE selects from it. The last
//! line divides by zero if a commit is missing there, so Postgres undoes everything.
//!
//! A worker commits for all spaces, so its connection sees all of them. Instead the statement carries the space: every row
//! that it inserts gets the space of the session's row, and every row that it changes must have that space. A test reads
//! the text of every part.
//!
//! The text of a lone commit has only the parts that it writes: for Postgres, an insert without rows costs as much as
//! one with a few. That of several commits has the parts that most of them write in any case: see `Statement::usual`.
//! Because macros of sqlx take literals only, this text is put together here, out of constants. Values are always
//! parameters.

use super::builder::{Statement, TEXT_BYTES};
use super::rows::{OpenedRow, Rare, Rows};
use crate::pool::in_time;
use sqlx::postgres::PgArguments;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use std::fmt::Write as _;
use wakeful_workflow::session::CallStatus;

/// What the statement returns of one commit.
#[derive(Debug)]
pub(super) struct Written {
    pub wake_seq: i64,
    /// The time of the intent, if the commit wrote one. Formatted as in JSON, because hydration reads it from JSON.
    pub started_at: Option<String>,
}

/// Writes one commit.
///
/// # Errors
/// Those of [`write_all`].
pub(super) async fn write(
    connection: &mut PgConnection,
    commit: &Rows,
    rare: &Rare<'_>,
) -> Result<Written, sqlx::Error> {
    let written = write_all(connection, &[commit], Some(rare)).await?;
    Ok(written.into_iter().next().expect("one commit has one row"))
}

/// Writes `commits`, each of another session: all of them or none. Returns one value for each, in their order.
/// `rare` belongs to a commit that is written alone.
///
/// # Errors
/// A division by zero if a session or a job did not match: see [`crate::error::missed_fence`].
pub(super) async fn write_all(
    connection: &mut PgConnection,
    commits: &[&Rows],
    rare: Option<&Rare<'_>>,
) -> Result<Vec<Written>, sqlx::Error> {
    let (text, arguments) = compose(commits, rare)?;
    let alone = commits.len() == 1;
    let row = in_time(sqlx::query_with(AssertSqlSafe(text), arguments).fetch_one(connection)).await?;
    if alone {
        return Ok(vec![Written { wake_seq: row.try_get(0)?, started_at: row.try_get(1)? }]);
    }
    let wake_seqs: Vec<i64> = row.try_get(0)?;
    let times: Vec<Option<String>> = row.try_get(1)?;
    Ok(wake_seqs
        .into_iter()
        .zip(times)
        .map(|(wake_seq, started_at)| Written { wake_seq, started_at })
        .collect())
}

/// Puts the statement together: its text and its parameters.
pub(super) fn compose(
    commits: &[&Rows],
    rare: Option<&Rare<'_>>,
) -> Result<(String, PgArguments), sqlx::Error> {
    let mut statement = Statement::new(commits);
    statement.fence();
    statement.session();
    statement.end();
    statement.records();
    statement.events();
    statement.opened();
    statement.closed();
    statement.generation_over();
    statement.step();
    statement.of_run();
    statement.failures();
    statement.intent();
    if let Some(rare) = rare {
        statement.rare(rare);
    }
    statement.sealed_blobs(rare);
    statement.blobs(rare);
    statement.finish()
}

impl<'c> Statement<'c> {
    /// Returns the text and its parameters.
    fn finish(self) -> Result<(String, PgArguments), sqlx::Error> {
        if let Some(error) = self.failed {
            return Err(sqlx::Error::Encode(error));
        }
        let Statement { given, names, before, sets, demands, parts, .. } = &self;
        // This condition repeats the join below, so that every plan finds the rows by an index.
        let of_session = self.among("session.session_id", "text", self.session_ids);
        let (jobs, key) = (self.jobs(), self.key());
        let of_key = if self.alone() { "session.session_id" } else { "given.member" };
        let run_at = if self.starts_calls { ", j.run_at" } else { "" };
        // "not materialized" lets Postgres replace a name by its parameter, so the names cost nothing.
        let given = if self.alone() {
            format!("given as not materialized (\n    select {given}\n)")
        } else {
            let columns = names.trim_end_matches(", ");
            format!(
                "given as materialized (\n    select member, {columns}\n    from unnest({given})\n        with ordinality as given ({names}member)\n)"
            )
        };
        let last_line = match (self.alone(), self.writes_intent) {
            (true, false) => "select max(b.wake_seq) / (1 / count(*)), null::text\nfrom b",
            (true, true) => {
                "select max(b.wake_seq) / (1 / count(*)), (select intent.started_at from intent)\nfrom b"
            }
            (false, false) => {
                "select array_agg(b.wake_seq order by b.member), array_agg(null::text),
    1 / (count(*) = (select count(*) from given))::integer
from b"
            }
            (false, true) => {
                "select array_agg(b.wake_seq order by b.member), array_agg(intent.started_at order by b.member),
    1 / (count(*) = (select count(*) from given))::integer
from b
left join intent using (session_id)"
            }
        };
        let mut text = String::with_capacity(TEXT_BYTES + parts.len());
        let _ = write!(
            text,
            "with {given}{before}, s as (
    update conversation_sessions as session
    set last_message_number = session.last_message_number + given.record_count,
        last_event_seq = session.last_event_seq + given.event_count{sets}
    from given
    where {of_session}
        and session.session_id = given.session_id
        and session.last_message_number = given.last_message_number
        and session.last_step_number = given.step_number - 1
        and session.space_id = given.of_space{demands}
    returning {of_key}, session.conversation_id, session.space_id, session.last_event_seq, session.wake_seq
){jobs}, b as materialized (
    select given.*, s.conversation_id, s.space_id, s.last_event_seq, s.wake_seq{run_at}
    from given
    join s using ({key})
    join j using ({key})
){parts}
{last_line}"
        );
        Ok((text, self.arguments))
    }

    /// What every commit has: its fence, and what it does with the job.
    fn fence(&mut self) {
        self.session_ids = self.given("session_id", "text", |commit| commit.session_id.as_str());
        self.given("of_space", "text", |commit| commit.space_id.as_str());
        self.given("last_message_number", "bigint", |commit| commit.last_message_number);
        self.given("step_number", "bigint", |commit| commit.step_number);
        self.job_ids = self.given("job_id", "bigint", |commit| commit.job_id);
        self.given("lease", "bigint", |commit| commit.lease);
        self.run_ids = self.given("run_id", "text", |commit| commit.run_id.as_str());
        self.given("trace_context", "text", |commit| commit.trace_context.as_deref());
        self.given("ends_step", "boolean", |commit| commit.step.is_some());
        self.given("progress", "boolean", |commit| commit.progress);
        self.given("record_count", "bigint", |commit| commit.records.len() as i64);
        self.given("event_count", "bigint", |commit| commit.events.len() as i64);
    }

    /// Columns of the session that not every commit changes.
    ///
    /// Some commits move no number: a begun run, a failed summary. A worker repeats a commit whose result it never
    /// learned, and the repetition must miss. So a commit that sets the status or the count of failed summaries
    /// must change it. Both are null in other commits.
    fn session(&mut self) {
        if self.usual(|commit| commit.status.is_some()) {
            self.given("status", "text", |commit| commit.status);
            self.sets.push_str(",\n        status = coalesce(given.status, session.status)");
            self.demands.push_str("\n        and session.status is distinct from given.status");
        }
        if self.some(|commit| commit.compaction_failures.is_some()) {
            self.given("compaction_failures", "bigint", |commit| commit.compaction_failures);
            self.sets.push_str(
                ",\n        compaction_failures = coalesce(given.compaction_failures, session.compaction_failures)",
            );
            self.demands.push_str(
                "\n        and session.compaction_failures is distinct from given.compaction_failures",
            );
        }
        if self.some(|commit| commit.rebase.is_some()) {
            self.given("rebase", "text", |commit| commit.rebase.as_deref());
            self.sets.push_str(",\n        rebase = coalesce(given.rebase::jsonb, session.rebase)");
        }
        if self.some(|commit| commit.state.is_some()) {
            self.given("state", "text", |commit| commit.state.as_deref());
            self.sets.push_str(
                ",\n        state = case when given.state is null then session.state else session.state || given.state::jsonb end",
            );
        }
    }

    fn records(&mut self) {
        if self.usual(|commit| !commit.records.is_empty()) {
            let mut rows = self.rows(|commit| &commit.records);
            self.column(&mut rows, "message_number", "bigint", |record| record.number);
            self.column(&mut rows, "role", "text", |record| record.role);
            self.column(&mut rows, "content", "text", |record| record.content.as_str());
            self.column(&mut rows, "internal", "boolean", |record| record.internal);
            self.column(&mut rows, "details", "text", |record| record.details.as_str());
            let from = self.joined(rows);
            self.part(format_args!(
                "records as (
    insert into conversation_records
        (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content, internal, details)
    select b.space_id, b.conversation_id, r.message_number, b.session_id, b.run_id, b.step_number, r.role,
        r.content::json, r.internal, r.details::json
    from {from}
)"
            ));
        }
    }

    fn events(&mut self) {
        if self.usual(|commit| !commit.events.is_empty()) {
            let mut rows = self.rows(|commit| &commit.events);
            self.column(&mut rows, "type", "text", |(kind, _)| kind.as_str());
            self.column(&mut rows, "payload", "text", |(_, payload)| payload.as_str());
            let from = self.joined(rows);
            self.part(format_args!(
                "events as (
    insert into session_events (space_id, session_id, seq, type, run_id, step_number, payload)
    select b.space_id, b.session_id, b.last_event_seq - b.event_count + r.ordinal, r.type, b.run_id, b.step_number,
        r.payload::jsonb
    from {from}
)"
            ));
        }
    }

    /// Ledger rows of the calls that the model's reply asks for. Idempotent ones may be started at once, as
    /// [`crate::Store::start_call`] does it for one call. Pure ones may have ended already.
    fn opened(&mut self) {
        if self.usual(|commit| !commit.opened.is_empty()) {
            let mut rows = self.rows(|commit| &commit.opened);
            self.column(&mut rows, "message_number", "bigint", |call| call.message_number);
            self.column(&mut rows, "call_id", "text", |call| call.call_id.as_str());
            self.column(&mut rows, "name", "text", |call| call.name.as_str());
            self.column(&mut rows, "args_sha256", "text", |call| call.args_sha256.as_str());
            self.column(&mut rows, "effect", "text", |call| call.effect);
            let (mut names, mut values) = (String::new(), String::new());
            self.starts_calls = self.some(|commit| commit.opened.iter().any(|call| call.nonce.is_some()));
            let ends_calls = self.usual(|commit| commit.opened.iter().any(|call| call.ended.is_some()));
            // Without the column a row is `invoked`.
            let others =
                self.some(|commit| commit.opened.iter().any(|call| call.opens != CallStatus::Invoked));
            if others || ends_calls {
                self.column(&mut rows, "status", "text", OpenedRow::status);
                names.push_str(", status");
                values.push_str(", r.status");
            }
            if self.starts_calls {
                self.column(&mut rows, "nonce", "text", |call| call.nonce.as_deref());
                self.column(&mut rows, "timeout_s", "float8", |call| call.timeout_s);
                names.push_str(", start_nonce, attempts, started_at, settled_by");
                values.push_str(
                    ",
        r.nonce, (r.nonce is not null)::integer, case when r.nonce is not null then clock_timestamp() end,
        case when r.nonce is not null then b.run_at + make_interval(secs => r.timeout_s) end",
                );
            }
            if ends_calls {
                self.column(&mut rows, "result_number", "bigint", |call| {
                    call.ended.as_ref().and_then(|ended| ended.message_number)
                });
                names.push_str(", result_message_number, settled_at");
                values.push_str(
                    ", r.result_number, case when r.result_number is not null then clock_timestamp() end",
                );
            }
            let from = self.joined(rows);
            self.part(format_args!(
                "opened as (
    insert into tool_calls
        (space_id, session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect{names})
    select b.space_id, b.session_id, r.call_id, b.run_id, b.step_number, r.message_number, r.name, r.args_sha256,
        r.effect{values}
    from {from}
)"
            ));
        }
    }

    /// Ledger rows whose status changes. Before this statement they have no result. The index of such rows is small,
    /// while a session's ledger can be long.
    fn closed(&mut self) {
        if self.usual(|commit| !commit.closed.is_empty()) {
            let mut rows = self.rows(|commit| &commit.closed);
            let call_ids = self.column(&mut rows, "call_id", "text", |call| call.call_id.as_str());
            self.column(&mut rows, "status", "text", |call| call.status);
            self.column(&mut rows, "message_number", "bigint", |call| call.message_number);
            let from = self.joined(rows);
            let of_session = self.among("call.session_id", "text", self.session_ids);
            self.part(format_args!(
                "closed as (
    update tool_calls as call
    set status = case
            -- The call's end was written after this was planned, so it is not uncertain any more.
            when r.status = 'uncertain' and call.status in ('done', 'failed') and call.outcome is not null
                then call.status
            else r.status
        end,
        result_message_number = r.message_number,
        settled_at = coalesce(call.settled_at, clock_timestamp())
    from {from}
    where {of_session}
        and call.space_id = b.space_id
        and call.call_id = any (${call_ids}::text[])
        and call.session_id = b.session_id
        and call.call_id = r.call_id
        and call.result_message_number is null
)"
            ));
        }
    }

    /// The model call in flight has ended.
    fn generation_over(&mut self) {
        if self.usual(|commit| commit.generation_over) {
            self.given("generation_over", "boolean", |commit| commit.generation_over);
            let of_generation = self.of_lone("generations.session_id", "text", self.session_ids);
            let of_chunk = self.among("generation_chunks.session_id", "text", self.session_ids);
            self.part(format_args!(
                "deleted_generations as (
    delete from generations
    using b
    where {of_generation}b.generation_over
        and generations.session_id = b.session_id
        and generations.space_id = b.space_id
), deleted_chunks as (
    delete from generation_chunks
    using b
    where {of_chunk}
        and b.generation_over
        and generation_chunks.session_id = b.session_id
        and generation_chunks.space_id = b.space_id
)"
            ));
        }
    }

    /// The step's row and the totals, if a commit completes its step.
    fn step(&mut self) {
        if !self.usual(|commit| commit.step.is_some()) {
            return;
        }
        self.writes_step = true;
        self.given("worker_id", "text", |commit| commit.worker_id.as_str());
        self.given("from_message_number", "bigint", |commit| {
            commit.step.as_ref().map(|step| step.from_message_number)
        });
        self.given("to_message_number", "bigint", |commit| {
            commit.step.as_ref().map(|step| step.to_message_number)
        });
        self.given("finish_reason", "text", |commit| commit.step.as_ref().map(|step| step.finish_reason));
        let usage = |commit: &'c Rows| commit.step.as_ref().map(|step| step.usage).unwrap_or_default();
        self.given("input_tokens", "bigint", |commit| usage(commit).input_tokens);
        self.given("output_tokens", "bigint", |commit| usage(commit).output_tokens);
        self.given("cached_tokens", "bigint", |commit| usage(commit).cached_tokens);
        self.given("cache_write_tokens", "bigint", |commit| usage(commit).cache_write_tokens);
        self.given("cost_micros", "bigint", |commit| usage(commit).cost_micros);
        self.given("tool_calls", "integer", |commit| commit.step.as_ref().map_or(0, |step| step.tool_calls));
        self.given("attempt", "integer", |commit| commit.step.as_ref().map_or(0, |step| step.attempt));
        self.given("elapsed_s", "float8", |commit| commit.step.as_ref().map_or(0.0, |step| step.elapsed_s));
        self.sets.push_str(
            ",
        to_message_number = coalesce(given.to_message_number, session.to_message_number),
        last_step_number = session.last_step_number + given.ends_step::integer,
        total_turns = session.total_turns + given.ends_step::integer,
        total_input_tokens = session.total_input_tokens + given.input_tokens,
        total_output_tokens = session.total_output_tokens + given.output_tokens,
        total_cached_tokens = session.total_cached_tokens + given.cached_tokens,
        total_cache_write_tokens = session.total_cache_write_tokens + given.cache_write_tokens,
        total_cost_micros = session.total_cost_micros + given.cost_micros",
        );
        let tree = |commit: &'c Rows| commit.step.as_ref().and_then(|step| step.workspace_sha256.as_deref());
        let (mut name, mut value) = ("", "");
        if self.some(|commit| tree(commit).is_some()) {
            self.given("workspace_sha256", "text", tree);
            (name, value) = (", workspace_sha256", ", b.workspace_sha256");
        }
        self.part(format_args!(
            "step as (
    insert into session_steps
        (space_id, session_id, step_number, run_id, from_message_number, to_message_number, finish_reason,
         input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros,
         executed_local_tool_count, attempt, event_seq, lease, worker_id, started_at{name})
    select b.space_id, b.session_id, b.step_number, b.run_id, b.from_message_number, b.to_message_number,
        b.finish_reason, b.input_tokens::integer, b.output_tokens::integer, b.cached_tokens::integer,
        b.cache_write_tokens::integer, b.cost_micros, b.tool_calls, b.attempt, b.last_event_seq, b.lease,
        b.worker_id, clock_timestamp() - make_interval(secs => b.elapsed_s){value}
    from b
    where b.ends_step
)"
        ));
    }

    /// The intent of the model call that follows. All parts see the tables as they were before the statement, so
    /// `deleted_generations` does not delete this row.
    fn intent(&mut self) {
        if !self.usual(|commit| commit.intent.is_some()) {
            return;
        }
        self.writes_intent = true;
        self.given("generation_id", "text", |commit| {
            commit.intent.as_ref().map(|new| new.generation_id.as_str())
        });
        self.given("of_step", "bigint", |commit| commit.intent.as_ref().map(|new| new.step_number));
        self.given("of_attempt", "bigint", |commit| commit.intent.as_ref().map(|new| new.attempt));
        self.given("model", "text", |commit| commit.intent.as_ref().map(|new| new.model.as_str()));
        self.given("request_sha256", "text", |commit| {
            commit.intent.as_ref().map(|new| new.request_sha256.as_str())
        });
        self.given("base_sha256", "text", |commit| {
            commit.intent.as_ref().map(|new| new.base_sha256.as_str())
        });
        self.given("repairs", "bigint", |commit| commit.intent.as_ref().map(|new| new.repairs));
        self.given("resumes", "text", |commit| commit.intent.as_ref().and_then(|new| new.resumes.as_deref()));
        self.given("purpose", "text", |commit| commit.intent.as_ref().map(|new| new.purpose));
        self.given("strategy", "text", |commit| commit.intent.as_ref().map(|new| new.context_strategy));
        self.part(
            "intent as (
    insert into generations
        (space_id, session_id, generation_id, step_number, attempt, model, request_sha256, base_sha256, repairs,
         resumes, purpose, context_strategy)
    select b.space_id, b.session_id, b.generation_id, b.of_step, b.of_attempt, b.model, b.request_sha256, b.base_sha256,
        b.repairs, b.resumes, b.purpose, b.strategy
    from b
    where b.generation_id is not null
    returning session_id, to_json(started_at) #>> '{}' as started_at
)",
        );
    }
}
