//! What keeps a process's leases, and what a process does when connections fail it: the heartbeat, the liveness lock, the listener.

use super::full::FullPool;
use super::*;
use crate::support::proxy::{CutAt, Proxy as Cutter};
use crate::support::within;
use tokio_util::sync::CancellationToken;
use wakeful_store::queue::{EVERY_SESSION, Heartbeat, Holdings, Job, Liveness, News, Notifier, heard};

/// Sessions of the server that hold a liveness lock ("wake" in ASCII).
const LOCKS: &str =
    "select count(*) from pg_locks where locktype = 'advisory' and classid = x'77616b65'::integer::oid
    and database = (select oid from pg_database where datname = current_database())";
const CUT_LOCKS: &str =
    "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and classid = x'77616b65'::integer::oid
    and database = (select oid from pg_database where datname = current_database())";

fn heartbeat(store: &Store, holdings: &Arc<Holdings>) -> Heartbeat {
    Heartbeat {
        store: store.clone(),
        worker_id: Arc::from("w_1"),
        listed: false,
        host: "here".to_owned(),
        concurrency: 1,
        connections: 8,
        agents: Vec::new(),
        lease: LEASE,
        // It beats once, and when it is told to.
        every: Duration::from_secs(3600),
        holdings: Arc::clone(holdings),
        drain_asked: CancellationToken::new(),
    }
}

fn liveness(store: &Store, holdings: &Arc<Holdings>) -> Liveness {
    let news = News::listen(store, CancellationToken::new());
    let notifier = Notifier::start(store.clone(), &news);
    Liveness { store: store.clone(), holdings: Arc::clone(holdings), notifier }
}

#[tokio::test]
async fn a_claim_that_lost_its_lease_is_told_so_though_the_same_process_has_the_job_again() {
    let world = World::new().await;
    world.wake("c1", "Hello.").await;
    let mut claims = Claims::start(&world.store, Kind::Step, 2, LEASE);
    let first = claims.next().await;
    // The lease ends while the claim goes on, as after a suspended host, and the process claims the job again.
    world.run_sql("update jobs set run_at = clock_timestamp()").await;
    let second: Job = claims.next().await;
    assert_eq!(first.lease.job_id, second.lease.job_id);
    claims.stop();

    let stop = CancellationToken::new();
    let beats = tokio::spawn(heartbeat(&world.store, &claims.holdings).run(stop.clone()));
    within("the first claim to hear of it", first.lease.lost().cancelled()).await;
    assert!(!first.lease.is_live() && second.lease.is_live() && !second.lease.lost().is_cancelled());
    stop.cancel();
    beats.await.unwrap();
}

#[tokio::test]
async fn a_server_that_takes_over_without_a_claim_gives_its_token_to_no_other() {
    let world = World::new().await;
    world.wake("c1", "Hello.").await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let first = claims.next().await;
    // It has neither the claim nor the number that was drawn for it.
    world
        .run_sql("update jobs set lease = null, worker_id = null, stuck = 0, attempt = 0, run_at = now()")
        .await;
    world.run_sql("alter sequence leases restart").await;
    let mut others = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let second = others.next().await;
    assert_eq!(first.lease.job_id, second.lease.job_id);
    assert_ne!(first.lease.token, second.lease.token);
    claims.stop();
    others.stop();
}

#[tokio::test]
async fn jobs_stop_naming_a_lock_that_was_cut_though_no_connection_of_the_pool_is_free() {
    let world = World::new().await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let (stop, holdings) = (CancellationToken::new(), Arc::clone(&claims.holdings));
    let lives = tokio::spawn(liveness(&world.store, &holdings).run(stop.clone()));
    let beats = tokio::spawn(heartbeat(&world.store, &holdings).run(stop.clone()));
    eventually("the lock", || async { (world.one(LOCKS).await == 1).then_some(()) }).await;
    world.wake("c1", "Hello.").await;
    let _job = claims.next().await;
    claims.stop();
    let named = "select count(*) from jobs where liveness_lock is not null";
    eventually("the job to name it", || async { (world.one(named).await == 1).then_some(()) }).await;

    let full = FullPool::of(&world).await;
    sqlx::query(CUT_LOCKS).execute(&world.database.pool).await.unwrap();
    eventually("the job to name none", || async { (world.one(named).await == 0).then_some(()) }).await;
    full.end(&world).await;
    stop.cancel();
    lives.await.unwrap();
    beats.await.unwrap();
}

