//! What runs beside the steps reads about as many rows as it finds, whatever else the installation has: erasures and collections of blobs,
//! timers, lists of an operator. What is counted is what Postgres read, in the role that sends the statement.

use crate::support::Database;
use crate::support::plans::{explain, read, shipped};
use serde_json::Value;

const FILL: &str = include_str!("upkeep/fill.sql");
/// More than any of these statements has to read, and far less than a table has.
const FEW: f64 = 400.0;

/// The role of most statements, and that of erasures.
const RUNTIME: &str = "wakeful_runtime";
const RETENTION: &str = "wakeful_retention";

/// Words of the statement that looks for people who wait long.
const TOLD: &str = "newest.delay_told_at is null";

/// A database with the installation of `fill.sql`.
async fn installation() -> Database {
    let database = Database::new().await;
    sqlx::raw_sql(FILL).execute(&database.pool).await.unwrap();
    sqlx::raw_sql("vacuum conversation_sessions").execute(&database.pool).await.unwrap();
    database.with_roles().await;
    database
}

fn sha256(text: &str) -> String {
    use sha2::{Digest, Sha256};
    hex::encode(Sha256::digest(text.as_bytes()))
}

/// An array, as a statement has it.
fn array<'a>(values: impl IntoIterator<Item = &'a str>) -> String {
    format!("'{{{}}}'::text[]", values.into_iter().collect::<Vec<_>>().join(","))
}

/// Rows that were kept and read again for another row.
fn read_again(plan: &Value) -> f64 {
    let number = |key: &str| plan[key].as_f64().unwrap_or_default();
    let own = match plan["Node Type"] == "Materialize" {
        true => number("Actual Rows") * number("Actual Loops"),
        false => 0.0,
    };
    own + plan["Plans"].as_array().into_iter().flatten().map(read_again).sum::<f64>()
}

/// Fails if a statement reads more than `most` rows.
async fn reads(database: &Database, role: &str, most: f64, words: &str, values: &[&str]) {
    let plan = explain(database, role, "*", &shipped(words), values).await;
    let read = read(&plan) + read_again(&plan);
    assert!(read < most, "the statement with {words:?} reads {read} rows: {plan:#}");
}

/// Rows of a table that the connection has read, and not yet reported.
async fn fetched(tx: &mut sqlx::PgConnection, table: &str) -> i64 {
    let sql = "select (coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_xact_user_tables
        where relname = $1";
    sqlx::query_scalar(sql).bind(table).fetch_one(tx).await.unwrap()
}

#[tokio::test]
async fn an_erasure_finds_the_sessions_with_a_prefix_by_an_index_while_it_locks_the_blobs() {
    let database = installation().await;
    // Of one blob, and of many: Postgres expects one to be marked, or all of them.
    for many in [1, 100] {
        let names: Vec<String> =
            (1..=many).map(|n| sha256(&format!("text{n}"))).chain([sha256("prefix1")]).collect();
        let mut tx = database.pool.begin().await.unwrap();
        let settings =
            "set local role wakeful_retention; set local wakeful.space = '*'; set local enable_seqscan = off;
            set local enable_bitmapscan = off";
        sqlx::raw_sql(settings).execute(&mut *tx).await.unwrap();
        let before = fetched(&mut tx, "conversation_sessions").await;
        let marked: Vec<String> = sqlx::query_scalar("select name from mark_blobs($1, '{}')")
            .bind(&names)
            .fetch_all(&mut *tx)
            .await
            .unwrap();
        assert_eq!(marked.len(), many, "the prefix belongs to sessions");
        let sessions = fetched(&mut tx, "conversation_sessions").await - before;
        assert!((sessions as f64) < FEW, "mark_blobs reads {sessions} sessions for {many}");
        tx.commit().await.unwrap();

        let spaces = array(names.iter().map(|_| "default"));
        let names = array(names.iter().map(String::as_str));
        // Each name is read twice: as it is given, and as its blob.
        let delete = "touched_at = '-infinity'\n";
        reads(&database, RETENTION, FEW, delete, &[&names, &spaces]).await;
    }
}

#[tokio::test]
async fn an_erasure_compares_each_name_that_it_finds_in_the_logs_once() {
    let database = installation().await;
    // Half of them are named, and half are not.
    let names: Vec<String> = (1..=200).flat_map(|n| [format!("text{n}"), format!("none{n}")]).collect();
    let names: Vec<String> = names.iter().map(|name| sha256(name)).collect();
    let spaces = array(names.iter().map(|_| "default"));
    let names = array(names.iter().map(String::as_str));
    // It reads every row of the logs once, and the names in it.
    let select = r#"select b.sha256 as "sha256!", b.space_id as "space_id!""#;
    reads(&database, RETENTION, 80_000.0, select, &[&names, &spaces]).await;
}

