//! An erasure beside those who write: it reads the logs without a lock, and deletes only what stayed unused.

use super::*;
use wakeful_store::encryption::Settings;
use wakeful_store::erase::Subject;
use wakeful_store::fork::ForkRequest;
use wakeful_store::wake::{NewAttachment, NewSession};
use wakeful_store::workspace::name_of;
use wakeful_workflow::fork::CutPoint;
use wakeful_workflow::policy::SessionPolicy;

const READS: &str =
    "select exists (select from pg_locks where relation = 'session_events'::regclass and not granted
    and database = (select oid from pg_database where datname = current_database()))";
const DELETES: &str = "select exists (select from pg_locks where relation = 'blobs'::regclass and not granted
    and database = (select oid from pg_database where datname = current_database()))";

#[tokio::test]
async fn an_erasure_reads_the_logs_without_holding_up_those_who_store_files_and_keeps_what_they_store() {
    let world = World::new().await;
    world.database.with_roles().await;
    let file = |bytes: &str| NewAttachment {
        file_name: "list.csv".into(),
        media_type: "text/csv".into(),
        bytes: bytes.as_bytes().to_vec(),
    };
    let files =
        NewMessage { attachments: vec![file("hers alone"), file("stored anew")], ..message("Hello.") };
    world.store.wake(&new_session("c1", "c1"), &files).await.unwrap();
    world.wake("c2", "Another's.").await;
    // The run ends. Before the blobs' turn the erasure waits here, and tells its limit.
    let script = "update conversation_sessions set status = 'completed';
        update session_runs set status = 'completed';
        update conversation_counters set open_run_id = null;
        delete from jobs;
        create table seen (limit_of_statements text);
        create function wait_here() returns trigger language plpgsql security definer set search_path = public as $$
        begin
            insert into seen values (current_setting('statement_timeout'));
            perform pg_advisory_xact_lock(42);
            return null;
        end $$;
        create trigger wait_here before delete on act_links for each statement execute function wait_here()";
    sqlx::raw_sql(script).execute(&world.database.pool).await.unwrap();
    let begin = async || world.database.pool.begin().await.unwrap();
    let (mut gate, mut log, mut sender) = (begin().await, begin().await, begin().await);
    sqlx::query("select pg_advisory_xact_lock(42)").execute(&mut *gate).await.unwrap();
    let conversation = Subject::Conversation("default/c1".into());
    let erasure = world.store.erase("default", &conversation);
    let beside = async {
        world.until(WAITS_HERE).await;
        sqlx::query("lock table session_events in access exclusive mode").execute(&mut *log).await.unwrap();
        gate.commit().await.unwrap();
        world.until(READS).await;
        let locked = "select count(*) from pg_locks where relation = 'blobs'::regclass and mode = 'ShareRowExclusiveLock'
            and database = (select oid from pg_database where datname = current_database())";
        assert_eq!(world.one(locked).await, 0, "it reads, and others may store a blob");
        // Somebody sends one of the files again, and commits after the logs were read.
        sqlx::query(
            "insert into blobs (space_id, sha256, size, media_type, bytes)
            values ('default', encode(sha256('stored anew'), 'hex'), 11, 'text/csv', 'stored anew')
            on conflict (sha256, space_id) do update set touched_at = now()",
        )
        .execute(&mut *sender)
        .await
        .unwrap();
        log.rollback().await.unwrap();
        world.until(DELETES).await;
        sender.commit().await.unwrap();
    };
    let (erased, ()) = tokio::join!(erasure, beside);
    assert_eq!(erased.unwrap().rows["blobs"], 1);
    let prefixes = "select count(*) from blobs b join conversation_sessions s on s.prefix_sha256 = b.sha256";
    assert_eq!(world.one(prefixes).await, 1, "the other's prefix");
    let left = "select count(*) from blobs where convert_from(bytes, 'UTF8') = $1";
    assert_eq!(world.database.value::<i64>(left, "hers alone").await, 0);
    assert_eq!(world.database.value::<i64>(left, "stored anew").await, 1);
    // However long the logs are, reading them ends.
    let limits: Vec<String> = sqlx::query_scalar("select limit_of_statements from seen")
        .fetch_all(&world.database.pool)
        .await
        .unwrap();
    assert_eq!(limits, ["0"]);
}

