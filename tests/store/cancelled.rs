//! Cancelled runs: a status of their own, also for those that older versions wrote as failed.

use super::bundle::{export, import};
use super::world::*;
use std::time::Duration;
use wakeful_store::Error;
use wakeful_store::step::{Commit, GivenUp};
use wakeful_workflow::advance::Performed;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::notify::{Kind, Rule};
use wakeful_workflow::plan::Stop;
use wakeful_workflow::session::SessionStatus;

/// What the version before wrote for a cancelled run.
const AS_BEFORE: &str = r#"
    begin;
    set local session_replication_role = replica;
    update session_events set payload = jsonb_set(payload, '{to_state}', '"failed"')
    where type = 'state_transition' and payload ->> 'to_state' = 'cancelled';
    update session_events set payload = jsonb_set(payload, '{status}', '"failed"')
    where type = 'invocation_result' and payload ->> 'status' = 'cancelled';
    update session_events set payload = jsonb_set(payload, '{lifecycle_state}', '"failed"')
    where type = 'checkpoint' and payload ->> 'lifecycle_state' = 'cancelled';
    update session_runs set status = 'failed' where status = 'cancelled';
    update conversation_sessions set status = 'failed' where status = 'cancelled';
    commit"#;
const MIGRATION: &str = include_str!("../../migrations/20261124040000_cancelled.sql");

async fn ended(world: &World, conversation: &str, stop: Stop) -> String {
    let session_id = world.wake(conversation, "Hello.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    if stop == Stop::Cancelled {
        world.store.cancel(&session_id, Some("the guest left")).await.unwrap();
        world.store.refresh(&mut driver.session).await.unwrap();
    }
    assert_eq!(driver.commit(Performed::Stopped(stop)).await, Commit::Closed { opened: false });
    session_id
}

async fn agrees(world: &World, session_id: &str) {
    let verification = world.store.verify(session_id).await.unwrap();
    let differ: Vec<_> = verification.checks.iter().filter(|check| !check.agrees).collect();
    assert!(verification.agrees, "{differ:#?}");
}

#[tokio::test]
async fn a_cancelled_run_is_cancelled_in_every_row_and_never_retried() {
    let world = World::new().await;
    let session_id = ended(&world, "c1", Stop::Cancelled).await;
    assert_eq!(world.status(&session_id).await, "cancelled");
    assert_eq!(world.one("select count(*) from session_runs where status = 'cancelled'").await, 1);
    agrees(&world, &session_id).await;
    let refused = world.store.retry(&session_id, None).await;
    assert!(matches!(refused, Err(Error::Conflict { status: SessionStatus::Cancelled, .. })), "{refused:?}");
    // Its bundle says the same, and a message goes on with the session.
    let copy = import(&World::new().await.store, &export(&world.store, &session_id).await).await;
    assert!(copy.starts_with("sess_"));
    world.send(&session_id, "And yet.").await;
    assert_eq!(world.status(&session_id).await, "queued");
}

#[tokio::test]
async fn a_cancel_counts_although_the_database_ends_the_run() {
    for status in [SessionStatus::NeedsAttention, SessionStatus::Failed] {
        let world = World::new().await;
        for (conversation, goes_on) in [("c1", false), ("c2", true)] {
            let session_id = world.wake(conversation, "Hello.").await;
            let mut driver = world.drive(&session_id).await;
            driver.continues(Performed::Begun).await;
            world.store.cancel(&session_id, Some("the guest left")).await.unwrap();
            if goes_on {
                world.send(&session_id, "And yet.").await;
            }
            let lease = &driver.job.lease;
            let given_up =
                world.store.give_up(lease, &session_id, status, "the index is broken").await.unwrap();
            // An operator had asked for it.
            assert_eq!(given_up, GivenUp::Ended(SessionStatus::Cancelled));
            let now = if goes_on { "queued" } else { "cancelled" };
            assert_eq!(world.status(&session_id).await, now, "{status:?}");
            agrees(&world, &session_id).await;
        }
        assert_eq!(world.one("select count(*) from session_runs where status = 'cancelled'").await, 2);
        assert_eq!(world.one("select count(*) from run_failures").await, 0, "a cancel is not a failure");
        assert_eq!(world.one("select count(*) from jobs").await, 1);
    }
}

#[tokio::test]
async fn a_run_that_the_database_ends_is_told_under_its_own_cause_and_not_under_an_earlier_one() {
    let world = World::new().await;
    let session_id = ended(&world, "c1", Stop::Failed(Fault::WorkerDied { attempts: 5, during: None })).await;
    world.store.retry(&session_id, None).await.unwrap();
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let lease = &driver.job.lease;
    let failed = SessionStatus::Failed;
    let given_up = world.store.give_up(lease, &session_id, failed, "the index is broken").await.unwrap();
    assert_eq!(given_up, GivenUp::Ended(failed));
    let rule = Rule {
        name: "ops".to_owned(),
        when: vec![Kind::Failed],
        agents: None,
        spaces: None,
        window: Duration::ZERO,
        quiet: Duration::from_secs(60),
        per_hour: 20,
    };
    let followed = world.store.follow_transitions(&[rule], Duration::from_secs(60)).await.unwrap();
    assert_eq!(followed.messages, 2, "each cause is told");
    let own =
        "select count(*) from notification_groups where count = 1 and label like '%the index is broken%'";
    assert_eq!(world.one(own).await, 1);
}

#[tokio::test]
async fn what_an_older_version_cancelled_is_cancelled_after_the_migration_and_in_an_import() {
    let world = World::new().await;
    let cancelled = ended(&world, "c1", Stop::Cancelled).await;
    let failed = ended(&world, "c2", Stop::Failed(Fault::WorkerDied { attempts: 5, during: None })).await;
    sqlx::raw_sql(AS_BEFORE).execute(&world.database.pool).await.unwrap();
    for id in [&cancelled, &failed] {
        assert_eq!(world.status(id).await, "failed");
        agrees(&world, id).await;
    }

    let elsewhere = World::new().await;
    for (id, status) in [(&cancelled, "cancelled"), (&failed, "failed")] {
        let copy = import(&elsewhere.store, &export(&world.store, id).await).await;
        assert_eq!(elsewhere.status(&copy).await, status);
    }
    assert_eq!(elsewhere.one("select count(*) from session_runs where status = 'cancelled'").await, 1);

    sqlx::raw_sql(MIGRATION).execute(&world.database.pool).await.unwrap();
    for (id, status) in [(&cancelled, "cancelled"), (&failed, "failed")] {
        assert_eq!(world.status(id).await, status);
        agrees(&world, id).await;
    }
    assert_eq!(world.one("select count(*) from session_runs where status = 'cancelled'").await, 1);
    assert_eq!(world.journal(&cancelled).await.last().map(String::as_str), Some("state_transition"));
}

#[tokio::test]
async fn a_cancel_during_a_claim_that_ends_with_a_fault_does_not_wait_for_the_next_attempt() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello.").await;
    let driver = world.drive(&session_id).await;
    world.store.cancel(&session_id, Some("the guest left")).await.unwrap();
    let hour = Duration::from_secs(3600);
    world.store.retry_later(&driver.job.lease, hour, "the model is busy").await.unwrap();
    let soon = "select count(*) from jobs where run_at <= clock_timestamp() + interval '1 second'";
    assert_eq!(world.one(soon).await, 1);
}
