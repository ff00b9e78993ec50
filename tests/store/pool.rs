//! The pool: it works with what the server gives, and lends no connection that is in the middle of something.

use super::made_up::*;
use super::world::*;
use super::*;
use crate::support::proxy::{CutAt, Proxy};
use crate::support::{Database, Server, eventually};
use apalis_core::backend::Backend;
use apalis_core::worker::context::WorkerContext;
use futures::future::poll_fn;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgConnectOptions, PgListener};
use sqlx::{ConnectOptions, Connection, PgConnection};
use std::str::FromStr;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use wakeful_store::diagnosis::keeps_session;
use wakeful_store::legacy::CacheMiss;
use wakeful_store::queue::{Holdings, News, Notifier, Queue, Settings};
use wakeful_store::space::{Scope, within};

/// The database's URL for a role that the server gives `most` connections.
async fn limited(database: &Database, most: u32) -> String {
    let role = new_id("limited");
    let sql = format!(
        "create role {role} login password '{role}' connection limit {most}; grant all on schema public to {role};
        grant all on all tables in schema public to {role}; grant all on all sequences in schema public to {role}"
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&database.pool).await.unwrap();
    let options = PgConnectOptions::from_str(&database.url).unwrap().username(&role).password(&role);
    options.to_url_lossy().to_string()
}

async fn drop_role(database: &Database, url: &str) {
    let role = PgConnectOptions::from_str(url).unwrap().get_username().to_owned();
    let sql = format!("drop owned by {role}; drop role {role}");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&database.pool).await.unwrap();
}

#[tokio::test]
async fn when_the_server_gives_no_more_connections_statements_take_turns_on_what_it_gave() {
    let database = Database::new().await;
    let url = limited(&database, 1).await;
    let store = Store::connect(&url, 8, "wakeful test").await.unwrap();
    let clocks = (0..200).map(|_| store.now());
    for clock in join_all(clocks).await {
        clock.unwrap();
    }
    // Messages have a door of their own to the same connection.
    let (read, written) =
        tokio::join!(store.session_ids(None, "", 10), store.count_legacy(CacheMiss::Missed));
    read.unwrap();
    written.unwrap();
    store.close().await;
    drop_role(&database, &url).await;
}

#[tokio::test]
async fn a_process_that_works_for_all_spaces_and_for_one_keeps_a_connection_for_each() {
    let database = Database::new().await;
    let store = Store::connect(&database.url, 8, "two spaces").await.unwrap();
    let open = "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'two spaces'";
    eventually("a second connection", || async {
        within(Scope::of("acme"), store.session_ids(None, "", 10)).await.unwrap();
        store.session_ids(None, "", 10).await.unwrap();
        let open: i64 = sqlx::query_scalar(open).fetch_one(&database.pool).await.unwrap();
        (open == 2).then_some(())
    })
    .await;
    // More spaces take turns on the two.
    for space in ["a", "b", "c", "d"] {
        within(Scope::of(space), store.session_ids(None, "", 10)).await.unwrap();
    }
    let open: i64 = sqlx::query_scalar(open).fetch_one(&database.pool).await.unwrap();
    assert_eq!(open, 2);
    store.close().await;
}

#[tokio::test]
async fn a_message_that_waited_in_vain_for_a_lock_costs_no_connection() {
    let database = Database::new().await;
    let store = Store::connect(&database.url, 8, "in vain").await.unwrap();
    let session_id = crate::support::world::wake(&store, "c", "scripted/test", "hello").await;
    let backends = "select string_agg(pid::text, ' ' order by pid) from pg_stat_activity
        where datname = current_database() and application_name = $1";
    let before: String = database.value(backends, "in vain").await;
    let mut holder = database.pool.begin().await.unwrap();
    let locked = "select from conversation_sessions where session_id = $1 for update";
    sqlx::query(locked).bind(&session_id).execute(&mut *holder).await.unwrap();
    let refused = store.send(&session_id, &message("more")).await.unwrap_err();
    assert!(refused.to_string().contains("lock timeout"), "{refused}");
    holder.rollback().await.unwrap();
    store.send(&session_id, &message("more")).await.unwrap();
    // A second one may have been on its way before.
    let after: String = database.value(backends, "in vain").await;
    assert!(before.split(' ').all(|pid| after.contains(pid)), "{before}, then {after}");
    store.close().await;
}