/// An erasure marks the blobs that it looks for, and reads the logs then. Who stores one of them again takes the mark away.
#[tokio::test]
async fn a_commit_or_a_fork_that_stores_a_blob_keeps_it_from_an_erasure_that_has_read_the_logs() {
    let world = World::new().await;
    let mark = "update blobs set touched_at = '-infinity'";
    let marked = "select count(*) from blobs b where touched_at = '-infinity'
        and exists (select from session_events e where e.payload ->> 'state_sha256' = b.sha256)";
    let mut session_id = String::new();
    for (conversation, left) in [("c1", 1), ("c2", 0)] {
        session_id = world.wake(conversation, "Hello.").await;
        let mut driver = world.drive(&session_id).await;
        driver.continues(Performed::Begun).await;
        driver.commit(replied(vec![text("Hello.")])).await;
        if left == 1 {
            world.run_sql(mark).await;
        }
        assert_eq!(world.one(marked).await, left, "{conversation}");
    }
    world.run_sql(mark).await;
    let fork = ForkRequest { start: false, ..ForkRequest::new(&session_id, CutPoint::End) };
    world.store.fork(&fork).await.unwrap();
    assert_eq!(world.one(marked).await, 0, "the fork begins with the same state");
}

/// Every run ends, so an erasure finds nobody at work.
const ALL_END: &str = "update conversation_sessions set status = 'completed';
    update session_runs set status = 'completed';
    update conversation_counters set open_run_id = null;
    delete from jobs";

/// A worker stores a pack, and commits the row that names it a moment later.
#[tokio::test]
async fn an_erasure_leaves_the_pack_that_another_session_has_just_stored() {
    let world = World::new().await;
    world.database.with_roles().await;
    let (hers, his) = (world.wake("c1", "Hello.").await, world.wake("c2", "Hello.").await);
    let packs: [&[u8]; 2] = [b"of both", b"hers alone"];
    for (session_id, pack) in [(&hers, packs[0]), (&hers, packs[1]), (&his, packs[0])] {
        world.store.put_pack(session_id, &name_of(pack), pack).await.unwrap();
    }
    sqlx::raw_sql(ALL_END).execute(&world.database.pool).await.unwrap();
    world.store.erase("default", &Subject::Conversation("default/c1".into())).await.unwrap();
    assert_eq!(world.store.pack_part(&his, &name_of(packs[0]), 0, 100).await.unwrap(), packs[0]);
    assert!(world.store.pack_part(&his, &name_of(packs[1]), 0, 100).await.is_err(), "the erasure took it");
}

#[tokio::test]
async fn an_erasure_of_a_fork_leaves_the_sealed_pack_that_its_parent_has_just_stored() {
    let world = World::new().await;
    world.database.with_roles().await;
    let keys = crate::support::Database::without_schema().await;
    let settings = Settings { keys: keys.url.clone(), agents: None, master: [7; 32], old_master: None };
    world.store.encrypt(settings).unwrap();
    let parent = world.wake("c1", "Her secret.").await;
    let mut driver = world.drive(&parent).await;
    driver.continues(Performed::Begun).await;
    driver.commit(replied(vec![text("Hello.")])).await;
    let fork = ForkRequest { start: false, ..ForkRequest::new(&parent, CutPoint::End) };
    let forked = world.store.fork(&fork).await.unwrap();
    let packs: [&[u8]; 4] = [b"of the parent", b"of both", b"of the fork", b"of one that was erased before"];
    for (session_id, of) in [(&forked.session_id, &packs[1..]), (&parent, &packs[..2])] {
        for pack in of {
            world.store.put_pack(session_id, &name_of(pack), pack).await.unwrap();
        }
    }
    sqlx::raw_sql(ALL_END).execute(&world.database.pool).await.unwrap();
    let gone = sqlx::query("update sealed_blobs set stored_for = 'sess_gone' where sha256 = $1");
    gone.bind(name_of(packs[3])).execute(&world.database.pool).await.unwrap();
    let of_fork = "select conversation_id from conversation_sessions where session_id = $1";
    let of_fork: String = world.database.value(of_fork, &forked.session_id).await;
    world.store.erase("default", &Subject::Conversation(of_fork)).await.unwrap();
    for pack in &packs[..2] {
        assert_eq!(world.store.pack_part(&parent, &name_of(pack), 0, 100).await.unwrap(), *pack);
    }
    for pack in &packs[2..] {
        let part = world.store.pack_part(&parent, &name_of(pack), 0, 100).await;
        assert!(part.is_err(), "it went with the fork");
    }
}

