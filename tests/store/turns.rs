//! How spaces share the slots of a queue while more jobs wait than there are slots.

use super::*;
use crate::support::proxy::{CutAt, Proxy};

/// Jobs of a space. Those of a greater `age_s` have waited for longer.
async fn wait(world: &World, space: &str, jobs: u32, age_s: u32) {
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
async fn next_space(world: &World, claims: &mut Claims) -> String {
    let job = claims.next().await;
    world.store.end_job(&job.lease).await.unwrap();
    job.conversation_id.split('/').next().unwrap().to_owned()
}

#[tokio::test]
async fn a_space_that_sends_many_messages_keeps_no_other_waiting() {
    let world = World::new().await;
    wait(&world, "many", 1000, 60).await;
    wait(&world, "one", 1, 0).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let mut before = 0;
    while next_space(&world, &mut claims).await != "one" {
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
        *taken.entry(next_space(&world, &mut claims).await).or_default() += 1;
    }
    claims.stop();
    // Three of four claims go round the spaces. The others take the oldest job, which is of b.
    assert!(taken["a"] >= 12 && taken["c"] >= 12 && (30..=56).contains(&taken["b"]), "{taken:?}");
}

#[tokio::test]
async fn spaces_share_many_slots_that_become_free_together() {
    let world = World::new().await;
    wait(&world, "many", 1000, 60).await;
    wait(&world, "few", 60, 0).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 16, LEASE);
    let mut few = 0;
    for _ in 0..10 {
        // The slots of these become free together.
        let mut held = Vec::new();
        for _ in 0..16 {
            held.push(claims.next().await);
        }
        for job in held {
            few += u32::from(job.conversation_id.starts_with("few/"));
            world.store.end_job(&job.lease).await.unwrap();
        }
    }
    claims.stop();
    assert!(few >= 30, "{few} jobs of 160: three of four claims give each space half of the slots");
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

/// Claims as the runtime's role, under row-level security. The roles are made.
async fn as_runtime(world: &World) -> Claims {
    let url = world.database.as_role("wakeful_runtime");
    Claims::start(&Store::connect(&url, 4, "test").await.unwrap(), Kind::Step, 1, LEASE)
}

#[tokio::test]
async fn a_claim_in_turn_that_was_planned_for_few_jobs_does_not_walk_through_many() {
    let world = World::new().await;
    wait(&world, "few1", 20, 200).await;
    wait(&world, "few2", 20, 100).await;
    world.database.with_roles().await;
    let mut claims = as_runtime(&world).await;
    // Postgres plans a prepared statement for the last time at its sixth run.
    for _ in 0..30 {
        next_space(&world, &mut claims).await;
    }
    let read = "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'jobs'";
    let ended = "select n_tup_del from pg_stat_user_tables where relname = 'jobs'";
    eventually("the claims to be counted", || async { (world.one(ended).await >= 30).then_some(()) }).await;
    for n in 0..20 {
        wait(&world, &format!("s{n:02}"), 1000, 0).await;
    }
    // These wait for their next try.
    let delayed = "update jobs set run_at = clock_timestamp() + interval '1 hour' where space_id < 's10'";
    sqlx::query(delayed).execute(&world.database.pool).await.unwrap();
    let before = world.one(read).await;
    for _ in 0..20 {
        let space = next_space(&world, &mut claims).await;
        assert!(space.starts_with("few") || space.as_str() >= "s10", "{space} is delayed");
    }
    claims.stop();
    eventually("the claims to be counted", || async { (world.one(ended).await >= 50).then_some(()) }).await;
    let rows = world.one(read).await - before;
    assert!(rows < 2000, "20 claims read {rows} rows of 20,000");
}

#[tokio::test]
async fn claims_in_turn_walk_through_no_finished_jobs_that_somebody_still_sees() {
    let world = World::new().await;
    for space in ["a", "b"] {
        wait(&world, space, 10_000, 300).await;
    }
    // It takes locks that the transaction below would keep from it.
    world.database.with_roles().await;
    let mut sees = world.database.pool.begin().await.unwrap();
    sqlx::query("set transaction isolation level repeatable read").execute(&mut *sees).await.unwrap();
    sqlx::query("select count(*) from jobs").execute(&mut *sees).await.unwrap();
    world.run_sql("delete from jobs").await;
    for space in ["a", "b"] {
        wait(&world, space, 20, 0).await;
    }
    let read = "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'jobs_unclaimed_by_space'";
    let before = world.one(read).await;
    let mut claims = as_runtime(&world).await;
    let mut taken = 0;
    for _ in 0..30 {
        taken += u32::from(next_space(&world, &mut claims).await == "b");
    }
    claims.stop();
    assert!(taken >= 5, "the spaces took turns");
    let scans = "select idx_scan from pg_stat_user_indexes where indexrelname = 'jobs_unclaimed_by_space'";
    eventually("the claims to be counted", || async { (world.one(scans).await >= 20).then_some(()) }).await;
    let entries = world.one(read).await - before;
    assert!(entries < 2000, "they read {entries} entries of 20,000 finished jobs");
    sees.rollback().await.unwrap();
}
