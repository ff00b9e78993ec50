//! Replies that wait for a statement, and results that join them.

use super::group::{commit_all, driver_turn, drivers, warm};
use super::*;
use crate::support::proxy::{CutAt, Proxy as Cutting};
use wakeful_workflow::advance::Transition;
use wakeful_workflow::session::Session;

/// A reply with two pure calls.
fn pure_turn(driver: &Driver<'_>) -> Transition {
    let calls = ["a", "b"].map(|id| call(&format!("{id}{}", driver.session.last_step_number), "ask_user"));
    driver.transition(replied(std::iter::once(text("One moment.")).chain(calls.iter().map(asks)).collect()))
}

/// The results of the calls of `session`'s last message: the first one is done, the others failed.
fn pure_results(session: &Session) -> Transition {
    let calls = session.open_turn().expect("a turn is open").record.tool_calls().enumerate();
    let ended = calls.map(|(at, call)| {
        let (status, is_error) = if at == 0 { (CallStatus::Done, false) } else { (CallStatus::Failed, true) };
        let outcome = CallOutcome { content: "That was it.".into(), is_error, details: None };
        performed(call, CallEnd::Settled(status, outcome))
    });
    advance(session, Performed::Called(ended.collect()), AgentPolicy::default())
}

#[tokio::test]
async fn a_reply_joined_by_its_results_leaves_the_rows_of_two_commits() {
    let mut dumps = Vec::new();
    for joined in [false, true] {
        let world = World::new().await;
        let mut drivers = drivers(&world, 3).await;
        for round in 0..2 {
            // In the second round, a commit of another shape is in the same statement.
            let beside = (round == 1).then(|| driver_turn(&drivers[2]));
            for part in 0..2 {
                let transitions = drivers[..2].iter().map(|driver| {
                    if part == 1 {
                        return pure_results(&driver.session);
                    }
                    let mut reply = pure_turn(driver);
                    if joined {
                        let mut session = driver.session.clone();
                        session.apply(&reply);
                        assert!(reply.join(pure_results(&session)));
                    }
                    reply
                });
                let transitions: Vec<Transition> = transitions.collect();
                let mut commits: Vec<_> = drivers.iter().zip(&transitions).collect();
                commits.extend(beside.iter().filter(|_| part == 0).map(|beside| (&drivers[2], beside)));
                for commit in commit_all(&world.store, &commits).await {
                    assert!(matches!(commit, Ok(Commit::Continued { .. })), "{commit:?}");
                }
                for driver in &mut drivers {
                    let id = driver.session.session_id.as_str().to_owned();
                    driver.session = world.store.hydrate(&id).await.unwrap();
                }
                if joined {
                    break;
                }
            }
        }
        dumps.push(comparable(world.dump().await));
    }
    assert_eq!(dumps[0], dumps[1]);
}

#[tokio::test]
async fn a_commit_that_waits_can_be_taken_back_and_a_lone_one_does_not_wait() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 3).await;
    let proxy = Cutting::start(&world.database.url);
    let store = warm(&proxy.url, &mut drivers[..1]).await;
    let [first, second, third] = [&drivers[0], &drivers[1], &drivers[2]];
    let queue = |driver: &Driver<'_>| {
        store.queue_commit(&driver.job.lease, &driver.session, &driver_turn(driver), performance()).unwrap()
    };
    assert!(queue(first).is_none(), "no lane writes, so it would be written at once");

    proxy.cut_when("opened as (", CutAt::HeldAnswer);
    let turn = driver_turn(first);
    let late = [(first, &turn)];
    let late = commit_all(&store, &late);
    let others = async {
        eventually("a lane that waits for its answer", || async { (proxy.cut_count() == 1).then_some(()) })
            .await;
        let mut taken_back = queue(second).expect("it waits");
        assert!(taken_back.withdraw());
        assert!(!taken_back.withdraw());
        assert_eq!(taken_back.written().await, None);
        let mut stays = queue(third).expect("it waits");
        assert!(matches!(stays.written().await, Some(Commit::Continued { .. })));
        assert!(!stays.withdraw());
        proxy.release();
    };
    let (late, ()) = tokio::join!(late, others);
    assert!(matches!(late[0], Ok(Commit::Continued { .. })), "{late:?}");
    for (driver, records) in drivers.iter().zip([1, 0, 1]) {
        let read = world.store.hydrate(driver.session.session_id.as_str()).await.unwrap();
        assert_eq!(read.records.len() - driver.session.records.len(), records);
    }
}
