//! The caches compared with the logs, and rebuilt from them.

use super::made_up::*;
use super::world::*;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use wakeful_store::Error;
use wakeful_store::step::Commit;
use wakeful_store::verify::Verification;
use wakeful_workflow::advance::Performed;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::plan::Stop;

/// A completed session with two entries in its state.
async fn completed(world: &World) -> String {
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let (a, b) = (call("call_a", "compose_email"), call("call_b", "compose_email"));
    driver.continues(replied(vec![asks(&a), asks(&b)])).await;
    let mail = |subject: &str| {
        let details =
            json!({"type": "sentEmail", "to": ["bob@example.com"], "subject": subject, "body": "Hi."});
        done("Queued.", Some(details))
    };
    let called = vec![performed(&a, mail("One")), performed(&b, mail(&"Two".repeat(1000)))];
    driver.continues(Performed::Called(called)).await;
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    session_id
}

async fn run_sql(world: &World, sql: &str, session_id: &str) {
    let sql = AssertSqlSafe(sql.replace("$1", &format!("'{session_id}'")));
    sqlx::raw_sql(sql).execute(&world.database.pool).await.unwrap();
}

/// The checks that differ, each name once.
fn differing(verification: &Verification) -> Vec<&str> {
    let mut names: Vec<&str> =
        verification.checks.iter().filter(|check| !check.agrees).map(|check| check.name).collect();
    names.dedup();
    assert_eq!(verification.agrees, names.is_empty());
    names
}

/// The session's row and its runs as text, without `wake_seq`, which every rebuild moves.
async fn rows(world: &World, session_id: &str) -> String {
    world
        .database
        .value(
            "select (to_jsonb(s) - 'wake_seq')::text || state::text
                || (select jsonb_agg(to_jsonb(r) order by run_id)::text from session_runs r
                    where r.session_id = s.session_id)
            from conversation_sessions s where session_id = $1",
            session_id,
        )
        .await
}

#[tokio::test]
async fn k34_a_cache_that_a_hand_changed_is_named_and_rebuilt_to_the_same_bytes() {
    let world = World::new().await;
    let session_id = completed(&world).await;
    let verification = world.store.verify(&session_id).await.unwrap();
    assert_eq!(differing(&verification), Vec::<&str>::new());
    let before = rows(&world, &session_id).await;
    let columns = [
        ("state = '{}'", "state"),
        ("state = state || '{\"a\": 1}'", "state"),
        ("state = '[]'", "state"),
        ("status = 'failed'", "status"),
        ("total_turns = 7", "total_turns"),
        ("total_input_tokens = 0", "total_input_tokens"),
        ("total_output_tokens = total_output_tokens + 1", "total_output_tokens"),
        ("total_cached_tokens = 0", "total_cached_tokens"),
        ("total_cache_write_tokens = -1", "total_cache_write_tokens"),
        ("total_cost_micros = 0", "total_cost_micros"),
        ("to_message_number = to_message_number - 1", "to_message_number"),
        ("last_message_number = last_message_number + 1", "last_message_number"),
        ("last_step_number = 0", "last_step_number"),
        ("last_event_seq = last_event_seq + 5", "last_event_seq"),
    ];
    for (change, name) in columns {
        let sql = format!("update conversation_sessions set {change} where session_id = $1");
        run_sql(&world, &sql, &session_id).await;
        let changed = rows(&world, &session_id).await;
        assert_ne!(changed, before, "{change}");
        assert_eq!(differing(&world.store.verify(&session_id).await.unwrap()), [name], "{change}");
        assert_eq!(rows(&world, &session_id).await, changed, "looking changes nothing");

        let rebuilt = world.store.rebuild(&session_id).await.unwrap();
        let names: Vec<&str> = rebuilt.changes.iter().map(|change| change.name).collect();
        assert_eq!((names, rebuilt.left, rebuilt.checkpoint_written), (vec![name], vec![], false));
        assert_eq!(rows(&world, &session_id).await, before, "{change}");
    }
    run_sql(&world, "update session_runs set steps = 9, tool_calls = 0 where session_id = $1", &session_id)
        .await;
    assert_eq!(differing(&world.store.verify(&session_id).await.unwrap()), ["totals of runs"]);
    world.store.rebuild(&session_id).await.unwrap();
    assert_eq!(rows(&world, &session_id).await, before);

    let entries = world.store.last_event_seq(&session_id).await.unwrap();
    let nothing = world.store.rebuild(&session_id).await.unwrap();
    assert!(nothing.changes.is_empty() && !nothing.checkpoint_written);
    assert_eq!(world.store.last_event_seq(&session_id).await.unwrap(), entries);
    assert!(matches!(world.store.verify("sess_none").await, Err(Error::NotFound { .. })));
}

