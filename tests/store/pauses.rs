//! Pauses on the jobs' rows: what holds a job, what lets it go, and what counts meanwhile.

use super::*;
use wakeful_store::gate::SetBack;
use wakeful_workflow::pause::{self, Subject};

fn subject(kind: pause::Kind, name: &str) -> Subject {
    Subject::named(kind, Some(name), "default").unwrap()
}

#[tokio::test]
async fn two_pauses_that_end_at_a_rate_let_a_job_go_once_each() {
    let world = World::new().await;
    let pauses = [subject(pause::Kind::Agent, "default"), subject(pause::Kind::Trigger, "chat")];
    for pause in &pauses {
        world.store.pause(pause, "a fix", None, Some(1.0)).await.unwrap();
    }
    // Each of them holds other jobs too, so both are there for as long as the test.
    let others = "insert into jobs
            (kind, runner, space_id, conversation_id, session_id, step_number, run_at, held_by, held_since)
        select 'step', 'elsewhere', 'default', 'default/x', pause_id || n, 1, clock_timestamp() + interval '1 hour',
            pause_id, clock_timestamp() + interval '1 hour'
        from pauses, generate_series(1, 5) as n";
    sqlx::raw_sql(others).execute(&world.database.pool).await.unwrap();
    let session_id = world.wake("c1", "Hello.").await;
    for (pause, freed) in pauses.iter().zip([1, 2]) {
        let driver = world.drive(&session_id).await;
        assert!(!world.store.hold(&driver.job.lease, pause, LEASE).await.unwrap());
        world.store.resume(pause, None).await.unwrap();
        // A second passes.
        let second = "update pauses set tended_at = clock_timestamp() - interval '1.1 seconds'";
        sqlx::raw_sql(second).execute(&world.database.pool).await.unwrap();
        assert_eq!(world.store.tend_pauses().await.unwrap(), freed);
    }
    let mut passes = world.drive(&session_id).await.job.pause_passes.clone();
    let known = world.store.pauses().await.unwrap();
    assert!(known.iter().all(|pause| pause.waiting > 0 && pause.resuming_since.is_some()), "{known:?}");
    let mut numbers: Vec<i64> = known.iter().map(|pause| pause.number).collect();
    passes.sort_unstable();
    numbers.sort_unstable();
    assert_eq!(passes, numbers, "neither holds it again");
}

#[tokio::test]
async fn looks_that_come_often_let_as_many_jobs_go_as_the_rate_says() {
    for (rate, looks, least) in [(3.0, 6, 9), (1.9, 20, 19), (5000.0, 1, 1000)] {
        let world = World::new().await;
        let agent = subject(pause::Kind::Agent, "default");
        world.store.pause(&agent, "a fix", None, Some(rate)).await.unwrap();
        let held = "insert into jobs
                (kind, runner, space_id, conversation_id, session_id, step_number, run_at, held_by, held_since)
            select 'step', 'elsewhere', 'default', 'default/x', 's' || n, 1, clock_timestamp() + interval '1 hour',
                'agent:default', clock_timestamp()
            from generate_series(1, 3000) as n";
        sqlx::raw_sql(held).execute(&world.database.pool).await.unwrap();
        let began = std::time::Instant::now();
        world.store.resume(&agent, None).await.unwrap();
        let mut freed = 0;
        for _ in 0..looks {
            // Half a second passes.
            world.run_sql("update pauses set tended_at = tended_at - interval '0.5 seconds'").await;
            freed += world.store.tend_pauses().await.unwrap();
        }
        let most = rate * (f64::from(looks) * 0.5 + began.elapsed().as_secs_f64());
        assert!(freed >= least && freed as f64 <= most, "{rate} a second: {freed}, at most {most}");
    }
}