#[tokio::test]
async fn an_erasure_leaves_the_blobs_of_an_import_that_has_not_written_its_rows() {
    let world = World::new().await;
    world.database.with_roles().await;
    let file = NewAttachment {
        file_name: "list.csv".into(),
        media_type: "text/csv".into(),
        bytes: b"her list".to_vec(),
    };
    let with_file = NewMessage { attachments: vec![file], ..message("Hello.") };
    world.store.wake(&new_session("c1", "c1"), &with_file).await.unwrap();
    let hers = "select session_id from conversation_sessions where conversation_id = $1";
    let hers: String = world.database.value(hers, "default/c1").await;
    let bundle = bundle::export(&world.store, &hers).await;
    let waits = "create function wait_here() returns trigger language plpgsql security definer set search_path = public as $$
        begin perform pg_advisory_xact_lock(42); return new; end $$;
        create trigger wait_here before insert on session_inbox for each row execute function wait_here()";
    sqlx::raw_sql(waits).execute(&world.database.pool).await.unwrap();
    sqlx::raw_sql(ALL_END).execute(&world.database.pool).await.unwrap();
    let mut gate = world.database.pool.begin().await.unwrap();
    sqlx::query("select pg_advisory_xact_lock(42)").execute(&mut *gate).await.unwrap();
    let import = bundle::import(&world.store, &bundle);
    let beside = async {
        world.until(WAITS_HERE).await;
        world.store.erase("default", &Subject::Conversation("default/c1".into())).await.unwrap();
        gate.commit().await.unwrap();
    };
    let (imported, ()) = tokio::join!(import, beside);
    let named =
        "select count(*) from session_inbox i join blobs b on b.sha256 = i.attachments -> 0 ->> 'sha256'
        where i.session_id = $1";
    assert_eq!(world.database.value::<i64>(named, &imported).await, 1);
}

#[tokio::test]
async fn a_collection_takes_what_an_import_left_that_failed_unless_another_row_names_it() {
    let world = World::new().await;
    world.database.with_roles().await;
    let file = NewAttachment {
        file_name: "list.csv".into(),
        media_type: "text/csv".into(),
        bytes: b"his list".to_vec(),
    };
    let with_file = NewMessage { attachments: vec![file], ..message("Hello.") };
    world.store.wake(&new_session("c1", "c1"), &with_file).await.unwrap();
    world
        .run_sql(
            "insert into blobs (space_id, sha256, size, media_type, bytes, stored_for, touched_at)
            select 'default', encode(sha256(convert_to(text, 'UTF8')), 'hex'), length(text), 'text/csv',
                convert_to(text, 'UTF8'), 'sess_' || text, now() - age::interval
            from (values ('old', '2 days'), ('new', '1 minute'), ('his list', '2 days')) as v (text, age)
            on conflict (sha256, space_id) do update
                set stored_for = excluded.stored_for, touched_at = excluded.touched_at",
        )
        .await;
    world.store.collect_blobs(None, Duration::from_secs(3600), false).await.unwrap();
    let left = "select count(*) from blobs where convert_from(bytes, 'UTF8') = $1";
    for (text, count) in [("old", 0), ("new", 1), ("his list", 1)] {
        assert_eq!(world.database.value::<i64>(left, text).await, count, "{text}");
    }
}

/// A mail folds only ASCII of the addresses of its participants.
#[tokio::test]
async fn a_participant_is_erased_and_held_whatever_the_case_of_letters_beyond_ascii() {
    let Some(database) = crate::support::Database::sorted_by_icu().await else { return };
    database.with_roles().await;
    let store = database.store().await;
    let world = World { database, store };
    let policy =
        SessionPolicy { participants: vec!["\u{c4}nn@example.com".to_owned()], ..SessionPolicy::default() };
    let new = NewSession { policy, ..new_session("c1", "c1") };
    world.store.wake(&new, &message("Hello.")).await.unwrap();
    sqlx::raw_sql(ALL_END).execute(&world.database.pool).await.unwrap();
    let person = |name: &str| Subject::Person { name: name.to_owned(), shared: false };
    for name in ["\u{c4}nn@example.com", "\u{e4}nn@example.com", "\u{c4}NN@EXAMPLE.COM"] {
        let hold = world.store.place_hold("default", &person(name), "case 1").await.unwrap();
        let conversation = Subject::Conversation("default/c1".into());
        let refused = world.store.erase("default", &conversation).await.unwrap_err().to_string();
        assert!(refused.contains("case 1"), "{name}: {refused}");
        world.store.release_hold("default", &hold).await.unwrap();
        let plan = world.store.plan_erasure("default", &person(name)).await.unwrap();
        assert_eq!(plan.conversations, ["default/c1"], "{name}");
    }
    world.store.erase("default", &person("\u{e4}nn@example.com")).await.unwrap();
    assert_eq!(world.one("select count(*) from conversation_sessions").await, 0);
}