#[tokio::test]
async fn a_pool_without_a_connection_says_why_there_is_none() {
    let database = Database::new().await;
    let url = limited(&database, 0).await;
    let refused = Store::connect(&url, 2, "wakeful test").await.unwrap_err();
    assert!(refused.to_string().contains("too many connections"), "{refused}");
    assert_eq!(refused.outage(), Some(wakeful_store::Outage::Crowded));
    drop_role(&database, &url).await;
}

#[tokio::test]
async fn a_begin_that_was_dropped_leaves_no_later_statement_in_a_transaction() {
    let database = Database::new().await;
    let proxy = Proxy::start(&database.url);
    let store = Store::connect(&proxy.url, 2, "wakeful test").await.unwrap();
    proxy.cut_when("BEGIN", CutAt::HeldAnswer);
    tokio::select! {
        begun = store.verify("sess_x") => panic!("BEGIN was answered: {begun:?}"),
        () = eventually("a BEGIN", || async { (proxy.cut_count() == 1).then_some(()) }) => {}
    }
    proxy.release();
    store.count_legacy(CacheMiss::Missed).await.unwrap();
    let counted: i64 = database.value("select count(*) from legacy_chat_counts where $1 <> ''", "any").await;
    assert_eq!(counted, 1, "it was committed");
    store.close().await;
}

#[tokio::test]
async fn a_transaction_that_is_dropped_is_rolled_back_at_once_and_its_connection_is_used_again() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    // With one connection, `verify` waits for it if the pool still reads the answer to the ROLLBACK.
    let store = Store::connect(&world.database.url, 1, "pooled").await.unwrap();
    // A message of another text under a key that was used before: the transaction locked the conversation.
    let first = NewMessage { client_key: Some("k".to_owned()), ..message("one") };
    store.send(&session_id, &first).await.unwrap();
    let second = NewMessage { client_key: Some("k".to_owned()), ..message("two") };
    store.send(&session_id, &second).await.unwrap_err();
    let pids = "select array_agg(pid order by pid) from pg_stat_activity
        where datname = $1 and application_name = 'pooled'";
    let before: Vec<i32> = world.database.value(pids, &world.database.name).await;
    // Another connection gets the row's lock, so the transaction has ended.
    let locked = sqlx::query("select from conversation_counters for update").execute(&world.database.pool);
    timeout(Duration::from_secs(30), locked).await.unwrap().unwrap();
    store.verify(&session_id).await.unwrap();
    assert_eq!(world.database.value::<Vec<i32>>(pids, &world.database.name).await, before);
    store.close().await;
}

/// A statement that may lose its rows says so itself, and only its own commit is asynchronous. The server writes its
/// log only for commits that wait for it, so that its position shows which did.
#[tokio::test]
async fn only_a_model_calls_text_is_committed_before_the_log_is_written() {
    let server =
        Server::with(&[("autovacuum", "off"), ("wal_writer_delay", "10s"), ("bgwriter_delay", "10s")]).await;
    let database = Database::on(&server.url(), "pg_default").await;
    let store = database.store().await;
    let world = World { database, store };
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let mut admin = PgConnection::connect(&world.database.url).await.unwrap();
    let mut unwritten = async || {
        sqlx::query_scalar::<_, i64>(
            "select (pg_current_wal_insert_lsn() - pg_current_wal_flush_lsn())::bigint",
        )
        .fetch_one(&mut admin)
        .await
        .unwrap()
    };
    let (session, generation) =
        (driver.session.session_id.clone(), wakeful_workflow::id::GenerationId::from("gen_1"));
    let (mut asynchronous, text) = (0, "x".repeat(1000));
    driver.begin_generation("gen_1", 1).await;
    for first_chunk in 0..8 {
        let (session_id, generation_id) = (session.clone(), generation.clone());
        let chunks = NewChunks { session_id, generation_id, first_chunk, texts: vec![text.clone()] };
        assert_eq!(world.store.append_chunks(&[chunks]).await.unwrap(), [true]);
        asynchronous += usize::from(unwritten().await >= 1000);
        world.store.count_legacy(CacheMiss::Missed).await.unwrap();
        assert!(unwritten().await < 1000, "a commit of another kind waited for the log");
    }
    // A checkpoint may write the log at any time.
    assert!(asynchronous >= 6, "{asynchronous} of 8");
}

