//! The journal on a real Postgres: in commit order, by pointer where a value is large, and exact after every
//! commit.

use super::made_up::*;
use super::world::*;
use futures::future::join_all;
use serde_json::{Value, json};
use wakeful_store::journal::{Lines, Memory, Postgres, recover};
use wakeful_store::step::Commit;
use wakeful_workflow::advance::Performed;
use wakeful_workflow::agent::{AgentPolicy, JournalLevel};
use wakeful_workflow::plan::Stop;

/// The details of a tool result that adds one mail to the state, with a subject of this length.
fn mail(subject_bytes: usize) -> Value {
    json!({"type": "sentEmail", "to": ["bob@example.com"], "subject": "x".repeat(subject_bytes), "body": "Hi."})
}

/// Checks the fold of each of the three journals against the row, and the row's caches against all logs.
async fn the_journal_gives_the_row(world: &World, session_id: &str) {
    let recovered = recover(&Postgres(&world.store), session_id).await.unwrap();
    let row: Value = world
        .database
        .value(
            "select json_build_object('state', state, 'status', status) from conversation_sessions
            where session_id = $1",
            session_id,
        )
        .await;
    assert_eq!(Value::Object(recovered.context_state.clone()), row["state"]);
    assert_eq!(recovered.lifecycle_state, row["status"]);

    let entries = world.store.journal(session_id, 0, 10_000).await.unwrap();
    let (mut memory, mut lines) = (Memory::default(), String::new());
    for entry in &entries {
        memory.append(session_id, &entry.kind, entry.payload.clone());
        lines.push_str(&serde_json::to_string(entry).unwrap());
        lines.push('\n');
    }
    assert_eq!(recover(&memory, session_id).await.unwrap(), recovered, "over memory");
    let lines = Lines::read(lines.as_bytes()).unwrap();
    assert!(lines.notes.is_empty(), "{:?}", lines.notes);
    assert_eq!(recover(&lines, session_id).await.unwrap(), recovered, "over lines");

    let verification = world.store.verify(session_id).await.unwrap();
    assert!(verification.agrees, "{verification:#?}");
}

#[tokio::test]
async fn at_either_level_the_journal_gives_the_row_back_after_every_commit() {
    for level in [JournalLevel::Full, JournalLevel::Checkpoint] {
        let policy = AgentPolicy { journal: level, ..AgentPolicy::default() };
        let world = World::new().await;
        let session_id = world.wake("c1", "Write to Bob.").await;
        let holds = async || the_journal_gives_the_row(&world, &session_id).await;
        holds().await;
        let mut driver = world.drive(&session_id).await;
        driver.policy = policy;
        driver.continues(Performed::Begun).await;
        holds().await;
        let email = call("call_a", "compose_email");
        driver.continues(replied(vec![asks(&email)])).await;
        holds().await;
        driver.continues(Performed::Called(vec![performed(&email, done("Queued.", Some(mail(5))))])).await;
        holds().await;

        // This pause would change the state, but a message arrives first, so the run does not pause.
        let (long, question) = (call("call_b", "compose_email"), call("call_c", "ask_user"));
        driver.continues(replied(vec![asks(&long), asks(&question)])).await;
        holds().await;
        world.send(&session_id, "At eight.").await;
        holds().await;
        let mut outcome = vec![performed(&long, done("Queued.", Some(mail(3000))))];
        let Performed::Called(asked) = asked(&question) else { panic!("a question") };
        outcome.extend(asked);
        driver.continues(Performed::Called(outcome)).await;
        assert_eq!(driver.session.state.len(), 2);
        holds().await;

        assert_eq!(
            driver.commit(Performed::Stopped(Stop::Cancelled)).await,
            Commit::Closed { opened: false }
        );
        holds().await;
        let updates =
            world.journal(&session_id).await.iter().filter(|kind| *kind == "context_update").count();
        assert_eq!(updates, if level == JournalLevel::Full { 2 } else { 0 });
    }
}

#[tokio::test]
async fn a_large_value_is_journalled_by_pointer_and_printed_with_what_it_points_at() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let email = call("call_a", "compose_email");
    driver.continues(replied(vec![asks(&email)])).await;
    driver.continues(Performed::Called(vec![performed(&email, done("Queued.", Some(mail(3000))))])).await;

    let stored: Value = world
        .database
        .value(
            "select json_build_object('payload', e.payload, 'named', encode(sha256(b.bytes), 'hex'), 'bytes', b.size)
            from session_events e
            join blobs b on b.sha256 = e.payload ->> 'value_sha256'
            where e.session_id = $1 and e.type = 'context_update'",
            &session_id,
        )
        .await;
    assert_eq!(stored["payload"]["value_sha256"], stored["named"]);
    assert_eq!(stored["payload"]["bytes"], stored["bytes"]);
    assert!(stored["payload"].get("value").is_none() && stored.to_string().len() < 1000, "{stored}");

    let entries = world.store.journal(&session_id, 0, 100).await.unwrap();
    let update = entries.iter().find(|entry| entry.kind == "context_update").unwrap();
    assert_eq!(update.payload["value"], driver.session.state["email/call_a"]);
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    let entries = world.store.journal(&session_id, 0, 100).await.unwrap();
    let checkpoint = entries.iter().find(|entry| entry.kind == "checkpoint").unwrap();
    assert_eq!(checkpoint.payload["context_state"], Value::Object(driver.session.state.clone()));
}

#[tokio::test]
async fn a_reader_who_asks_for_what_is_after_its_last_entry_misses_none_of_eight_writers() {
    const EACH: usize = 25;
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let writers = async {
        join_all((0..7).map(async |_| {
            for _ in 0..EACH {
                world.send(&session_id, "More.").await;
            }
        }))
        .await;
    };
    // The eighth writer is the holder of the lease: each of its turns commits steps while the others wake the
    // session.
    let steps = async {
        for turn in 0..EACH {
            let pure = call(&format!("call_{turn}"), "compose_email");
            let transition = driver.transition(replied(vec![asks(&pure)]));
            let Commit::Continued { .. } = driver.write(&transition).await else { panic!("it goes on") };
            driver.session = world.store.hydrate(&session_id).await.unwrap();
            let called = Performed::Called(vec![performed(&pure, done("Queued.", Some(mail(1))))]);
            let transition = driver.transition(called);
            let Commit::Continued { .. } = driver.write(&transition).await else { panic!("it goes on") };
            driver.session = world.store.hydrate(&session_id).await.unwrap();
        }
    };
    let writing = async { tokio::join!(writers, steps) };
    let mut seen: Vec<i64> = Vec::new();
    let mut reads_beside = 0;
    let mut look = async || {
        let after = seen.last().copied().unwrap_or(0);
        let entries = world.store.journal(&session_id, after, 10_000).await.unwrap();
        seen.extend(entries.iter().map(|entry| entry.seq));
    };
    tokio::pin!(writing);
    loop {
        tokio::select! {
            biased;
            _ = &mut writing => break,
            () = look() => reads_beside += 1,
        }
    }
    look().await;
    assert!(reads_beside > 5, "{reads_beside} reads beside the writers");
    let last: i64 = world.store.last_event_seq(&session_id).await.unwrap();
    assert!(last > (8 * EACH) as i64);
    assert_eq!(seen, (1..=last).collect::<Vec<_>>());
}