#[tokio::test]
async fn a_pause_does_not_hold_a_job_that_was_claimed_and_leaves_its_back_off_alone() {
    let world = World::new().await;
    let agent = subject(pause::Kind::Agent, "default");
    world.store.pause(&agent, "a fix", None, None).await.unwrap();
    let session_id = world.wake("c1", "Hello.").await;
    let driver = world.drive(&session_id).await;
    assert!(!world.store.hold(&driver.job.lease, &agent, Duration::ZERO).await.unwrap());
    // It looks by itself, and what holds it up is a fault.
    let driver = world.drive(&session_id).await;
    let held = "select count(*) from jobs where held_by is not null";
    assert_eq!(world.one(held).await, 0);
    assert_eq!(
        world.one("select count(*) from jobs where held_since is not null").await,
        1,
        "its place in line"
    );
    let hour = Duration::from_secs(3600);
    world.store.retry_later(&driver.job.lease, hour, "the model is busy").await.unwrap();
    world.store.resume(&agent, None).await.unwrap();
    assert_eq!(world.store.tend_pauses().await.unwrap(), 0);
    assert!(world.store.pauses().await.unwrap().is_empty(), "it holds nothing");
    let backs_off = "select count(*) from jobs where run_at > clock_timestamp() + interval '30 minutes'";
    assert_eq!(world.one(backs_off).await, 1);
}

#[tokio::test]
async fn a_wait_for_a_pause_or_a_gate_ends_the_count_of_the_databases_faults() {
    for at_gate in [false, true] {
        let world = World::new().await;
        let session_id = world.wake("c1", "Hello.").await;
        let fault = async |driver: &Driver<'_>| {
            world.store.note_fault(&driver.job.lease, "the index is broken").await.unwrap().unwrap().times
        };
        let driver = world.drive(&session_id).await;
        assert_eq!(fault(&driver).await, 1);
        world.store.retry_later(&driver.job.lease, Duration::ZERO, "the index is broken").await.unwrap();
        let driver = world.drive(&session_id).await;
        assert_eq!(fault(&driver).await, 2, "a back-off is not such a wait");
        let lease = &driver.job.lease;
        if at_gate {
            let shut = "insert into provider_gates (gate_id, provider, phase, since, probe_at)
                values ('openai', 'openai', 'shut', clock_timestamp(), clock_timestamp())";
            sqlx::raw_sql(shut).execute(&world.database.pool).await.unwrap();
            let back = SetBack {
                error: "the provider is down",
                gate: Some(("openai", Duration::ZERO)),
                delay: Duration::ZERO,
                failed: None,
                outage: true,
            };
            assert!(!world.store.set_back(lease, &back).await.unwrap());
        } else {
            let agent = subject(pause::Kind::Agent, "default");
            world.store.pause(&agent, "a fix", None, None).await.unwrap();
            assert!(!world.store.hold(lease, &agent, Duration::ZERO).await.unwrap());
        }
        let driver = world.drive(&session_id).await;
        assert_eq!(fault(&driver).await, 1, "at a gate: {at_gate}");
    }
}

#[tokio::test]
async fn what_held_a_step_up_is_no_part_of_its_providers_outage() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello.").await;
    let back = SetBack {
        error: "the provider is down",
        gate: None,
        delay: Duration::ZERO,
        failed: None,
        outage: true,
    };
    let driver = world.drive(&session_id).await;
    assert!(!world.store.set_back(&driver.job.lease, &back).await.unwrap());
    let lasted = |driver: &Driver<'_>| driver.job.outage.lasted.unwrap();
    let hour = Duration::from_secs(3600);

    // No worker was there for hours.
    let hours = "update jobs set run_at = run_at - interval '9 hours', outage_since = outage_since - interval '9 hours'";
    world.run_sql(hours).await;
    let driver = world.drive(&session_id).await;
    assert!(lasted(&driver) < hour, "{:?}", lasted(&driver));

    // It was held for hours.
    let agent = subject(pause::Kind::Agent, "default");
    world.store.pause(&agent, "a fix", None, None).await.unwrap();
    assert!(!world.store.hold(&driver.job.lease, &agent, LEASE).await.unwrap());
    let hours = "update jobs set held_since = held_since - interval '9 hours', outage_since = outage_since - interval '9 hours'";
    world.run_sql(hours).await;
    world.store.resume(&agent, None).await.unwrap();
    assert_eq!(world.store.tend_pauses().await.unwrap(), 1);
    let driver = world.drive(&session_id).await;
    assert!(lasted(&driver) < hour, "{:?}", lasted(&driver));
}