/// A process that the server gives few connections takes fewer jobs than it has slots. The others are for other processes, and
/// for its own next turn.
#[tokio::test]
async fn a_process_with_few_connections_lets_other_jobs_take_turns_and_tells_others_of_new_ones() {
    let world = World::new().await;
    let url = limited(&world.database, 3).await;
    let store = Store::connect(&url, 8, "wakeful test").await.unwrap();
    let stop = CancellationToken::new();
    let news = News::listen(&store, stop.clone());
    let settings = Settings {
        kind: Kind::Step,
        runner: Arc::from(""),
        concurrency: 64,
        lease: LEASE,
        poll: Duration::from_secs(3600),
        agents: Arc::default(),
    };
    // The server refuses the fourth connection again and again.
    let busy = async {
        loop {
            join_all((0..20).map(|_| store.now())).await;
        }
    };
    let takes = async {
        join_all((0..20).map(|_| store.now())).await;
        world
            .run_sql(
                "insert into jobs (kind, space_id, conversation_id, session_id, step_number)
                select 'step', 'default', 'default/c' || n, 'sess_' || n, 1 from generate_series(1, 60) as n",
            )
            .await;
        let holdings = Arc::new(Holdings::default());
        let mut queue =
            Queue::start(store.clone(), settings, "few".into(), Arc::clone(&holdings), &news, stop.clone());
        let context = WorkerContext::new("test");
        let mut jobs = Vec::new();
        while jobs.is_empty() || jobs.len() < holdings.len() {
            let task = timeout(crate::support::timeout(), poll_fn(|cx| queue.poll_next(cx, &context)))
                .await
                .expect("a job");
            jobs.push(task.unwrap().unwrap().args);
        }
        assert!(jobs.len() >= 8, "{} jobs", jobs.len());
        // Between two refusals the pool may believe for a moment that it can grow. Then it takes all of them.
        eventually("it lets others take turns", || async { (!jobs[0].has_room_beside()).then_some(()) })
            .await;
        let mut others = PgListener::connect(&world.database.url).await.unwrap();
        others.listen("wakeful_jobs").await.unwrap();
        Notifier::start(store.clone(), &news).job(Kind::Step);
        loop {
            let heard =
                timeout(crate::support::timeout(), others.recv()).await.expect("others are told").unwrap();
            if heard.payload() == "step:" {
                break;
            }
        }
    };
    tokio::select! {
        () = busy => {}
        () = takes => {}
    }
    stop.cancel();
    store.close().await;
    drop_role(&world.database, &url).await;
}

#[tokio::test]
async fn a_connection_that_ends_while_its_session_is_proved_is_not_taken_for_a_poolers() {
    let database = Database::new().await;
    let proxy = Proxy::start(&database.url);
    let patience = Duration::from_secs(3);
    assert!(keeps_session(&proxy.url, patience).await.unwrap());
    proxy.cut_when("LISTEN \"wakeful_session", CutAt::AfterAnswer);
    let said = keeps_session(&proxy.url, patience).await;
    assert!(matches!(&said, Err(error) if error.is_transient()), "{said:?}");
    assert_eq!(proxy.cut_count(), 1);
}
