//! Forks: where they are cut, what they begin with, and that the parent is never touched.

mod cut;
mod policy;

use super::LEASE;
use super::made_up::*;
use super::world::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use wakeful_store::Error;
use wakeful_store::fork::{ForkRequest, Forked, Model};
use wakeful_store::queue::Kind;
use wakeful_store::step::Commit;
use wakeful_workflow::advance::Performed;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::fork::{CutPoint, SystemPromptPatch};
use wakeful_workflow::policy::ToolMode;
use wakeful_workflow::record::{Record, Role};
use wakeful_workflow::session::{Session, SessionStatus};

/// A completed session: message 2, a turn with a mail (3, 4), the reply 5; message 6, a turn with two calls
/// (7 to 9), the reply 10.
async fn two_runs(world: &World) -> String {
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_a").await;
    assert_eq!(driver.commit(replied(vec![text("Written.")])).await, Commit::Closed { opened: false });
    world.send(&session_id, "And to Ann, and reserve.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let (mail, reserve) = (call("call_b", "compose_email"), call("call_c", "reserve"));
    driver.continues(replied(vec![asks(&mail), asks(&reserve)])).await;
    let details = json!({"type": "sentEmail", "to": ["ann@example.com"], "subject": "Ho", "body": "Ann."});
    let reserved = done("Reserved.", None);
    driver.settle(&reserve, &reserved).await;
    let results = vec![performed(&mail, done("Queued.", Some(details))), performed(&reserve, reserved)];
    driver.continues(Performed::Called(results)).await;
    assert_eq!(driver.commit(replied(vec![text("All done.")])).await, Commit::Closed { opened: false });
    session_id
}

fn at(parent: &str, place: &str) -> ForkRequest {
    ForkRequest::new(parent, place.parse().unwrap())
}

/// A request for a fork that starts no run.
fn resting(parent: &str, place: &str) -> ForkRequest {
    ForkRequest { start: false, ..at(parent, place) }
}

async fn refused(world: &World, request: &ForkRequest) -> String {
    let before = world.dump().await;
    let error = world.store.fork(request).await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert_eq!(world.dump().await, before, "a refusal writes nothing");
    error.to_string()
}

/// Every row that does not belong to the fork.
async fn others(world: &World, forked: &Forked) -> BTreeMap<String, Vec<Value>> {
    let mut dump = BTreeMap::new();
    let conversation = format!("default/{}", forked.conversation_id);
    for (table, rows) in world.dump().await {
        let Value::Array(rows) = rows else { panic!("{table}") };
        let own = |row: &Value| {
            row["session_id"] == forked.session_id.as_str() || row["conversation_id"] == conversation.as_str()
        };
        dump.insert(table, rows.into_iter().filter(|row| !own(row)).collect());
    }
    dump
}

/// Asserts that all rows outside the fork are as they were. Blobs are shared: none disappears or changes, but
/// a fork may add blobs of states that had none before.
fn unchanged(mut before: BTreeMap<String, Vec<Value>>, mut after: BTreeMap<String, Vec<Value>>) {
    let blobs = after.remove("blobs").unwrap();
    for blob in before.remove("blobs").unwrap() {
        assert!(blobs.contains(&blob), "{blob}");
    }
    assert_eq!(after, before);
}

async fn everything(world: &World) -> BTreeMap<String, Vec<Value>> {
    let rows = world.dump().await.into_iter().map(|(table, rows)| {
        let Value::Array(rows) = rows else { panic!("{table}") };
        (table, rows)
    });
    rows.collect()
}

fn said(records: &[Record]) -> Vec<(i64, Role, &[wakeful_workflow::record::Block])> {
    records.iter().map(|one| (one.message_number, one.role, &*one.content)).collect()
}

async fn agrees(world: &World, session_id: &str) {
    let verification = world.store.verify(session_id).await.unwrap();
    let differ: Vec<_> = verification.checks.iter().filter(|check| !check.agrees).collect();
    assert!(verification.agrees, "{differ:#?}");
}

async fn hydrated(world: &World, session_id: &str) -> Session {
    world.store.hydrate(session_id).await.unwrap()
}

#[tokio::test]
async fn a_fork_begins_with_the_messages_up_to_its_cut_and_nothing_that_was_done() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let before = everything(&world).await;
    let parent = hydrated(&world, &parent_id).await;
    let forked = world.store.fork(&resting(&parent_id, "5")).await.unwrap();
    assert_eq!((forked.asked_message_number, forked.at_message_number), (5, 5));
    assert_eq!((&forked.moved, &forked.run_id, forked.duplicate), (&None, &None, false));

    let child = hydrated(&world, &forked.session_id).await;
    assert_eq!(child.status, SessionStatus::Created);
    assert_eq!(child.parent_session_id, Some(parent_id.as_str().into()));
    assert_eq!(child.conversation_id.as_str(), format!("default/{}", forked.conversation_id));
    assert_eq!((child.trigger_type.as_str(), &child.seeds), ("fork", &parent.seeds));
    assert_eq!(child.prefix, parent.prefix);
    assert_eq!(said(&child.records), said(&parent.records[..4]));
    assert_eq!(child.state.keys().collect::<Vec<_>>(), ["email/call_a"]);
    assert_eq!((child.last_message_number, child.to_message_number, child.last_step_number), (5, 5, 2));
    assert_eq!(child.totals, wakeful_workflow::session::Totals::default());
    assert!(child.calls.is_empty() && child.inbox.is_empty() && child.run.is_none());
    assert_eq!(world.journal(&forked.session_id).await, ["SESSION_FORKED", "checkpoint"]);
    agrees(&world, &forked.session_id).await;

    // Equal content is stored once with the same bytes. Each copied message has an id of its own and names
    // the message it was copied from.
    unchanged(before, others(&world, &forked).await);
    let origins: Vec<(String, String)> = sqlx::query_as(
        "select c.details ->> 'origin_message_id', p.message_id
        from conversation_records c
        join conversation_records p on p.session_id = $2 and p.message_number = c.message_number
            and p.message_id <> c.message_id and p.content::text = c.content::text and p.created_at = c.created_at
            and p.step_number = c.step_number and p.run_id = c.run_id
        where c.session_id = $1",
    )
    .bind(&forked.session_id)
    .bind(&parent_id)
    .fetch_all(&world.database.pool)
    .await
    .unwrap();
    assert_eq!(origins.len(), 4);
    assert!(origins.iter().all(|(origin, id)| origin == id), "{origins:?}");
    let link: Value = world
        .database
        .value(
            "select to_json(c) from conversation_counters c where conversation_id = $1",
            child.conversation_id.as_str(),
        )
        .await;
    assert_eq!(link["parent_conversation_id"], "default/c1");
    assert_eq!((&link["forked_at_message_number"], &link["last_message_number"]), (&json!(5), &json!(5)));
}

