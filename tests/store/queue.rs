//! The queue and its deliveries: one claim, one lease, one sending.

use super::full::FullPool;
use super::*;
use tokio_util::sync::CancellationToken;
use wakeful_store::delivery::DeliveryLimits;
use wakeful_store::encryption::Settings;
use wakeful_store::queue::{Holdings, Liveness, News, Notifier};

#[tokio::test]
async fn what_is_enqueued_while_the_deliver_job_ends_is_sent() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob, twice.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_1").await;

    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, LEASE);
    let job = claims.next().await;
    let seen = world.store.enqueued_deliveries(&job.lease).await.unwrap().unwrap();
    world.deliver(&job).await;
    let none = world.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS).await.unwrap();
    assert!(none.is_none(), "the look finds nothing more");

    // A delivery is enqueued after the last look and before the end of the job. The job does not end, and its
    // holder keeps the lease.
    driver.sends_mail("call_2").await;
    assert!(!world.store.end_deliver_job(&job.lease, seen).await.unwrap());
    let seen = world.store.enqueued_deliveries(&job.lease).await.unwrap().expect("the lease is untouched");
    world.deliver(&job).await;

    // A delivery is enqueued after the end of the job. It gets a new job.
    assert!(world.store.end_deliver_job(&job.lease, seen).await.unwrap());
    driver.sends_mail("call_3").await;
    drop(job);
    let job = claims.next().await;
    world.deliver(&job).await;
    assert_eq!(world.one("select count(*) from deliveries where status = 'sent'").await, 3);
    claims.stop();
}

#[tokio::test]
async fn a_deliverer_without_its_lease_claims_and_settles_nothing() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_1").await;
    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, LEASE);
    let job = claims.next().await;
    let token = world.steal(job.lease.job_id).await;
    let before = world.dump().await;
    assert!(world.store.enqueued_deliveries(&job.lease).await.unwrap().is_none());
    let claimed = world.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS).await.unwrap();
    assert!(claimed.is_none());
    assert!(!world.store.end_deliver_job(&job.lease, 1).await.unwrap());
    assert_eq!(world.dump().await, before);

    world.give_back(job.lease.job_id, token).await;
    let claimed =
        world.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS).await.unwrap().unwrap();
    world.steal(job.lease.job_id).await;
    let before = world.dump().await;
    let sent = Settled::Sent { receipt: json!({}) };
    assert!(!world.store.settle_delivery(&job.lease, &claimed, "email", &sent).await.unwrap());
    assert_eq!(world.dump().await, before);
    claims.stop();
}

#[tokio::test]
async fn a_delivery_that_meets_an_uncommitted_claim_is_not_sent() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_1").await;
    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, LEASE);
    let job = claims.next().await;
    claims.stop();
    let (job_id, token) = (job.lease.job_id, job.lease.token);
    let claim = || world.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS);
    assert!(world.claim_during(job_id, claim()).await.unwrap().is_none());
    assert_eq!(world.one("select count(*) from deliveries where status = 'queued'").await, 1);

    world.give_back(job_id, token).await;
    let claimed = claim().await.unwrap().expect("the lease is held");
    let again = world.store.send_again(&job.lease, &claimed.delivery_id, Duration::from_secs(1));
    assert!(!world.claim_during(job_id, again).await.unwrap());
    world.give_back(job_id, token).await;
    let sent = Settled::Sent { receipt: json!({}) };
    let settled = world.store.settle_delivery(&job.lease, &claimed, "email", &sent);
    assert!(!world.claim_during(job_id, settled).await.unwrap());
    assert_eq!(world.one("select count(*) from deliveries where status = 'sending'").await, 1);
}