#[tokio::test]
async fn a_wrong_state_that_was_snapshotted_is_mended_by_a_further_checkpoint() {
    let world = World::new().await;
    let session_id = completed(&world).await;
    let before: Value = world
        .database
        .value("select state from conversation_sessions where session_id = $1", &session_id)
        .await;
    run_sql(
        &world,
        "update conversation_sessions set state = '{\"a\": 1}' where session_id = $1",
        &session_id,
    )
    .await;
    // A run reads the wrong state and saves it in its checkpoint.
    world.send(&session_id, "And now?").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    let verification = world.store.verify(&session_id).await.unwrap();
    assert_eq!(differing(&verification), ["state"], "the messages say otherwise");

    let rebuilt = world.store.rebuild(&session_id).await.unwrap();
    assert!(rebuilt.checkpoint_written && rebuilt.left.is_empty(), "{rebuilt:?}");
    assert!(world.store.verify(&session_id).await.unwrap().agrees);
    let after: Value = world
        .database
        .value("select state from conversation_sessions where session_id = $1", &session_id)
        .await;
    assert_eq!(after, before);
}

#[tokio::test]
async fn a_rebuild_beside_a_worker_gives_it_the_state_that_it_wrote() {
    let world = World::new().await;
    let session_id = completed(&world).await;
    world.send(&session_id, "And now?").await;
    run_sql(
        &world,
        "update conversation_sessions set state = '{\"a\": 1}' where session_id = $1",
        &session_id,
    )
    .await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.session.state.len(), 1, "the worker has the wrong state");
    run_sql(
        &world,
        "update conversation_sessions set status = 'completed' where session_id = $1",
        &session_id,
    )
    .await;

    let rebuilt = world.store.rebuild(&session_id).await.unwrap();
    assert_eq!(rebuilt.left, ["status"], "the status of an open run is the run's");
    run_sql(&world, "update conversation_sessions set status = 'running' where session_id = $1", &session_id)
        .await;
    // The close sees the new `wake_seq`, continues instead, and reads the state again.
    driver.continues(replied(vec![text("Done.")])).await;
    assert_eq!(driver.session.state.len(), 2);
    assert_eq!(driver.commit(Performed::Stopped(Stop::Finished)).await, Commit::Closed { opened: false });
    assert!(world.store.verify(&session_id).await.unwrap().agrees);
}

#[tokio::test]
async fn a_log_that_lost_rows_is_named_and_left_as_it_is() {
    let tampering = [
        (
            "alter table conversation_records disable trigger append_only;
            delete from conversation_records where session_id = $1 and role = 'assistant' and message_number = 3;
            alter table conversation_records enable trigger append_only",
            vec!["entries without their message"],
        ),
        (
            "alter table session_events disable trigger append_only;
            delete from session_events where session_id = $1 and type = 'GEN_START';
            alter table session_events enable trigger append_only",
            vec!["missing entries"],
        ),
        ("delete from blobs where size > 2000 and bytes not like '{\"email%'", vec!["entries without their blob"]),
        ("update blobs set bytes = '{\"b\": 1}' where size > 2000 and bytes not like '{\"email%'", vec![
            "entries without their blob",
        ]),
        ("update session_steps set from_message_number = 0 where session_id = $1 and step_number = 2", vec![
            "broken steps",
        ]),
    ];
    for (sql, names) in tampering {
        let world = World::new().await;
        let session_id = completed(&world).await;
        run_sql(&world, sql, &session_id).await;
        assert_eq!(differing(&world.store.verify(&session_id).await.unwrap()), names, "{sql}");
        let dump = world.dump().await;
        assert_eq!(world.store.rebuild(&session_id).await.unwrap().left, names);
        assert_eq!(world.dump().await, dump, "{sql}");
    }
}

#[tokio::test]
async fn sessions_that_share_a_conversation_agree_with_their_own_logs() {
    let world = World::new().await;
    let first = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&first).await;
    driver.continues(Performed::Begun).await;
    let fault = Fault::StepLimit { limit: 1 };
    assert_eq!(
        driver.commit(Performed::Stopped(Stop::Failed(fault))).await,
        Commit::Closed { opened: false }
    );

    let woken = world.store.wake(&new_session("c1", "second"), &message("Hello too")).await.unwrap();
    let mut driver = world.drive(&woken.session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });

    // The session's own last message has a lower number than the one its retried run continues from.
    world.store.retry(&first, None).await.unwrap();
    for session_id in [&first, &woken.session_id] {
        let verification = world.store.verify(session_id).await.unwrap();
        assert!(verification.agrees, "{verification:#?}");
    }
    let mut driver = world.drive(&first).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    assert!(world.store.verify(&first).await.unwrap().agrees);
    assert_eq!(world.store.session_ids(None, "", 10).await.unwrap(), [first, woken.session_id]);
}