#[tokio::test]
async fn a_fork_goes_on_with_numbers_and_steps_of_its_own() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let before = everything(&world).await;
    // The fork answers the message again.
    let forked = world.store.fork(&at(&parent_id, "last-user")).await.unwrap();
    assert_eq!(forked.at_message_number, 6);
    let mut driver = world.drive(&forked.session_id).await;
    agrees(&world, &forked.session_id).await;
    assert_eq!((driver.session.last_step_number, driver.session.base_message_number), (2, 1));
    driver.continues(Performed::Begun).await;
    // The fork did not copy this call of the parent's turn, so its id is free.
    driver.sends_mail("call_b").await;
    // The fork did copy this one, so its id is taken.
    driver.sends_mail_as("call_a", "call_a_9_0").await;
    assert_eq!(driver.commit(replied(vec![text("Another answer.")])).await, Commit::Closed { opened: false });
    agrees(&world, &forked.session_id).await;
    let child = hydrated(&world, &forked.session_id).await;
    assert_eq!(
        child.records.iter().map(|one| one.message_number).collect::<Vec<_>>(),
        (2..=11).collect::<Vec<_>>()
    );
    assert_eq!((child.last_step_number, child.totals.turns), (5, 3));
    assert_eq!(child.status, SessionStatus::Completed);
    let steps = world.store.steps(&forked.session_id, None, 50).await.unwrap();
    assert_eq!(steps.iter().map(|step| step.step_number).collect::<Vec<_>>(), [3, 4, 5]);
    assert_eq!(steps[0].from_message_number, 6);
    // The fork sends its own mail. It does not send the parent's again.
    assert_eq!(world.store.deliveries(&forked.session_id).await.unwrap().len(), 2);
    let verification = world.store.rebuild(&forked.session_id).await.unwrap();
    assert!(verification.changes.is_empty() && verification.left.is_empty(), "{verification:?}");

    // A follow-up continues the fork, as it would any session.
    world.send(&forked.session_id, "And?").await;
    let mut driver = world.drive(&forked.session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text("That is all.")])).await, Commit::Closed { opened: false });
    agrees(&world, &forked.session_id).await;
    unchanged(before, others(&world, &forked).await);
}

#[tokio::test]
async fn a_running_session_is_forked_without_being_touched_or_held_up() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Reserve a table.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let reserve = call("call_a", "reserve");
    driver.continues(replied(vec![asks(&reserve)])).await;
    assert!(driver.start(&reserve).await.is_some());

    // Stands in for a worker whose commit holds the row locks and has not ended.
    let mut commit = world.database.pool.begin().await.unwrap();
    sqlx::query(
        "select from conversation_sessions s join conversation_counters c using (conversation_id)
            where s.session_id = $1 for update",
    )
    .bind(&session_id)
    .execute(&mut *commit)
    .await
    .unwrap();
    let before = everything(&world).await;
    let request = resting(&session_id, "end");
    let forked = tokio::time::timeout(LEASE, world.store.fork(&request))
        .await
        .expect("no lock is waited for")
        .unwrap();
    assert_eq!(forked.at_message_number, 2, "its turn is open");
    unchanged(before, others(&world, &forked).await);
    commit.rollback().await.unwrap();

    // The parent's run continues undisturbed.
    let results = vec![performed(&reserve, done("Reserved.", None))];
    driver.continues(Performed::Called(results)).await;
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    agrees(&world, &session_id).await;
    agrees(&world, &forked.session_id).await;
}

