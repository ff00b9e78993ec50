//! A copy that a worker keeps between two turns: when it has caught up it equals hydration, or it is refused.

mod history;
mod tail;

use super::*;
use crate::support::recorder::Recorder;
use crate::support::{Database, Server};
use wakeful_store::encryption::Settings;
use wakeful_store::erase::Subject;
use wakeful_store::hydrate::Warm;
use wakeful_store::wake::NewSession;
use wakeful_workflow::seed::Seed;

/// A session that has ended its first turn, and the copy of the worker that ended it.
async fn turn(world: &World, conversation: &str) -> (String, Warm) {
    let session_id = world.wake(conversation, "Her secret.").await;
    let copy = answer(world, &session_id, "Kept well.").await;
    (session_id, copy)
}

async fn answer(world: &World, session_id: &str, says: &str) -> Warm {
    let mut driver = world.drive(session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text(says)])).await, Commit::Closed { opened: false });
    world.store.hydrate_to_keep(session_id).await.unwrap().keep().expect("nothing is sealed")
}

/// Catches up, and compares with hydration. Returns whether the copy was good.
async fn is_good(world: &World, copy: &Warm) -> bool {
    let caught_up = world.store.catch_up(copy.clone()).await.unwrap();
    if let Some(caught_up) = &caught_up {
        let cold = world.store.hydrate(copy.session_id().as_str()).await.unwrap();
        assert_eq!(caught_up.session, cold);
    }
    caught_up.is_some()
}

#[tokio::test]
async fn catching_up_takes_one_statement_and_reads_no_message_again_but_the_last() {
    let world = World::new().await;
    let (session_id, copy) = turn(&world, "c1").await;
    world.send(&session_id, "And now?").await;
    answer(&world, &session_id, "As before.").await;
    let recorder = Recorder::start(&world.database.url);
    let store = Store::connect(&recorder.url, 2, "wakeful test").await.unwrap();
    let read = |rows: &str| rows.matches("secret").count() + rows.matches("Kept well").count();
    store.hydrate(&session_id).await.unwrap();
    recorder.take();
    let caught_up = store.catch_up(copy).await.unwrap().expect("it is good");
    let sent = recorder.take();
    let statements: Vec<&str> = sent.iter().filter(|one| !one.is_ping).map(|one| &*one.sql).collect();
    assert_eq!(statements.len(), 1, "{statements:#?}");
    assert_eq!(caught_up.session, world.store.hydrate(&session_id).await.unwrap());
    // The same statement, as Postgres runs it: the messages before the copy's last one are not read.
    assert!(statements[0].contains("m.message_number >= $2"), "{}", statements[0]);
    assert_eq!(read(&format!("{:?}", caught_up.session.records)), 2);
}

#[tokio::test]
async fn an_outline_that_was_kept_and_brought_up_to_date_is_that_of_a_cold_read() {
    let world = World::new().await;
    let (session_id, _) = turn(&world, "c1").await;
    let outline =
        world.store.hydrate_outlined(&session_id, None).await.unwrap().keep().expect("nothing is sealed");
    world.send(&session_id, "And now?").await;
    answer(&world, &session_id, "As before.").await;
    let recorder = Recorder::start(&world.database.url);
    let store = Store::connect(&recorder.url, 2, "wakeful test").await.unwrap();
    let cold = store.hydrate_outlined(&session_id, None).await.unwrap();
    assert!(
        cold.session.records.iter().all(|record| record.content.is_empty() && record.content.bytes() > 0)
    );
    recorder.take();
    let warm = store.hydrate_outlined(&session_id, Some(outline.clone())).await.unwrap();
    let statements: Vec<String> =
        recorder.take().into_iter().filter(|one| !one.is_ping).map(|one| one.sql).collect();
    assert!(statements.len() == 1 && statements[0].contains("m.message_number >= $2"), "{statements:#?}");
    assert_eq!(warm.session, cold.session);
    // One that is outdated is read anew.
    world.run_sql("update conversation_sessions set seed_message_count = seed_message_count + 1").await;
    let again = store.hydrate_outlined(&session_id, Some(outline)).await.unwrap();
    assert_eq!((recorder.take().iter().filter(|one| !one.is_ping).count(), again.session), (2, cold.session));
}

