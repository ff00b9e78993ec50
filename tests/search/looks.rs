//! The looks with which a worker brings the search up to date: what they find, and how much they read for it.

use super::{index, said};
use crate::support::{Database, eventually};
use wakeful_store::Store;
use wakeful_store::wake::NewMessage;

/// Gives a session and its run ids that were made half a minute ago, as if their transaction had taken so long. Returns the new id.
async fn made_long_ago(database: &Database, session_id: &str) -> String {
    made_ago(database, session_id, 30).await
}

/// Gives a session and its run ids that were made so many seconds ago. Returns the new id.
async fn made_ago(database: &Database, session_id: &str, seconds: i64) -> String {
    let at = format!("{:012x}", chrono::Utc::now().timestamp_millis() - seconds * 1000);
    let old = format!("sess_{at}{}", &session_id[session_id.len() - 20..]);
    let mut tx = database.pool.begin().await.unwrap();
    for sql in [
        "select set_config('session_replication_role', 'replica', true), $1, $2",
        "update conversation_sessions set session_id = $2 where session_id = $1",
        "update session_runs set session_id = $2, run_id = overlay($2 placing 'run' from 1 for 4) where session_id = $1",
    ] {
        sqlx::query(sql).bind(session_id).bind(&old).execute(&mut *tx).await.unwrap();
    }
    tx.commit().await.unwrap();
    old
}

#[tokio::test]
async fn a_look_reads_new_ids_alone_and_a_sweep_finds_what_was_committed_late() {
    let database = Database::new().await;
    let store = database.store().await;
    let known = async |session_id: &str| -> bool {
        database.value("select exists (select from search_sessions where session_id = $1)", session_id).await
    };
    let swept = async |ago: &str| {
        sqlx::query("update search_progress set swept_at = clock_timestamp() - $1::text::interval")
            .bind(ago)
            .execute(&database.pool)
            .await
            .unwrap();
    };
    let mut old = Vec::new();
    for number in 0..3 {
        let session_id = said(&store, &format!("old{number}"), None, "It took long.").await;
        old.push(made_long_ago(&database, &session_id).await);
    }
    let new = said(&store, "new", None, "It is here at once.").await;
    index(&store).await;
    for session_id in old.iter().chain([&new]) {
        assert!(known(session_id).await, "{session_id}");
    }

    swept("1 s").await;
    let read = store.index_sessions().await.unwrap().ids;
    assert!(read <= 2, "the new session and its run at most, and not the {read} ids of the last minute");

    let late = said(&store, "late", None, "It took long too.").await;
    let late = made_long_ago(&database, &late).await;
    swept("1 s").await;
    index(&store).await;
    assert!(!known(&late).await, "its ids are older than what a look reads");
    swept("11 s").await;
    index(&store).await;
    assert!(known(&late).await);
}

#[tokio::test]
async fn sessions_of_a_host_whose_clock_is_behind_are_found_within_minutes() {
    let database = Database::new().await;
    let store = database.store().await;
    said(&store, "now", None, "It is here at once.").await;
    index(&store).await;
    let behind = said(&store, "behind", None, "My clock is ten minutes late.").await;
    let behind = made_ago(&database, &behind, 600).await;
    let looked_back = async |ago: &str| {
        let sql = "update search_progress set swept_at = '-infinity', looked_back_at = clock_timestamp() - $1::text::interval";
        sqlx::query(sql).bind(ago).execute(&database.pool).await.unwrap();
        index(&store).await;
        let sql = "select exists (select from search_sessions where session_id = $1)";
        database.value::<bool>(sql, &behind).await
    };
    assert!(!looked_back("9 min").await, "a sweep reads the ids of the last minute");
    assert!(looked_back("11 min").await);
}

#[tokio::test]
async fn a_look_at_a_backlog_does_not_look_for_new_sessions_each_time_and_finds_them_all_the_same() {
    let database = Database::new().await;
    let store = database.store().await;
    let mut all = Vec::new();
    for number in 0..120 {
        all.push(said(&store, &format!("c{number}"), None, "Is there a table?").await);
    }
    let first = store.index_sessions().await.unwrap();
    assert!(first.ids > 0 && first.sessions == 50 && first.more, "{first:?}");
    all.push(said(&store, "new", None, "Is there another table?").await);
    let second = store.index_sessions().await.unwrap();
    assert!(second.ids == 0 && second.sessions == 50 && second.more, "{second:?}");
    index(&store).await;
    // Each has its words and its mark, of whichever statement it was.
    let sql = "select count(*) from search_sessions h join search_documents d using (session_id)
        where h.through_message_number = 1 and h.parts = 1 and d.words @@ to_tsquery('simple', $1)";
    assert_eq!(database.value::<i64>(sql, "table").await, all.len() as i64);
}