#[tokio::test]
async fn a_claim_that_is_taken_back_leaves_an_earlier_attempt_in_doubt() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_1").await;
    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, LEASE);
    let job = claims.next().await;
    claims.stop();
    let conversation_id = job.conversation_id.clone();
    for in_doubt in [false, true] {
        let claim = || world.store.claim_delivery(&job.lease, &conversation_id, "email", TERMS);
        if in_doubt {
            // Another worker began it, and was gone.
            claim().await.unwrap().unwrap();
            world.run_sql("update deliveries set sending_at = sending_at - interval '1 second'").await;
        }
        assert_eq!(claim().await.unwrap().unwrap().maybe_sent, in_doubt);
        let (no_delay, error) = (Duration::ZERO, "no answer");
        let back = world.store.unclaim_delivery(&job.lease, &conversation_id, "email", no_delay, error);
        back.await.unwrap();
        let sending = world.one("select count(*) from deliveries where status = 'sending'").await;
        assert_eq!(sending, i64::from(in_doubt));
        assert!(claim().await.unwrap().is_none(), "the lease is given back");
        world.give_back(job.lease.job_id, job.lease.token).await;
    }
}

/// Workers may have leases of different lengths, as in a rolling change of the configuration.
#[tokio::test]
async fn an_attempt_is_over_when_its_own_worker_says_so_and_not_by_the_limit_of_another() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_1").await;
    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, LEASE);
    let job = claims.next().await;
    claims.stop();
    let long = DeliveryLimits { attempt_limit: Duration::from_secs(120), ..TERMS };
    let claim = |terms| world.store.claim_delivery(&job.lease, &job.conversation_id, "email", terms);
    claim(long).await.unwrap().unwrap();
    world
        .run_sql(
            "update deliveries set sending_at = sending_at - interval '90 s', settled_by = settled_by - interval '90 s'",
        )
        .await;
    assert!(!claim(TERMS).await.unwrap().unwrap().quiet, "the first worker may still send it");
    world.run_sql("update deliveries set settled_by = settled_by - interval '31 s'").await;
    assert!(claim(TERMS).await.unwrap().unwrap().quiet);
}

#[tokio::test]
async fn a_suspect_is_claimed_at_once_though_queues_of_both_kinds_look() {
    let world = World::new().await;
    // They look when they hear of work, and then not for an hour.
    let poll = Duration::from_secs(3600);
    let deliveries = Claims::start_with_poll(&world.store, Kind::Deliver, 1, LEASE, poll);
    let mut steps = deliveries.beside(&world.store, Kind::Step, LEASE, poll);
    let notifier = Notifier::start(world.store.clone(), &steps.news);
    // The first ones may be found because the process begins to listen.
    for _ in 0..5 {
        world
            .run_sql(
                "insert into jobs (kind, space_id, conversation_id, session_id, step_number, stuck, lease)
                values ('step', 'default', 'default/c1', 'sess_1', 1, 2, nextval('leases'))",
            )
            .await;
        notifier.any_job();
        assert_eq!(steps.next().await.stuck, 3);
        world.run_sql("delete from jobs").await;
    }
    deliveries.stop();
}

#[tokio::test]
async fn the_next_suspect_is_claimed_as_soon_as_the_one_before_is_gone() {
    let world = World::new().await;
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number, stuck, lease)
            select 'step', 'default', 'default/c' || n, 'sess_' || n, 1, 2, nextval('leases')
            from generate_series(1, 3) as n",
        )
        .await;
    // They look once, and then not for an hour.
    let poll = Duration::from_secs(3600);
    let mut steps = Claims::start_with_poll(&world.store, Kind::Step, 1, LEASE, poll);
    for _ in 0..2 {
        let suspect = steps.next().await;
        world.store.end_job(&suspect.lease).await.unwrap();
    }
    let last = steps.next().await;
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, channel, stuck, lease)
            values ('deliver', 'default', 'default/c1', 'email', 2, nextval('leases'))",
        )
        .await;
    let mut deliveries = steps.beside(&world.store, Kind::Deliver, LEASE, poll);
    let notifier = Notifier::start(world.store.clone(), &steps.news);
    eventually("it rests, because the process has a suspect", async || notifier.offer(Kind::Deliver)).await;
    drop(last);
    assert_eq!(deliveries.next().await.stuck, 3);
    steps.stop();
}

