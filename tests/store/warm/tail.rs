//! The end of a session, which is what a worker reads of one whose context begins at a rebase.

use super::*;
use wakeful_workflow::advance::{Compaction, CompactionEnd};
use wakeful_workflow::record::{FinishReason, Record, Usage};
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::{Rebase, Strategy};

/// Asserts that [`Store::hydrate_tail`] gives the end of `whole`, which was just hydrated, and that the rule in SQL is the one of
/// [`Session::leave_out`](wakeful_workflow::session::Session::leave_out). Returns whether it has fewer messages.
pub(super) async fn is_the_end_of(store: &Store, whole: &Session) -> bool {
    let tail = store.hydrate_tail(whole.session_id.as_str()).await.unwrap().session;
    let mut same = whole.clone();
    same.leave_out_like(&tail);
    assert_eq!(same, tail);
    let mut ruled = whole.clone();
    ruled.leave_out();
    let marks = |session: &Session| {
        session.left_out.as_ref().map(|left_out| (left_out.before, left_out.user_messages_from))
    };
    assert_eq!(marks(&tail), marks(&ruled));
    if let (Some(read), Some(ruled)) = (&tail.left_out, &ruled.left_out) {
        assert!(read.call_ids.is_superset(&ruled.call_ids), "{:?}", ruled.call_ids);
    }
    tail.records.len() < whole.records.len()
}

/// A summary, which becomes message `number`. Its context keeps the messages from `keep_from` on, and those of the user from
/// `users_from` on.
pub(super) fn summary(number: i64, keep_from: i64, users_from: Option<i64>) -> Performed {
    Performed::Compacted(Compaction {
        generation_id: new_id("gen").into(),
        attempt: 1,
        model: "test/test".into(),
        request_sha256: "0".into(),
        started_at: "2026-01-01T00:00:00+00:00".into(),
        repairs: 0,
        end: CompactionEnd::Written {
            text: "What was said.".into(),
            finish_reason: FinishReason::Stop,
            usage: Usage::default(),
            rebase: Rebase {
                strategy: Strategy::Compaction,
                at_message_number: number,
                keep_from_message_number: keep_from,
                user_messages_from: users_from,
                summary_message_number: Some(number),
                trim_results_before: None,
            },
        },
    })
}

/// A session with `turns` turns of a tool and an answer each, whose last turn waits for the model.
async fn talk(world: &World, turns: usize) -> String {
    let session_id = world.wake("c1", "Her secret 0.").await;
    for turn in 1..=turns {
        let mut driver = world.drive(&session_id).await;
        driver.continues(Performed::Begun).await;
        let reserve = call(&format!("call_{turn}"), "reserve");
        driver.continues(replied(vec![asks(&reserve)])).await;
        driver.continues(Performed::Called(vec![performed(&reserve, done("Reserved.", None))])).await;
        driver.commit(replied(vec![text("Kept well.")])).await;
        world.send(&session_id, &format!("Her secret {turn}.")).await;
    }
    session_id
}

/// A worker that has just written a summary of four turns, of which only the newest message of the user is kept.
async fn summarised(world: &World) -> Driver<'_> {
    let session_id = talk(world, 4).await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let number = driver.session.last_message_number + 1;
    driver.continues(summary(number, number, Some(number - 1))).await;
    driver
}

#[tokio::test]
async fn a_worker_reads_what_a_summary_leaves_of_a_session_in_one_statement_and_no_call_gets_an_id_again() {
    let world = World::new().await;
    let session_id = talk(&world, 12).await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    assert!(!is_the_end_of(&world.store, &driver.session).await, "there is no summary yet");
    let users = driver.session.records.iter().filter(|record| record.role == Role::User);
    let last_two: Vec<i64> = users.map(|record| record.message_number).rev().take(2).collect();
    let number = driver.session.last_message_number + 1;
    driver.continues(summary(number, number, Some(last_two[1]))).await;
    assert!(is_the_end_of(&world.store, &driver.session).await);

    let recorder = Recorder::start(&world.database.url);
    let store = Store::connect(&recorder.url, 2, "wakeful test").await.unwrap();
    store.hydrate(&session_id).await.unwrap();
    recorder.take();
    let tail = store.hydrate_tail(&session_id).await.unwrap().session;
    let sent = recorder.take();
    assert_eq!(sent.iter().filter(|one| !one.is_ping).count(), 1, "{sent:#?}");
    let said: Vec<String> = tail.records.iter().map(Record::text).collect();
    assert_eq!(said, ["Her secret 11.", "Kept well.", "Her secret 12.", "What was said."]);

    // A model that counts its calls from one in each process gives an id that only a message has which was not read.
    driver.session = tail;
    let again = call("call_3", "reserve");
    driver.continues(replied(vec![asks(&again)])).await;
    let given: Vec<&str> = driver.session.calls.iter().map(|call| call.call_id.as_str()).collect();
    assert!(given.len() == 1 && given[0].starts_with("call_3_"), "{given:?}");
}

#[tokio::test]
async fn a_worker_keeps_only_the_end_and_reads_everything_once_an_earlier_rebase_is_restored() {
    let world = World::new().await;
    let mut driver = summarised(&world).await;
    let session_id = driver.session.session_id.to_string();
    driver.commit(replied(vec![text("Kept well.")])).await;
    let whole = world.store.hydrate_to_keep(&session_id).await.unwrap();
    let all = whole.clone().keep().expect("nothing is sealed").bytes();
    let mut hydrated = whole;
    hydrated.leave_out();
    let copy = hydrated.keep().expect("nothing is sealed");
    assert!(copy.bytes() * 2 < all, "{} of {all} bytes", copy.bytes());

    world.send(&session_id, "And now?").await;
    let caught_up = world.store.catch_up(copy.clone()).await.unwrap().expect("it is good").session;
    let mut cold = world.store.hydrate(&session_id).await.unwrap();
    cold.leave_out_like(&caught_up);
    assert_eq!(caught_up, cold);
    assert!(!caught_up.lacks_messages(Strategy::Compaction));
    world.run_sql("update conversation_sessions set rebase = null").await;
    let caught_up = world.store.catch_up(copy).await.unwrap().expect("it is good").session;
    assert!(caught_up.lacks_messages(Strategy::Compaction), "the worker reads the session again");
}

#[tokio::test]
async fn a_fork_that_was_imported_is_read_whole_because_its_ledger_lacks_the_copied_calls() {
    let world = World::new().await;
    let driver = summarised(&world).await;
    let session_id = driver.session.session_id.to_string();
    assert!(is_the_end_of(&world.store, &driver.session).await);
    // An import keeps this number, and has no parent.
    world.run_sql("update conversation_sessions set forked_at_message_number = 3").await;
    let read = world.store.hydrate_tail(&session_id).await.unwrap().session;
    assert_eq!(read, world.store.hydrate(&session_id).await.unwrap());
}