#[tokio::test]
async fn what_was_erased_is_not_served_from_memory_although_its_session_was_made_again() {
    let world = World::new().await;
    world.database.with_roles().await;
    let (session_id, copy) = turn(&world, "c1").await;
    assert!(is_good(&world, &copy).await);
    let outline = world.store.hydrate_outlined(&session_id, None).await.unwrap().keep();
    let script = "create table kept_sessions as select * from conversation_sessions;
        create table kept_seeds as select * from session_seed_messages;
        create table kept_counters as select * from conversation_counters;
        create table kept_records as select * from conversation_records;
        create table kept_blobs as select * from blobs";
    sqlx::raw_sql(script).execute(&world.database.pool).await.unwrap();
    world.store.erase("default", &Subject::Conversation("default/c1".into())).await.unwrap();
    assert!(!is_good(&world, &copy).await, "there is no session");
    assert!(matches!(world.store.hydrate(&session_id).await, Err(Error::NotFound { .. })));

    // The same ids, numbers and last message, and other words before it.
    let script = "alter table kept_sessions drop column ordinal;
        do $$ declare columns text; begin
            select string_agg(quote_ident(column_name), ', ') into columns from information_schema.columns
            where table_name = 'kept_sessions';
            execute format('insert into conversation_sessions (%1$s) select %1$s from kept_sessions', columns);
        end $$;
        insert into session_seed_messages select * from kept_seeds;
        insert into conversation_counters select * from kept_counters;
        insert into blobs select * from kept_blobs;
        insert into conversation_records select * from kept_records where role = 'assistant';
        update kept_records set content = replace(content::text, 'Her secret.', 'Nothing.')::json;
        insert into conversation_records select * from kept_records where role = 'user'";
    sqlx::raw_sql(script).execute(&world.database.pool).await.unwrap();
    let again = world.store.hydrate(&session_id).await.unwrap();
    assert_eq!(
        again.records.iter().map(|record| record.text()).collect::<Vec<_>>(),
        ["Nothing.", "Kept well."]
    );
    assert!(!is_good(&world, &copy).await, "it has the erased message");
    let outlined = async |copy| world.store.hydrate_outlined(&session_id, copy).await.unwrap().session;
    assert_eq!(outlined(outline).await, outlined(None).await);
}

#[tokio::test]
async fn a_copy_of_other_seeds_or_of_another_prefix_is_refused() {
    let world = World::new().await;
    let (_, copy) = turn(&world, "c1").await;
    // As a chat about a notice gets the notice's texts.
    world
        .run_sql(
            "with more as (update conversation_sessions set seed_message_count = seed_message_count + 1 returning *)
            insert into session_seed_messages (space_id, session_id, ordinal, role, content)
            select space_id, session_id, 1, 'user', 'A notice.' from more",
        )
        .await;
    assert!(!is_good(&world, &copy).await);
    let copy = world.store.hydrate_to_keep(copy.session_id().as_str()).await.unwrap().keep().unwrap();
    assert!(is_good(&world, &copy).await);
    world.run_sql("update conversation_sessions set policy = '{\"context\": {\"high\": 9}}'").await;
    assert!(is_good(&world, &copy).await, "the policy is read");
    world.run_sql("create table kept_blobs as select * from blobs").await;
    world.run_sql("delete from blobs").await;
    assert!(world.store.catch_up(copy.clone()).await.unwrap().is_none(), "no prefix");
    world.run_sql("insert into blobs select * from kept_blobs").await;
    assert!(is_good(&world, &copy).await);
    let seeds = vec![Seed { role: Role::System, content: "You are another.".into(), is_new: true }];
    let other = NewSession { seeds, ..new_session("c2", "c2") };
    world.store.wake(&other, &message("Hello.")).await.unwrap();
    let pinned = "update conversation_sessions s set prefix_sha256 = other.prefix_sha256
        from conversation_sessions other where other.conversation_id = 'default/c2'";
    world.run_sql(pinned).await;
    assert!(!is_good(&world, &copy).await, "another prefix");
}

