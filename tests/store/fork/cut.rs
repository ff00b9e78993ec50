//! Where a session may be cut.

use super::*;

#[tokio::test]
async fn a_fork_may_begin_at_the_first_message_or_before_it() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let first = world.store.fork(&at(&parent_id, "2")).await.unwrap();
    let mut driver = world.drive(&first.session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.session.records.len(), 1);
    assert_eq!(driver.commit(replied(vec![text("Hello.")])).await, Commit::Closed { opened: false });
    agrees(&world, &first.session_id).await;

    for place in ["start", "1"] {
        let start = world.store.fork(&resting(&parent_id, place)).await.unwrap();
        assert_eq!((start.asked_message_number, start.at_message_number), (1, 1), "{place}");
        agrees(&world, &start.session_id).await;
        world.send(&start.session_id, "From scratch.").await;
        let mut driver = world.drive(&start.session_id).await;
        driver.continues(Performed::Begun).await;
        assert_eq!(driver.session.records[0].message_number, 2, "numbers are the parent's");
        assert_eq!(driver.session.last_step_number, 0);
        assert_eq!(driver.commit(replied(vec![text("Hello.")])).await, Commit::Closed { opened: false });
        agrees(&world, &start.session_id).await;
    }
}

#[tokio::test]
async fn a_cut_inside_of_a_turn_is_moved_and_what_cannot_be_cut_is_refused_with_a_reason() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    for (place, asked) in [("7", 7), ("8", 8)] {
        let forked = world.store.fork(&resting(&parent_id, place)).await.unwrap();
        assert_eq!((forked.asked_message_number, forked.at_message_number), (asked, 6));
        assert!(forked.moved.unwrap().contains("inside of a tool turn"));
    }
    for (place, number) in [("last-tool", 9), ("step:1", 4), ("step:3", 9), ("end", 10), ("start", 1)] {
        let forked = world.store.fork(&resting(&parent_id, place)).await.unwrap();
        assert_eq!(forked.at_message_number, number, "{place}");
    }
    let message_id: String = world
        .database
        .value(
            "select message_id from conversation_records where session_id = $1 and message_number = 5",
            &parent_id,
        )
        .await;
    let by_id = world.store.fork(&resting(&parent_id, &message_id)).await.unwrap();
    assert_eq!(by_id.at_message_number, 5);

    assert!(refused(&world, &resting(&parent_id, "11")).await.contains("it has no message 11"));
    assert!(refused(&world, &resting(&parent_id, "step:9")).await.contains("it has no step 9"));
    assert!(refused(&world, &resting(&parent_id, "msg_other")).await.contains("it has no message msg_other"));
    assert!(refused(&world, &resting(&parent_id, "event:900")).await.contains("its journal ends with entry"));
    let reason = refused(&world, &at(&parent_id, "end")).await;
    assert!(reason.contains("message 10 is the model's own") && reason.contains("give a prompt"), "{reason}");
    assert!(refused(&world, &at(&parent_id, "start")).await.contains("nothing is copied"));
    let edited = ForkRequest { text: Some("x".into()), ..at(&parent_id, "5") };
    assert!(refused(&world, &edited).await.contains("message 5 is the assistant's"));
    let waiting = ForkRequest { prompt: Some("x".into()), ..resting(&parent_id, "5") };
    assert!(refused(&world, &waiting).await.contains("a message begins a run"));
    let unknown = world.store.fork(&at("sess_none", "end")).await.unwrap_err();
    assert!(matches!(unknown, Error::NotFound { what: "session", .. }), "{unknown}");
}

#[tokio::test]
async fn an_event_is_the_last_message_that_had_been_said_by_then() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let entries = world.store.journal(&parent_id, 0, 1000).await.unwrap();
    let parent = hydrated(&world, &parent_id).await;
    // Compute the cut without the product's code. A message counts as said from the journal entry that takes
    // it or points at it.
    let (mut said, mut received) = (1, [2, 6].into_iter());
    for entry in entries {
        match entry.kind.as_str() {
            "MESSAGE_RECEIVED" => said = received.next().unwrap(),
            "GEN_COMPLETE" | "TOOL_RESULT" => said = entry.payload["message_number"].as_i64().unwrap(),
            _ => {}
        }
        let forked = world.store.fork(&resting(&parent_id, &format!("event:{}", entry.seq))).await.unwrap();
        assert_eq!(forked.asked_message_number, said, "entry {}", entry.seq);
    }
    assert_eq!(said, parent.last_message_number);
    assert_eq!(received.next(), None);

    // For a fork, the copied messages were said from the beginning.
    let child = world.store.fork(&at(&parent_id, "6")).await.unwrap();
    let grandchild = world.store.fork(&resting(&child.session_id, "event:1")).await.unwrap();
    assert_eq!(grandchild.at_message_number, 6);
}

#[tokio::test]
async fn a_fork_of_a_fork_is_cut_where_its_grandparent_could_have_been() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let child = world.store.fork(&resting(&parent_id, "end")).await.unwrap();
    let grandchild = world.store.fork(&resting(&child.session_id, "5")).await.unwrap();
    let direct = world.store.fork(&resting(&parent_id, "5")).await.unwrap();
    agrees(&world, &grandchild.session_id).await;
    let (ours, theirs) =
        (hydrated(&world, &grandchild.session_id).await, hydrated(&world, &direct.session_id).await);
    assert_eq!(ours.records, theirs.records, "origins are those who said it first");
    // The child's own state has another entry, which the grandchild does not have.
    assert_eq!(ours.state, theirs.state);
    assert_eq!(ours.state.len(), 1);
    assert_eq!(hydrated(&world, &child.session_id).await.state.len(), 2);
    assert_eq!(ours.last_step_number, theirs.last_step_number);

    let tree = world.store.tree(&grandchild.session_id).await.unwrap();
    let shown: Vec<(&str, i32, Option<i64>)> =
        tree.iter().map(|one| (one.session_id.as_str(), one.depth, one.forked_at_message_number)).collect();
    assert_eq!(
        shown,
        [
            (parent_id.as_str(), 0, None),
            (child.session_id.as_str(), 1, Some(10)),
            (grandchild.session_id.as_str(), 2, Some(5)),
            (direct.session_id.as_str(), 1, Some(5)),
        ]
    );
    for session_id in [&parent_id, &child.session_id, &direct.session_id] {
        assert_eq!(world.store.tree(session_id).await.unwrap().len(), 4, "the same tree from everywhere");
    }
    assert!(matches!(world.store.tree("sess_none").await, Err(Error::NotFound { .. })));
}
