//! How spaces share the slots of a queue while more jobs wait than there are slots.

use super::*;
use crate::support::proxy::{CutAt, Proxy};

/// Jobs of a space that have waited for `age_s` seconds. Negative: they are delayed for as long.
async fn wait(world: &World, space: &str, jobs: u32, age_s: i32) {
    let sql = "insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at)
        select 'step', $1, $1 || '/c' || n, 'sess_' || $1 || n, 1, clock_timestamp() - make_interval(secs => $3)
        from generate_series(1, $2) as n";
    sqlx::query(sql)
        .bind(space)
        .bind(i64::from(jobs))
        .bind(f64::from(age_s))
        .execute(&world.database.pool)
        .await
        .unwrap();
}

/// The space of the job that is claimed next. Its step ends at once.
async fn next_space(store: &Store, claims: &mut Claims) -> String {
    let job = claims.next().await;
    store.end_job(&job.lease).await.unwrap();
    job.conversation_id.split('/').next().unwrap().to_owned()
}

#[tokio::test]
async fn a_space_that_sends_many_messages_keeps_no_other_waiting() {
    let world = World::new().await;
    wait(&world, "many", 1000, 60).await;
    wait(&world, "one", 1, 0).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let mut before = 0;
    while next_space(&world.store, &mut claims).await != "one" {
        before += 1;
        assert!(
            before < 4,
            "it waited for its turn, and that is one job of the other space and those by age"
        );
    }
    claims.stop();
}

#[tokio::test]
async fn spaces_that_wait_take_turns_and_the_oldest_jobs_go_on() {
    let world = World::new().await;
    for (space, age_s) in [("b", 3000), ("c", 2000), ("a", 1000)] {
        wait(&world, space, 100, age_s).await;
    }
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let mut taken = std::collections::BTreeMap::<String, u32>::new();
    for _ in 0..80 {
        *taken.entry(next_space(&world.store, &mut claims).await).or_default() += 1;
    }
    claims.stop();
    // The shares are tested without a database. Here a slow machine makes slow claims, after which more go by age.
    assert!(taken["a"] >= 5 && taken["c"] >= 5 && taken["b"] >= 20, "{taken:?}");
}

#[tokio::test]
async fn a_job_that_looks_at_a_shut_gate_waits_for_its_turn_and_not_for_all_that_are_older() {
    let world = World::new().await;
    wait(&world, "many", 1000, 60).await;
    wait(&world, "one", 1, 0).await;
    // The gate has woken it for a probe, and it still waits for the gate.
    world
        .run_sql(
            "update jobs set waits_for = 'model', waits_since = clock_timestamp() where space_id = 'one'",
        )
        .await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let mut before = 0;
    while next_space(&world.store, &mut claims).await != "one" {
        before += 1;
        assert!(before < 8, "a shut gate keeps all its sessions waiting for the probe");
    }
    claims.stop();
}

#[tokio::test]
async fn a_claim_in_turn_whose_answer_is_lost_gives_its_jobs_back() {
    let world = World::new().await;
    let proxy = Proxy::start(&world.database.url);
    let store = Store::connect(&proxy.url, 4, "test").await.unwrap();
    wait(&world, "a", 3, 20).await;
    wait(&world, "b", 3, 10).await;
    proxy.cut_when("with recursive spaces", CutAt::BeforeAnswer);
    let mut claims = Claims::start(&store, Kind::Step, 1, LEASE);
    for _ in 0..6 {
        let job = claims.next().await;
        assert_eq!((job.attempt, job.stuck, job.died), (1, 1, 0), "the lost claim does not count");
        store.end_job(&job.lease).await.unwrap();
    }
    claims.stop();
    assert_eq!(proxy.cut_count(), 1);
}

/// A store of the runtime's role, under row-level security.
async fn of_runtime(world: &World) -> Store {
    world.database.with_roles().await;
    Store::connect(&world.database.as_role("wakeful_runtime"), 4, "test").await.unwrap()
}

/// Ends the server's processes that worked for `store`, whose role is the runtime's: then Postgres has added up what they read.
/// Returns a count of it.
async fn count_of(world: &World, store: Store, sql: &'static str) -> i64 {
    let of_runtime =
        "select pid from pg_stat_activity where usename = 'wakeful_runtime' and datname = current_database()";
    let pids: Vec<i32> = sqlx::query_scalar(of_runtime).fetch_all(&world.database.pool).await.unwrap();
    store.close().await;
    eventually("the server's processes to end", || async {
        // One that listens is not the pool's.
        let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity where pid = any ($1)";
        let left: i64 = sqlx::query_scalar(end).bind(&pids).fetch_one(&world.database.pool).await.unwrap();
        (left == 0).then_some(())
    })
    .await;
    world.one(sql).await
}

#[tokio::test]
async fn a_claim_in_turn_that_was_planned_for_few_jobs_does_not_walk_through_many() {
    let world = World::new().await;
    wait(&world, "few1", 20, 200).await;
    wait(&world, "few2", 20, 100).await;
    let store = of_runtime(&world).await;
    let mut claims = Claims::start(&store, Kind::Step, 1, LEASE);
    // Postgres plans a prepared statement for the last time at its sixth run.
    for _ in 0..30 {
        next_space(&store, &mut claims).await;
    }
    for n in 0..20 {
        // The first ten wait for their next try.
        wait(&world, &format!("s{n:02}"), 1000, if n < 10 { -3600 } else { 0 }).await;
    }
    for _ in 0..20 {
        let space = next_space(&store, &mut claims).await;
        assert!(space.starts_with("few") || space.as_str() >= "s10", "{space} is delayed");
    }
    claims.stop();
    let read = "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'jobs'";
    let rows = count_of(&world, store, read).await;
    assert!(rows < 5000, "50 claims read {rows} rows of 20,000");
}

#[tokio::test]
async fn claims_in_turn_look_at_no_finished_jobs_that_somebody_still_sees() {
    let world = World::new().await;
    for space in ["a", "b"] {
        wait(&world, space, 10_000, 300).await;
    }
    let store = of_runtime(&world).await;
    let mut sees = world.database.pool.begin().await.unwrap();
    sqlx::query("set transaction isolation level repeatable read").execute(&mut *sees).await.unwrap();
    sqlx::query("select count(*) from jobs").execute(&mut *sees).await.unwrap();
    world.run_sql("delete from jobs").await;
    for space in ["a", "b"] {
        wait(&world, space, 100, if space == "a" { 1 } else { 0 }).await;
    }
    let mut claims = Claims::start(&store, Kind::Step, 1, LEASE);
    let mut taken = 0;
    for _ in 0..30 {
        taken += u32::from(next_space(&store, &mut claims).await == "b");
    }
    claims.stop();
    assert!(taken >= 5, "the spaces took turns");
    // Entries whose rows were looked at. Those outside of the claim's reach are passed in the index, and not counted.
    let read = "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'jobs_unclaimed_by_space'";
    let entries = count_of(&world, store, read).await;
    assert!(
        (1..2000).contains(&entries),
        "they looked at the rows of {entries} entries of 20,000 finished jobs"
    );
    sees.rollback().await.unwrap();
}