#[tokio::test]
async fn a_copy_from_before_a_dump_was_restored_is_refused() {
    let world = World::new().await;
    let (_, copy) = turn(&world, "c1").await;
    let script = "alter table conversation_sessions rename to before;
        create table conversation_sessions (like before including all);
        do $$ declare columns text; begin
            select string_agg(quote_ident(column_name), ', ') into columns from information_schema.columns
            where table_name = 'before' and is_generated = 'NEVER';
            execute format('insert into conversation_sessions (%1$s) select %1$s from before', columns);
        end $$";
    sqlx::raw_sql(script).execute(&world.database.pool).await.unwrap();
    assert!(!is_good(&world, &copy).await);
}

// A server that takes over may lack the last commits of the one before, and then gets others.
#[tokio::test]
async fn a_copy_of_commits_that_a_failover_lost_is_refused() {
    let mut server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let store = database.store().await;
    let world = World { database, store };
    let (session_id, copy) = turn(&world, "c1").await;
    let before = copy.clone();
    assert!(is_good(&world, &before).await);
    // The last message is lost, and said otherwise.
    let script = "begin;
        set local session_replication_role = replica;
        update conversation_records set content = replace(content::text, 'Kept well.', 'Kept.')::json;
        commit";
    sqlx::raw_sql(script).execute(&world.database.pool).await.unwrap();
    assert!(!is_good(&world, &copy).await, "the last message is another");
    let script = "begin;
        set local session_replication_role = replica;
        update conversation_records set content = replace(content::text, 'Kept.', 'Kept well.')::json;
        commit";
    sqlx::raw_sql(script).execute(&world.database.pool).await.unwrap();
    assert!(is_good(&world, &copy).await);
    world.run_sql("update conversation_sessions set (last_message_number, to_message_number) = (2, 2)").await;
    assert!(!is_good(&world, &copy).await, "the last message is lost");
    world.store.rebuild(&session_id).await.unwrap();
    assert!(is_good(&world, &copy).await);

    // An earlier message is another, and the last one is the same.
    server.restart().await;
    let world = World { store: world.database.store().await, database: world.database };
    let script = "begin;
        set local session_replication_role = replica;
        update conversation_records set content = replace(content::text, 'Her secret.', 'Nothing.')::json;
        commit";
    sqlx::raw_sql(script).execute(&world.database.pool).await.unwrap();
    assert!(!is_good(&world, &copy).await, "another server, as far as anybody knows");
    let copy = world.store.hydrate_to_keep(&session_id).await.unwrap().keep().unwrap();
    assert!(is_good(&world, &copy).await);
}

#[tokio::test]
async fn a_session_whose_texts_are_sealed_is_never_kept() {
    let world = World::new().await;
    let keys = tempfile::tempdir().unwrap();
    let (clear, copy) = turn(&world, "c1").await;
    world
        .store
        .encrypt(Settings {
            keys: keys.path().display().to_string(),
            agents: None,
            master: [7; 32],
            old_master: None,
        })
        .unwrap();
    assert!(is_good(&world, &copy).await, "it began in clear");
    let session_id = world.wake("c2", "Her secret.").await;
    assert_ne!(session_id, clear);
    let hydrated = world.store.hydrate_to_keep(&session_id).await.unwrap();
    assert_eq!(hydrated.session.records[0].text(), "Her secret.");
    assert!(hydrated.keep().is_none());
}

#[tokio::test]
async fn a_copy_weighs_what_it_holds() {
    let world = World::new().await;
    let (session_id, copy) = turn(&world, "c1").await;
    let small = copy.bytes();
    assert!((500..4000).contains(&small), "{small}");
    world.send(&session_id, &"m".repeat(100_000)).await;
    let reserve = call("call_1", "reserve");
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.continues(replied(vec![asks(&reserve)])).await;
    let details = json!({"type": "seen", "what": ["x".repeat(50_000)]});
    driver
        .continues(Performed::Called(vec![performed(&reserve, done(&"r".repeat(5_000), Some(details)))]))
        .await;
    let caught_up = world.store.catch_up(copy).await.unwrap().expect("it is good").keep().unwrap().bytes();
    let cold = world.store.hydrate_to_keep(&session_id).await.unwrap().keep().unwrap().bytes();
    assert_eq!(caught_up, cold, "weighed in parts or at once");
    assert!((155_000..160_000).contains(&(cold - small)), "{}", cold - small);
}