#[tokio::test]
async fn a_process_that_does_not_know_yet_that_its_lock_is_gone_judges_nobody() {
    let world = World::new().await;
    let proxy = Cutter::start(&world.database.url);
    let store = Store::connect(&proxy.url, 8, "alive").await.unwrap();
    let stop = CancellationToken::new();
    let liveness = Liveness {
        store: store.clone(),
        holdings: Arc::default(),
        notifier: {
            let news = News::listen(&world.store, CancellationToken::new());
            Notifier::start(world.store.clone(), &news)
        },
    };
    let lives = tokio::spawn(liveness.run(stop.clone()));
    eventually("the lock", || async { (world.one(LOCKS).await == 1).then_some(()) }).await;
    // The connection proves itself every two seconds. This proof gets no answer, and meanwhile the server loses the lock: as
    // when its host is gone and another server is the writer.
    proxy.cut_when("select pg_notify($1, '') as sent", CutAt::HeldAnswer);
    eventually("a proof", || async { (proxy.cut_count() == 1).then_some(()) }).await;
    sqlx::query(CUT_LOCKS).execute(&world.database.pool).await.unwrap();
    eventually("the lock to be free", || async { (world.one(LOCKS).await == 0).then_some(()) }).await;
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at, lease, liveness_lock)
            values ('step', 'default', 'default/c', 'sess_1', 1, clock_timestamp() + interval '1 minute', nextval('leases'), 7)",
        )
        .await;
    eventually("another lock", || async { (world.one(LOCKS).await == 1).then_some(()) }).await;
    assert_eq!(world.one("select count(*) from jobs where liveness_lock = 7").await, 1, "nobody judged it");
    stop.cancel();
    proxy.release();
    lives.await.unwrap();
}

#[tokio::test]
async fn a_listener_whose_server_does_not_answer_is_replaced() {
    let world = World::new().await;
    let proxy = Cutter::start(&world.database.url);
    let store = Store::connect(&proxy.url, 8, "alive").await.unwrap();
    proxy.cut_when("LISTEN", CutAt::HeldAnswer);
    let stop = CancellationToken::new();
    let news = News::listen(&store, stop.clone());
    within("a listener", heard(&mut news.sessions(), EVERY_SESSION)).await;
    assert_eq!(proxy.cut_count(), 1);
    let mut sessions = news.sessions();
    world.store.announce("sess_1").await.unwrap();
    within("the news", heard(&mut sessions, "sess_1")).await;
    stop.cancel();
}

#[tokio::test]
async fn a_connection_to_a_server_that_only_reads_is_not_used_again() {
    let world = World::new().await;
    let name = &world.database.name;
    let set = async |to: &str| {
        let set = format!("alter database \"{name}\" {to}");
        sqlx::query(sqlx::AssertSqlSafe(set)).execute(&world.database.pool).await.unwrap();
    };
    // As after a failover: the first connections lead to the host that was the writer before.
    set("set default_transaction_read_only = on").await;
    let store = Store::connect(&world.database.url, 8, "alive").await.unwrap();
    assert!(store.wake(&new_session("c1", "c1"), &message("Hello.")).await.is_err());
    let agent =
        wakeful_workflow::pause::Subject { kind: wakeful_workflow::pause::Kind::Agent, name: "a".into() };
    assert!(store.pause(&agent, "a fix", None, None).await.is_err(), "a transaction fails too");
    set("reset default_transaction_read_only").await;
    // One that was opened meanwhile fails too, once.
    eventually("a message is taken", || async {
        store.wake(&new_session("c1", "c1"), &message("Hello.")).await.ok()
    })
    .await;
    eventually("a pause", || async { store.pause(&agent, "a fix", None, None).await.ok() }).await;
}
