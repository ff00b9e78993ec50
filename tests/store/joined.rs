//! Replies that are joined by the results of their tools.

use super::group::{commit_all, driver_turn, drivers};
use super::*;
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