#[tokio::test]
async fn an_erasure_finds_the_answers_that_name_a_session_without_comparing_each_with_each() {
    let database = installation().await;
    let source: String =
        database.value("select prosrc from pg_proc where proname = $1", "forget_sessions").await;
    let delete = source.split("delete from idempotency_keys k").nth(1).unwrap().split(';').next().unwrap();
    let ids: Vec<String> = (1..=500).map(|n| format!("sess_{n:032x}")).collect();
    let ids = array(ids.iter().map(String::as_str));
    let delete = format!("delete from idempotency_keys k{}", delete.replace("ids", &ids));
    let plan = explain(&database, "postgres", "*", &delete, &[]).await;
    assert!(read(&plan) < 30_000.0, "it reads {} rows: {plan:#}", read(&plan));

    let kept = "select count(*) from idempotency_keys where principal = $1";
    let before: i64 = database.value(kept, "robot").await;
    sqlx::query("update idempotency_keys set request = 'POST /v1/sessions/sess_' || lpad(to_hex(501), 32, '0') || '/retry' where key = 'key1000'")
        .execute(&database.pool)
        .await
        .unwrap();
    let ids: Vec<String> = (1..=501).map(|n| format!("sess_{n:032x}")).collect();
    sqlx::query("select forget_sessions($1)").bind(&ids).execute(&database.pool).await.unwrap();
    assert_eq!(database.value::<i64>(kept, "robot").await, before - 502, "501 answers, and a request");
}

#[tokio::test]
async fn a_collection_of_packs_compares_only_messages_with_files() {
    let database = installation().await;
    let pack = "'application/vnd.wakeful.pack'";
    // It reads every blob, and every snapshot with its one pack.
    let all = 1620.0 + 3.0 * 600.0;
    reads(&database, RUNTIME, all + FEW, "order by b.sha256, b.space_id", &[pack, "3600", "null"]).await;
    let names: Vec<String> = (1..=20).filter(|n| n % 10 != 0).map(|n| sha256(&format!("pack{n}"))).collect();
    let spaces = array(names.iter().map(|_| "default"));
    let names = array(names.iter().map(String::as_str));
    reads(&database, RETENTION, all + FEW, "returning size", &[&names, &spaces, "3600"]).await;
}

#[tokio::test]
async fn the_next_blob_to_remove_from_its_store_is_read_alone() {
    let database = installation().await;
    reads(&database, RUNTIME, FEW, "from blob_removals r\n", &["'{packs}'::text[]"]).await;
}

#[tokio::test]
async fn imports_of_the_sessions_that_are_erased_are_found_among_imports() {
    let database = installation().await;
    let ids: Vec<String> = (900..1000).map(|n| format!("default/c{n}")).collect();
    let ids = array(ids.iter().map(String::as_str));
    // Each of the hundred is compared with the six imports, or less.
    reads(&database, RETENTION, 5.0 * FEW, "tree (id) as (", &[&ids]).await;
}

#[tokio::test]
async fn a_mail_finds_the_conversations_that_it_names_by_the_ids_of_their_mails() {
    let database = installation().await;
    let ids = "array['dlv_7@agents.example', '9@example.org', 'none@example.org']";
    reads(&database, RUNTIME, FEW, "group by named.conversation_id", &["'default'", "'default'", ids]).await;
    let mail = [
        "'default'",
        "'default'",
        "'ann@example.org'",
        "'default/c5'",
        "array['order']",
        "array['x']",
        "false",
        "array['y']",
    ];
    reads(&database, RUNTIME, FEW, "of_sender!", &mail).await;
}

#[tokio::test]
async fn a_list_of_workers_counts_their_jobs_once() {
    let database = installation().await;
    // All jobs, and all workers.
    reads(&database, RUNTIME, 5100.0 + FEW, "beat_age_s!", &[]).await;
}

#[tokio::test]
async fn what_every_process_looks_for_each_second_or_minute_reads_no_job_that_waits() {
    let database = installation().await;
    reads(&database, RUNTIME, FEW, "'no_worker' from alone", &["60", "30"]).await;
    // Another process has written the sample of this minute.
    reads(&database, RUNTIME, FEW, "insert into queue_samples", &[]).await;
}

#[tokio::test]
async fn a_look_of_the_search_reads_no_session_that_is_looked_at_later() {
    let database = installation().await;
    reads(&database, RUNTIME, FEW, "h.steps = s.total_turns", &["50"]).await;
    reads(&database, RUNTIME, FEW, "min(h.due_at)", &[]).await;
    reads(&database, RUNTIME, FEW, "is_backlog!", &["10", "50", "600"]).await;
}

#[tokio::test]
async fn a_look_for_people_who_wait_long_reads_no_run_whose_person_was_told() {
    let database = installation().await;
    let values = ["array['agent1', 'agent2']", "array[1.0, 2.0]", "''", "200"];
    let plan = explain(&database, RUNTIME, "*", &shipped(TOLD), &values).await;
    assert!(read(&plan) < FEW, "it reads {} rows: {plan:#}", read(&plan));
    assert_eq!(plan["Actual Rows"], 4, "of two agents, two of the last ten runs each");
}

#[tokio::test]
async fn agents_that_workers_lack_are_found_in_a_database_that_sorts_as_people_do() {
    let Some(database) = Database::sorted_by_icu().await else { return };
    let fill = "insert into jobs (kind, runner, space_id, conversation_id, session_id, step_number, run_at, held_by, held_since)
        select 'step', '', 'default', 'default/c' || n, 'sess_' || n, 1, now(),
            case when n % 1000 = 0 then 'lacks:writer' when n % 2 = 0 then 'queue' else 'agent:default/editor' end, now()
        from generate_series(1, 3000) n;
        analyze jobs";
    sqlx::raw_sql(fill).execute(&database.pool).await.unwrap();
    let lacked = database.store().await.lacked_agents().await.unwrap();
    let lacked: Vec<_> = lacked.into_iter().map(|one| (one.agent, one.space_id, one.sessions)).collect();
    assert_eq!(lacked, [("writer".to_owned(), "default".to_owned(), 3)]);
    database.with_roles().await;
    reads(&database, RUNTIME, FEW, "min(held_since)", &[]).await;
}
