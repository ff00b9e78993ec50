//! Calls that the commit of the reply starts.

use super::group::{commit_all, drivers};
use super::*;
use wakeful_store::ledger::{Started, new_nonce};
use wakeful_workflow::advance::{CallStart, Transition};

const TIMEOUT_S: u64 = 60;

/// The reply that asks for an idempotent call, and the right to run it if the commit starts it.
fn asking(driver: &Driver<'_>, starts: bool) -> (Transition, Vec<Started>) {
    let reserve = call("call_1", "reserve");
    let charge = call("call_2", "charge");
    let mut transition = driver.transition(replied(vec![asks(&reserve), asks(&charge)]));
    let mut started = Vec::new();
    if starts {
        transition.start_calls(|_| {
            let start = CallStart { nonce: new_nonce(), timeout_s: TIMEOUT_S };
            started.push(Started::by_commit(&start));
            Some(start)
        });
        assert_eq!(started.len(), 1, "a guarded call is never started like this");
    }
    (transition, started)
}

#[tokio::test]
async fn a_call_that_a_commit_starts_is_in_the_ledger_as_one_that_was_started_alone() {
    let mut dumps = Vec::new();
    for by_commit in [true, false] {
        let world = World::new().await;
        let mut driver = drivers(&world, 1).await.remove(0);
        let (transition, _) = asking(&driver, by_commit);
        assert!(matches!(driver.write(&transition).await, Commit::Continued { .. }));
        driver.session.apply(&transition);
        let id = driver.session.session_id.as_str().to_owned();
        assert_eq!(world.store.hydrate(&id).await.unwrap(), driver.session);
        if !by_commit {
            assert!(driver.start(&call("call_1", "reserve")).await.is_some());
        }
        let until = "select count(*) from tool_calls c join jobs j on j.session_id = c.session_id
            where c.status = 'started' and c.settled_by = j.run_at + interval '60 s'";
        assert_eq!(world.one(until).await, 1);
        dumps.push(comparable(world.dump().await));
    }
    assert_eq!(dumps[0], dumps[1]);
}

#[tokio::test]
async fn commits_that_start_calls_share_a_statement_with_commits_that_do_not() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 4).await;
    let transitions: Vec<Transition> =
        drivers.iter().enumerate().map(|(at, driver)| asking(driver, at % 2 == 0).0).collect();
    let commits: Vec<_> = drivers.iter().zip(&transitions).collect();
    for commit in commit_all(&world.store, &commits).await {
        assert!(matches!(commit, Ok(Commit::Continued { .. })), "{commit:?}");
    }
    for (driver, transition) in drivers.iter_mut().zip(&transitions) {
        driver.session.apply(transition);
        let id = driver.session.session_id.as_str();
        assert_eq!(world.store.hydrate(id).await.unwrap(), driver.session);
    }
    assert_eq!(world.one("select count(*) from tool_calls where status = 'started'").await, 2);
}

#[tokio::test]
async fn a_commit_under_a_lost_lease_starts_no_call() {
    let world = World::new().await;
    let driver = drivers(&world, 1).await.remove(0);
    let (transition, _) = asking(&driver, true);
    world.steal(driver.job.lease.job_id).await;
    assert_eq!(driver.write(&transition).await, Commit::Stale);
    assert_eq!(world.count("tool_calls").await, 0);
}

#[tokio::test]
async fn a_start_that_was_not_used_is_taken_back_by_its_owner_only() {
    let world = World::new().await;
    let driver = drivers(&world, 1).await.remove(0);
    let (transition, started) = asking(&driver, true);
    assert!(matches!(driver.write(&transition).await, Commit::Continued { .. }));
    let (lease, id) = (&driver.job.lease, &driver.session.session_id);
    let started_calls = "select count(*) from tool_calls where status = 'started'";

    let other = CallStart { nonce: new_nonce(), timeout_s: TIMEOUT_S };
    world.store.withdraw_starts(lease, id, &[Started::by_commit(&other)]).await.unwrap();
    assert_eq!(world.one(started_calls).await, 1, "the nonce of another start");
    let token = world.steal(lease.job_id).await;
    world.store.withdraw_starts(lease, id, &started).await.unwrap();
    assert_eq!(world.one(started_calls).await, 1, "the lease is lost");
    world.give_back(lease.job_id, token).await;
    world.store.withdraw_starts(lease, id, &started).await.unwrap();
    assert_eq!(world.one(started_calls).await, 0);
    let untouched = "select count(*) from tool_calls
        where status = 'invoked' and attempts = 0 and start_nonce is null and settled_by is null";
    assert_eq!(world.one(untouched).await, 2, "the row proves again that the call never ran");
}

#[tokio::test]
async fn the_database_starts_no_call_of_a_session_whose_tools_are_not_live() {
    let world = World::new().await;
    let driver = drivers(&world, 1).await.remove(0);
    world.run_sql("update conversation_sessions set policy = '{\"tool_mode\": \"dry\"}'").await;
    let (transition, _) = asking(&driver, true);
    let refused =
        world.store.commit(&driver.job.lease, &driver.session, &transition, performance()).await.unwrap_err();
    assert!(refused.to_string().contains("are not live"), "{refused}");
    assert_eq!(world.count("tool_calls").await, 0);
}
