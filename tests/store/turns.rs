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
    // Three of four claims go round the spaces, and each fourth takes the oldest job, which is of b.
    assert!(taken["a"] >= 15 && taken["c"] >= 15 && taken["b"] >= 30, "{taken:?}");
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

#[tokio::test]
async fn a_claim_in_turn_that_was_planned_for_few_jobs_does_not_walk_through_many() {
    let world = World::new().await;
    wait(&world, "few1", 20, 200).await;
    wait(&world, "few2", 20, 100).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
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
    let before = world.one(read).await;
    for _ in 0..20 {
        next_space(&world, &mut claims).await;
    }
    claims.stop();
    eventually("the claims to be counted", || async { (world.one(ended).await >= 50).then_some(()) }).await;
    let rows = world.one(read).await - before;
    assert!(rows < 2000, "20 claims read {rows} rows of 20,000");
}
