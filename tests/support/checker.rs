//! Checks what a session left behind. It reads the tables, the request bodies and the effects file, and
//! shares no code with the product.

use super::Database;
use serde_json::Value;
use sqlx::AssertSqlSafe;
use std::collections::{BTreeMap, BTreeSet};

/// A session's rows, each as JSON, in order.
pub struct Traces {
    pub session: Value,
    pub records: Vec<Value>,
    pub events: Vec<Value>,
    pub steps: Vec<Value>,
    pub calls: Vec<Value>,
}

impl Traces {
    /// Reads the rows of this session.
    pub async fn of(database: &Database, session_id: &str) -> Traces {
        let rows = async |table: &str, order: &str| -> Vec<Value> {
            let sql = format!(
                "select coalesce(json_agg(t order by {order}), '[]') from {table} t where session_id = $1"
            );
            let rows =
                sqlx::query_scalar(AssertSqlSafe(sql)).bind(session_id).fetch_one(&database.pool).await;
            let Value::Array(rows) = rows.expect(table) else { panic!("{table}: no array") };
            rows
        };
        Traces {
            session: rows("conversation_sessions", "session_id").await.pop().expect("the session exists"),
            records: rows("conversation_records", "message_number").await,
            events: rows("session_events", "seq").await,
            steps: rows("session_steps", "step_number").await,
            calls: rows("tool_calls", "message_number, call_id").await,
        }
    }

    /// The payloads of the journal's entries of one type.
    pub fn journal(&self, kind: &str) -> Vec<&Value> {
        self.events.iter().filter(|event| event["type"] == kind).map(|event| &event["payload"]).collect()
    }

    fn session_number(&self, column: &str) -> i64 {
        number(&self.session, column)
    }

    /// Number of the last message from before the session's own work. A fork has copied messages.
    fn copied(&self) -> i64 {
        let forked_at = self.session["forked_at_message_number"].as_i64();
        forked_at.unwrap_or_else(|| self.session_number("base_message_number"))
    }

    /// The session's own messages, without copied ones.
    fn own(&self) -> impl Iterator<Item = &Value> {
        let copied = self.copied();
        self.records.iter().filter(move |record| number(record, "message_number") > copied)
    }

    fn of_role(&self, role: &str) -> impl Iterator<Item = &Value> {
        self.own().filter(move |record| record["role"] == role)
    }
}

/// Checks everything that must hold for a session whose runs have all completed, whatever happened on the
/// way.
pub async fn check(database: &Database, session_id: &str, effects: &[String]) -> Traces {
    let traces = Traces::of(database, session_id).await;
    assert_eq!(traces.session["status"], "completed", "{:#}", traces.session);
    numbers_are_dense(&traces);
    each_message_has_one_reply(&traces.records);
    the_journal_fits(&traces);
    totals_are_sums(database, &traces).await;
    calls_are_settled(&traces, &effects_of(session_id, effects));
    nothing_is_left(database, session_id).await;
    // Run this check last, because it uses the product's own code.
    let verification = database.store().await.verify(session_id).await.expect("the session is read");
    let differ: Vec<_> = verification.checks.iter().filter(|check| !check.agrees).collect();
    assert!(verification.agrees, "`session verify` says: {differ:#?}");
    traces
}

fn numbers_are_dense(traces: &Traces) {
    let base = traces.session_number("base_message_number");
    let last = traces.session_number("last_message_number");
    assert_eq!(numbers(&traces.records, "message_number"), (base + 1..=last).collect::<Vec<_>>(), "messages");
    assert_eq!(traces.session_number("to_message_number"), last, "the checkpoint is at the last message");
    let last = traces.session_number("last_event_seq");
    assert_eq!(numbers(&traces.events, "seq"), (1..=last).collect::<Vec<_>>(), "journal");
    let (first, last) =
        (traces.session_number("base_step_number") + 1, traces.session_number("last_step_number"));
    assert_eq!(numbers(&traces.steps, "step_number"), (first..=last).collect::<Vec<_>>(), "steps");
    let mut at = traces.copied();
    for step in &traces.steps {
        assert_eq!(
            number(step, "from_message_number"),
            at,
            "a step begins where the one before ended: {step}"
        );
        at = number(step, "to_message_number");
    }
    assert_eq!(at, traces.session_number("to_message_number"), "the last step ends at the checkpoint");
}