#[tokio::test]
async fn eight_claimers_at_once_never_get_one_job_twice() {
    const JOBS: i64 = 400;
    let world = World::new().await;
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number)
            select 'step', 'default', 'default/c' || n, 'sess_' || n, 1 from generate_series(1, 400) as n",
        )
        .await;
    let taken = Arc::new(std::sync::Mutex::new(Vec::new()));
    let claimers = (0..8).map(|_| {
        let (store, taken) = (world.store.clone(), Arc::clone(&taken));
        tokio::spawn(async move {
            let mut claims = Claims::start(&store, Kind::Step, 4, LEASE);
            while taken.lock().unwrap().len() < JOBS as usize {
                let Ok(job) = tokio::time::timeout(Duration::from_millis(100), claims.next()).await else {
                    continue;
                };
                taken.lock().unwrap().push(job.lease.job_id);
                // Half of the jobs are never ended. Their leases still hold, so no other claimer may get
                // them.
                if job.lease.job_id % 2 == 0 {
                    store.end_job(&job.lease).await.unwrap();
                }
            }
            claims.stop();
        })
    });
    for claimer in join_all(claimers).await {
        claimer.unwrap();
    }
    let taken = taken.lock().unwrap();
    let jobs: HashSet<&i64> = taken.iter().collect();
    assert_eq!((taken.len(), jobs.len()), (JOBS as usize, JOBS as usize));
}

#[tokio::test]
async fn a_claim_that_was_planned_for_an_empty_queue_does_not_walk_through_a_full_one() {
    let world = World::new().await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let scans = "select coalesce(seq_scan + idx_scan, 0) from pg_stat_user_tables where relname = 'jobs'";
    // Postgres plans a prepared statement for the last time at its sixth run.
    eventually("claims of nothing", || async { (world.one(scans).await > 20).then_some(()) }).await;
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number)
            select 'step', 'default', 'default/c' || n, 'sess_' || n, 1 from generate_series(1, 20000) as n",
        )
        .await;
    for _ in 0..5 {
        let job = claims.next().await;
        world.store.end_job(&job.lease).await.unwrap();
    }
    let ended = "select n_tup_del from pg_stat_user_tables where relname = 'jobs'";
    eventually("the claims to be counted", || async { (world.one(ended).await >= 5).then_some(()) }).await;
    let read = "select seq_tup_read from pg_stat_user_tables where relname = 'jobs'";
    assert_eq!(world.one(read).await, 0, "rows that claims walked through");
    claims.stop();
}

#[tokio::test]
async fn workers_are_told_of_a_step_that_was_left_and_is_cancelled_while_another_look_leaves_it_again() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let job = claims.next().await;
    claims.stop();
    let mut told = sqlx::postgres::PgListener::connect(&world.database.url).await.unwrap();
    told.listen("wakeful_jobs").await.unwrap();
    let mut next = async || {
        let told = tokio::time::timeout(crate::support::timeout(), told.recv()).await;
        told.expect("workers are told").unwrap().payload().to_owned()
    };
    world.store.leave(&job.lease, "lacking", Duration::from_secs(300)).await.unwrap();
    assert_eq!(next().await, "left");
    // Five minutes later the same worker looks again. The cancel finds no job that waits.
    let claim = "update jobs set lease = $1";
    sqlx::query(claim).bind(job.lease.token).execute(&world.database.pool).await.unwrap();
    world.store.cancel(&session_id, None).await.unwrap();
    world.store.leave(&job.lease, "lacking", Duration::from_secs(300)).await.unwrap();
    assert_eq!(next().await, "step:");
}