#[tokio::test]
async fn the_same_key_is_the_same_fork_and_with_another_body_is_refused() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let request = ForkRequest { client_key: Some("k".into()), ..at(&parent_id, "last-user") };
    let both = tokio::join!(world.store.fork(&request), world.store.fork(&request));
    let (one, two) = (both.0.unwrap(), both.1.unwrap());
    assert_ne!(one.duplicate, two.duplicate, "one of them made it");
    assert_eq!(Forked { duplicate: false, ..one.clone() }, Forked { duplicate: false, ..two });
    assert!(one.run_id.is_some());
    // The parent has moved on, but the answer is still the first one.
    world.run_sql("update jobs set run_at = clock_timestamp() + interval '1 hour'").await;
    world.send(&parent_id, "Once more.").await;
    let later = world.store.fork(&request).await.unwrap();
    assert!(later.duplicate);
    assert_eq!((later.session_id, later.run_id), (one.session_id.clone(), one.run_id));
    let other = ForkRequest { at: CutPoint::Message(2), ..request.clone() };
    let error = world.store.fork(&other).await.unwrap_err();
    assert!(matches!(error, Error::KeyReused { .. }), "{error}");
    // Keys belong to a parent: with another parent the same key is free.
    let elsewhere = ForkRequest { start: false, at: CutPoint::End, ..request };
    let elsewhere = ForkRequest { parent_session_id: one.session_id, ..elsewhere };
    assert!(!world.store.fork(&elsewhere).await.unwrap().duplicate);
    assert_eq!(
        world.one("select count(*) from conversation_sessions where parent_session_id is not null").await,
        2
    );
}

#[tokio::test]
async fn a_heal_leaves_forks_as_they_are() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let resting = world.store.fork(&resting(&parent_id, "6")).await.unwrap();
    let running = world.store.fork(&at(&parent_id, "6")).await.unwrap();
    let before = world.dump().await;
    for session_id in [&parent_id, &resting.session_id, &running.session_id] {
        assert_eq!(world.store.wake_session(session_id).await.unwrap(), []);
        let rebuilt = world.store.rebuild(session_id).await.unwrap();
        assert!(rebuilt.changes.is_empty() && rebuilt.left.is_empty(), "{rebuilt:?}");
    }
    assert_eq!(world.dump().await, before);
    let mut claims = Claims::start(&world.store, Kind::Step, 1, LEASE);
    assert_eq!(claims.next().await.session_id, Some(running.session_id));
    claims.stop();
}

#[tokio::test]
async fn a_session_of_1000_steps_is_forked_at_500_without_copying_a_blob() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Count.").await;
    // Rows as steps with tools write them: a call with 2 KB of arguments and 2 KB of result.
    let big = "x".repeat(2000);
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!(
        "insert into conversation_records
            (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content)
        select 'default', 'default/c1', 1 + 2 * n, '{session_id}', 'run_1', n, 'assistant',
            json_build_array(json_build_object('type', 'tool_call', 'call_id', 'call_' || n, 'name', 'note',
                'arguments', json_build_object('text', '{big}')))
        from generate_series(1, 1000) n
        union all
        select 'default', 'default/c1', 2 + 2 * n, '{session_id}', 'run_1', n, 'tool',
            json_build_array(json_build_object('type', 'tool_result', 'call_id', 'call_' || n, 'name', 'note',
                'content', '{big}', 'is_error', false))
        from generate_series(1, 1000) n;
        update conversation_sessions set last_message_number = 2002, to_message_number = 2002, last_step_number = 1000
        where session_id = '{session_id}'"
    )))
    .execute(&world.database.pool)
    .await
    .unwrap();
    // This first fork stores the state's blob, which a real session's checkpoint would have stored. The next
    // fork must add none.
    world.store.fork(&resting(&session_id, "step:20")).await.unwrap();
    let blobs = world.count("blobs").await;
    let began = std::time::Instant::now();
    let forked = world.store.fork(&resting(&session_id, "step:500")).await.unwrap();
    eprintln!("forked at step 500 of 1000 in {:?}", began.elapsed());
    assert_eq!(world.count("blobs").await, blobs);
    assert_eq!((forked.at_message_number, forked.moved), (1002, None));
    let child = hydrated(&world, &forked.session_id).await;
    assert_eq!((child.records.len(), child.last_step_number), (1001, 500));
    agrees(&world, &forked.session_id).await;
    let forked = world.store.fork(&resting(&session_id, "1001")).await.unwrap();
    assert_eq!(
        (forked.at_message_number, forked.moved.is_some()),
        (1000, true),
        "before the turn of step 500"
    );
}