/// Checks that each group of user messages is followed by turns of calls with all their results, and one
/// final reply.
fn each_message_has_one_reply(records: &[Value]) {
    let mut open = BTreeSet::new();
    let mut replied = true;
    // A summary is not a reply.
    for record in records.iter().filter(|record| !is_summary(record)) {
        let calls = blocks(record, "tool_call");
        match record["role"].as_str().expect("a role") {
            "user" => {
                assert!(open.is_empty(), "a message is between a call and its result: {record}");
                replied = false;
            }
            "assistant" => {
                assert!(!replied, "a second reply: {record}");
                assert!(open.is_empty(), "a call without result before {record}");
                replied = calls.is_empty();
                open = calls;
            }
            "tool" => {
                for call_id in blocks(record, "tool_result") {
                    assert!(open.remove(&call_id), "a result without a call, or a second one: {record}");
                }
            }
            role => panic!("a record of role {role}"),
        }
    }
    assert!(replied && open.is_empty(), "the last message has its reply");
}

fn the_journal_fits(traces: &Traces) {
    let pointed = |kind: &str| {
        traces.journal(kind).into_iter().map(|payload| number(payload, "message_number")).collect::<Vec<_>>()
    };
    let of_role = |role: &str| {
        let said = traces.of_role(role).filter(|record| !is_summary(record));
        said.map(|record| number(record, "message_number")).collect::<Vec<_>>()
    };
    assert_eq!(pointed("GEN_COMPLETE"), of_role("assistant"), "each answer is journalled once");
    assert_eq!(pointed("TOOL_RESULT"), of_role("tool"), "each result is journalled once");

    let generations = |kind: &str| {
        traces.journal(kind).into_iter().map(|payload| text(payload, "generation_id")).collect::<Vec<_>>()
    };
    let started = generations("GEN_START");
    // A summary is not streamed, so its call has an entry but no start.
    let calls = traces.journal("LLM_CALLED");
    let (summaries, replies): (Vec<&Value>, Vec<&Value>) =
        calls.into_iter().partition(|called| called["purpose"] == "compaction");
    let replies: Vec<String> = replies.into_iter().map(|called| text(called, "generation_id")).collect();
    assert_eq!(replies, started, "each model call starts once");
    let summaries: BTreeSet<String> =
        summaries.into_iter().map(|called| text(called, "generation_id")).collect();
    assert_eq!(started.len(), started.iter().collect::<BTreeSet<_>>().len(), "no generation starts twice");
    let replaced: Vec<String> =
        traces.journal("GEN_RESUMED").into_iter().map(|payload| text(payload, "replaces")).collect();
    let mut ended = [replaced, generations("GEN_COMPLETE"), generations("GEN_FAILED")].concat();
    let mut started = started;
    ended.retain(|generation| !summaries.contains(generation));
    ended.sort();
    started.sort();
    assert_eq!(ended, started, "each model call is completed, replaced or failed, and only once");

    let mut invoked: Vec<String> =
        traces.journal("TOOL_INVOKED").into_iter().map(|payload| text(payload, "call_id")).collect();
    let mut asked: Vec<String> = traces.own().flat_map(|record| blocks(record, "tool_call")).collect();
    let mut known: Vec<String> = traces.calls.iter().map(|call| text(call, "call_id")).collect();
    invoked.sort();
    asked.sort();
    known.sort();
    assert_eq!(invoked, asked, "each call is journalled once");
    assert_eq!(known, asked, "each call has its ledger row");
}

async fn totals_are_sums(database: &Database, traces: &Traces) {
    let sum = |column: &str| traces.steps.iter().map(|step| number(step, column)).sum::<i64>();
    for column in ["input_tokens", "output_tokens", "cached_tokens", "cache_write_tokens", "cost_micros"] {
        assert_eq!(traces.session_number(&format!("total_{column}")), sum(column), "total_{column}");
    }
    assert_eq!(traces.session_number("total_turns"), traces.steps.len() as i64, "total_turns");
    let tools = sum("executed_local_tool_count");
    assert_eq!(tools, traces.of_role("tool").count() as i64, "each executed tool counts once");
    let of_runs: Value = database
        .value(
            "select json_build_object('steps', sum(steps), 'input', sum(input_tokens), 'output', sum(output_tokens),
                'tools', sum(tool_calls), 'open', count(*) filter (where status <> 'completed'))
            from session_runs where session_id = $1",
            traces.session["session_id"].as_str().expect("an id"),
        )
        .await;
    assert_eq!(number(&of_runs, "steps"), traces.steps.len() as i64, "steps of the runs");
    assert_eq!(number(&of_runs, "input"), sum("input_tokens"), "input tokens of the runs");
    assert_eq!(number(&of_runs, "output"), sum("output_tokens"), "output tokens of the runs");
    assert_eq!(number(&of_runs, "tools"), tools, "tool calls of the runs");
    assert_eq!(number(&of_runs, "open"), 0, "every run is completed");
}