#[tokio::test]
async fn a_step_that_goes_on_forgets_since_when_it_was_held() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    // A look claimed it, and found that nothing holds it any more.
    world.run_sql("update jobs set held_since = clock_timestamp() - interval '1 hour'").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.continues(replied(vec![asks(&call("call_1", "reserve"))])).await;
    assert_eq!(world.one("select count(*) from jobs where held_since is not null").await, 0);
}

const FINISHED: i64 = 20_000;

/// Finishes jobs that a transaction still sees, so that their entries stay in the indexes.
async fn finish_jobs_that_are_seen(world: &World) -> sqlx::Transaction<'static, sqlx::Postgres> {
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at, lease, liveness_lock)
            select 'step', 'default', 'default/c' || n, 'sess_' || n, 1,
                clock_timestamp() - make_interval(secs => 60 + n), nextval('leases'), 7
            from generate_series(1, 20000) as n",
        )
        .await;
    let mut sees = world.database.pool.begin().await.unwrap();
    sqlx::query("set transaction isolation level repeatable read").execute(&mut *sees).await.unwrap();
    sqlx::query("select count(*) from jobs").execute(&mut *sees).await.unwrap();
    world.run_sql("delete from jobs").await;
    sees
}

#[tokio::test]
async fn claims_walk_through_finished_jobs_that_somebody_still_sees_only_now_and_then() {
    let world = World::new().await;
    let sees = finish_jobs_that_are_seen(&world).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let scans = "select idx_scan from pg_stat_user_indexes where indexrelname = 'jobs_ready'";
    eventually("many claims", || async { (world.one(scans).await > 60).then_some(()) }).await;
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number)
            select 'step', 'default', 'default/c' || n, 'sess_' || n, 1 from generate_series(1, 20) as n",
        )
        .await;
    for _ in 0..20 {
        let job = claims.next().await;
        world.store.end_job(&job.lease).await.unwrap();
    }
    claims.stop();
    let read = "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'jobs_ready'";
    let (claimed, read) = (world.one(scans).await, world.one(read).await);
    // On a busy machine the claims are few, and more of them look all the way back.
    assert!(read < FINISHED * claimed / 4, "{read} entries read by {claimed} claims");
    sees.rollback().await.unwrap();
}

#[tokio::test]
async fn a_full_process_that_asks_whether_others_wait_reads_no_finished_jobs_that_somebody_still_sees() {
    let world = World::new().await;
    let sees = finish_jobs_that_are_seen(&world).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    world.wake("c1", "Hello").await;
    let job = claims.next().await;
    claims.stop();
    let scans = "select idx_scan from pg_stat_user_indexes where indexrelname = 'jobs_ready'";
    let read = "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'jobs_ready'";
    let (scanned, before) = (world.one(scans).await, world.one(read).await);
    for _ in 0..20 {
        assert!(!world.store.others_wait(&job).await.unwrap());
    }
    eventually("the looks are counted", async || (world.one(scans).await >= scanned + 20).then_some(()))
        .await;
    // The claims before may have looked all the way back a few times, and are counted late.
    let read = world.one(read).await - before;
    assert!(read < FINISHED * 10, "{read} entries read");

    // A job that may have killed its workers takes no slot, so no other one makes room for it.
    world.wake("c2", "Hello").await;
    assert!(world.store.others_wait(&job).await.unwrap());
    world
        .run_sql("update jobs set stuck = 2, lease = 7, run_at = clock_timestamp() where lease is null")
        .await;
    assert!(!world.store.others_wait(&job).await.unwrap());
    sees.rollback().await.unwrap();
}

/// Claims a job that comes in as if its transaction had taken a minute to commit.
async fn claims_a_late_job(world: &World, claims: &mut Claims) {
    world
        .run_sql(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at)
            values ('step', 'default', 'default/c', 'sess_late', 1, clock_timestamp() - interval '1 minute')",
        )
        .await;
    assert_eq!(claims.next().await.session_id.as_deref(), Some("sess_late"));
}