/// Closes a store, and waits until Postgres has ended its connections: each reports what it read before it is gone from the list.
async fn ended(database: &Database, store: Store) {
    store.close().await;
    let open =
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = $1";
    eventually("the connections have ended", || async {
        (database.value::<i64>(open, "wakeful test").await == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_look_reads_what_is_new_and_not_all_that_there_is() {
    const OLD: i64 = 20_000;
    let database = Database::new().await;
    // Sessions that rest and are in the search, and failures that their groups count.
    let fill = "with old as (
            select 'sess_' || lpad(to_hex(n), 32, '0') as session_id, n from generate_series(1, 20000) n
        ), sessions as (
            insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id,
                agent, model_id, model_context_window, status)
            select session_id, 'default/old' || n, 'default', 'default', 'chat', n::text, 'a', 'm', 1, 'completed' from old
        ), known as (
            insert into search_sessions (session_id, space_id) select session_id, 'default' from old
        )
        insert into run_failures (session_id, run_id, space_id, fingerprint, kind, source, text, error, version, is_counted)
        select session_id, 'run_' || n, 'default', '0', 'k', 's', 't', 'e', 'v', true from old";
    let mut filling = database.pool.acquire().await.unwrap();
    sqlx::query(fill).execute(&mut *filling).await.unwrap();
    let analyze = "vacuum (analyze) conversation_sessions, search_sessions, run_failures";
    sqlx::query(analyze).execute(&mut *filling).await.unwrap();
    // Its foreign keys read each session twice. A connection that reported less than a second ago reports that later.
    sqlx::query("select pg_stat_force_next_flush()").execute(&mut *filling).await.unwrap();
    drop(filling);
    let first = database.store().await;
    index(&first).await;
    ended(&database, first).await;
    let read = "select sum(idx_tup_fetch)::bigint from pg_stat_user_tables
        where relname = any(string_to_array($1, ' '))";
    let tables = "conversation_sessions search_sessions run_failures";
    let before = database.value::<i64>(read, tables).await;

    let store = database.store().await;
    for number in 0..20 {
        let session_id = said(&store, &format!("c{number}"), None, "Is there a table?").await;
        let failed = "insert into run_failures (session_id, run_id, space_id, fingerprint, kind, source, text, error, version)
            values ($1, 'run', 'default', '0', 'k', 's', 't', 'e', 'v')";
        sqlx::query(failed).bind(session_id).execute(&database.pool).await.unwrap();
    }
    assert_eq!(store.index_sessions().await.unwrap().sessions, 20);
    ended(&database, store).await;
    let read = database.value::<i64>(read, tables).await - before;
    assert!(read < OLD / 10, "{read} rows of {OLD} and 20");
}

#[tokio::test]
async fn a_session_in_which_nothing_happened_is_not_written_again() {
    let database = Database::new().await;
    let store = database.store().await;
    let session_id = said(&store, "waits", None, "Is there a table?").await;
    index(&store).await;
    let due = async || {
        sqlx::query("update search_sessions set due_at = clock_timestamp() where session_id = $1")
            .bind(&session_id)
            .execute(&database.pool)
            .await
            .unwrap();
        store.index_sessions().await.unwrap().sessions
    };
    assert_eq!(due().await, 0);
    let waits: bool = database
        .value("select due_at > clock_timestamp() from search_sessions where session_id = $1", &session_id)
        .await;
    assert!(waits, "it is at work, so it is looked at again");

    let more = NewMessage {
        client_key: None,
        text: "With a view?".into(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    store.send(&session_id, &more).await.unwrap();
    assert_eq!(due().await, 1, "something happened");
}

#[tokio::test]
async fn a_session_that_only_waits_is_looked_at_less_often_and_is_found_as_soon_as_ever_when_it_goes_on() {
    let database = Database::new().await;
    let store = database.store().await;
    let session_id = said(&store, "waits", None, "Is there a table?").await;
    index(&store).await;
    let run = async |sql: &'static str| {
        sqlx::query(sql).bind(&session_id).execute(&database.pool).await.unwrap();
    };
    // It waits for ten minutes, behind a gate.
    let mut tx = database.pool.begin().await.unwrap();
    for sql in [
        "select set_config('session_replication_role', 'replica', true), $1",
        "update session_events set ts = ts - interval '10 minutes' where session_id = $1",
        "update search_sessions set active_at = active_at - interval '10 minutes', due_at = clock_timestamp() where session_id = $1",
    ] {
        sqlx::query(sql).bind(&session_id).execute(&mut *tx).await.unwrap();
    }
    tx.commit().await.unwrap();
    assert_eq!(store.index_sessions().await.unwrap().sessions, 0);
    let later = "select due_at > clock_timestamp() + interval '200 seconds' from search_sessions where session_id = $1";
    assert!(database.value::<bool>(later, &session_id).await, "it was silent for ten minutes");

    let sweep =
        "update search_progress set swept_at = clock_timestamp() - interval '11 seconds' where $1 <> ''";
    run(sweep).await;
    assert_eq!(store.index_sessions().await.unwrap().sessions, 0);
    assert!(database.value::<bool>(later, &session_id).await, "still nothing happened");

    // A step of it is committed. No id says so.
    run("insert into session_events (session_id, seq, type, space_id)
        select session_id, last_event_seq + 1, 'STEP', space_id from conversation_sessions where session_id = $1")
    .await;
    run("update conversation_sessions set last_event_seq = last_event_seq + 1 where session_id = $1").await;
    run(sweep).await;
    assert_eq!(store.index_sessions().await.unwrap().sessions, 1);
    let soon =
        "select due_at < clock_timestamp() + interval '4 seconds' from search_sessions where session_id = $1";
    assert!(database.value::<bool>(soon, &session_id).await, "it is at work again");
}