fn calls_are_settled(traces: &Traces, effects: &[(String, String)]) {
    let mut done: BTreeMap<(String, String), usize> = BTreeMap::new();
    for effect in effects {
        *done.entry(effect.clone()).or_default() += 1;
    }
    for call in &traces.calls {
        assert!(call["result_message_number"].is_i64(), "the call has its result: {call}");
        let times = done.remove(&(text(call, "name"), text(call, "call_id"))).unwrap_or_default();
        match (call["effect"].as_str().expect("an effect"), call["status"].as_str().expect("a status")) {
            ("guarded", "done") => assert_eq!(times, 1, "a guarded effect: {call}"),
            ("guarded", "uncertain") => {
                assert!(times <= 1, "a guarded effect happened {times} times: {call}")
            }
            // Only the tools of the fixture worker note their effects.
            ("idempotent", "done") if call["name"] == "write_file" => assert_eq!(times, 0),
            ("idempotent", "done") => assert!(times >= 1, "no effect: {call}"),
            ("pure", "done") => assert_eq!(times, 0),
            (_, "failed") if call["resolution"]["outcome"] == "declined" => {
                assert_eq!(times, 0, "declined: {call}")
            }
            (effect, status) => panic!("a {effect} call is {status}: {call}"),
        }
    }
    assert!(done.is_empty(), "effects that no call of the transcript asked for: {done:?}");
}

async fn nothing_is_left(database: &Database, session_id: &str) {
    let left: Value = database
        .value(
            "select json_build_object(
                'jobs', (select count(*) from jobs where session_id = $1 and kind = 'step'),
                'generations', (select count(*) from generations where session_id = $1),
                -- A chunk without its generation does not count. No reader gets it, and a sweep deletes it later.
                'chunks', (select count(*) from generation_chunks join generations using (session_id, generation_id)
                    where session_id = $1),
                'inbox', (select count(*) from session_inbox where session_id = $1 and status <> 'drained'),
                'twice', (select count(*) from (
                    select from conversation_records
                    where session_id = $1 and role = 'user' and details ->> 'asks_again' is null
                    group by details ->> 'inbox_id' having count(*) > 1) doubled),
                'open', (select count(*) from conversation_counters c
                    join conversation_sessions s using (conversation_id)
                    where s.session_id = $1 and (c.open_run_id is not null or c.queued_runs <> 0
                        or c.last_message_number <> s.last_message_number)))",
            session_id,
        )
        .await;
    for (what, count) in left.as_object().expect("an object") {
        assert_eq!(count, 0, "left behind: {what}");
    }
}

/// The effects of one session: (tool, call id).
fn effects_of(session_id: &str, effects: &[String]) -> Vec<(String, String)> {
    let words = effects.iter().map(|line| line.split(' ').collect::<Vec<_>>());
    words
        .filter(|words| words[1] == session_id)
        .map(|words| (words[0].to_owned(), words[2].to_owned()))
        .collect()
}

/// Request bodies, each once, in order of first appearance.
pub fn distinct(bodies: &[String]) -> Vec<&String> {
    let mut seen = BTreeSet::new();
    bodies.iter().filter(|body| seen.insert(*body)).collect()
}

/// Every row of every table but `workers`, the audit (which has refused requests too), and what the search fills beside the steps, with the id of the transaction that wrote it. Two dumps are equal
/// only if nothing was written in between, not even the same values again.
pub async fn dump(database: &Database) -> BTreeMap<String, Vec<Value>> {
    let tables: Vec<String> = sqlx::query_scalar(
        "select tablename::text from pg_tables where schemaname = 'public' and tablename not in ('workers', 'audit_log')
            and tablename not in ('search_sessions', 'search_documents', 'search_due', 'search_progress', 'run_failures', 'error_groups',
                'error_hours')",
    )
    .fetch_all(&database.pool)
    .await
    .expect("pg_tables");
    let mut dump = BTreeMap::new();
    for table in tables {
        let sql =
            format!("select json_build_array(t.xmin::text, to_json(t)) from {table} t order by t::text");
        let rows = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&database.pool).await.expect(&table);
        dump.insert(table, rows);
    }
    dump
}

fn is_summary(record: &Value) -> bool {
    record["details"]["summary"] == true
}

/// The ids in a record's blocks of one type.
fn blocks(record: &Value, kind: &str) -> BTreeSet<String> {
    let blocks = record["content"].as_array().expect("blocks");
    blocks.iter().filter(|block| block["type"] == kind).map(|block| text(block, "call_id")).collect()
}

fn numbers(rows: &[Value], column: &str) -> Vec<i64> {
    rows.iter().map(|row| number(row, column)).collect()
}

fn number(row: &Value, column: &str) -> i64 {
    row[column].as_i64().unwrap_or_else(|| panic!("{column} is a number in {row}"))
}

fn text(row: &Value, column: &str) -> String {
    row[column].as_str().unwrap_or_else(|| panic!("{column} is text in {row}")).to_owned()
}