#[tokio::test]
async fn a_job_that_became_ready_long_ago_is_claimed_although_later_ones_were_claimed_before() {
    let world = World::new().await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    let scans = "select idx_scan from pg_stat_user_indexes where indexrelname = 'jobs_ready'";
    eventually("claims of nothing", || async { (world.one(scans).await > 5).then_some(()) }).await;
    claims_a_late_job(&world, &mut claims).await;
    claims.stop();
}

#[tokio::test]
async fn looks_for_dead_workers_read_no_finished_jobs_that_somebody_still_sees() {
    let world = World::new().await;
    let sees = finish_jobs_that_are_seen(&world).await;
    let stop = CancellationToken::new();
    let news = News::listen(&world.store, stop.clone());
    let liveness = Liveness {
        store: world.store.clone(),
        holdings: Arc::new(Holdings::default()),
        notifier: Notifier::start(world.store.clone(), &news),
    };
    let looks = tokio::spawn(liveness.run(stop.clone()));
    let scans = "select idx_scan from pg_stat_user_indexes where indexrelname = 'jobs_by_liveness_lock'";
    eventually("looks", || async { (world.one(scans).await >= 3).then_some(()) }).await;
    let read = "select sum(idx_tup_read)::bigint from pg_stat_user_indexes where relname = 'jobs'";
    let read = world.one(read).await;
    assert!(read < FINISHED, "{read} entries read");
    stop.cancel();
    looks.await.unwrap();
    sees.rollback().await.unwrap();
}

#[tokio::test]
async fn a_claim_that_waited_for_a_connection_counts_not_as_a_slow_look() {
    let world = World::new().await;
    let full = FullPool::of(&world).await;
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    // For so long the process has no connection for its claim. Fifty times as much is more than a test waits.
    tokio::time::sleep(Duration::from_millis(3500)).await;
    full.end(&world).await;
    // A look that goes all the way back and is slow makes the next one late: fifty times as long as it took.
    claims_a_late_job(&world, &mut claims).await;
    claims.stop();
}

#[tokio::test]
async fn the_heartbeat_knows_the_leases_of_a_claim_while_the_keys_of_its_jobs_are_awaited() {
    let world = World::new().await;
    let keys = crate::support::Database::without_schema().await;
    let settings = || Settings { keys: keys.url.clone(), agents: None, master: [7; 32], old_master: None };
    world.store.encrypt(settings()).unwrap();
    for conversation in ["c1", "c2", "c3"] {
        world.wake(conversation, "Her secret.").await;
    }
    let mut claims = Claims::start(&world.store, Kind::Step, 3, LEASE);
    let jobs = [claims.next().await, claims.next().await, claims.next().await];
    claims.stop();
    for job in &jobs {
        let hour = Duration::from_secs(3600);
        world.store.retry_later(&job.lease, hour, "the provider answered 500").await.unwrap();
    }
    drop(jobs);

    // Another process has no key yet, and the database of the keys does not answer.
    let other = world.database.store().await;
    other.encrypt(settings()).unwrap();
    let mut hangs = keys.pool.begin().await.unwrap();
    sqlx::query("lock table wakeful_data_keys in access exclusive mode").execute(&mut *hangs).await.unwrap();
    let claims = Claims::start(&other, Kind::Step, 3, LEASE);
    // One claim finds all of them.
    world.run_sql("update jobs set run_at = clock_timestamp()").await;
    eventually("a key is asked for", || async {
        let waits = "select exists (select from pg_locks where relation = 'wakeful_data_keys'::regclass and not granted)";
        sqlx::query_scalar::<_, bool>(waits).fetch_one(&keys.pool).await.unwrap().then_some(())
    })
    .await;
    assert_eq!(claims.holdings.len(), 3);
    hangs.rollback().await.unwrap();
    claims.stop();
}
