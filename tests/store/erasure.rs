//! An erasure beside those who write: it reads the logs without a lock, and deletes only what stayed unused.

use super::*;
use wakeful_store::erase::Subject;
use wakeful_store::fork::ForkRequest;
use wakeful_store::wake::NewAttachment;
use wakeful_workflow::fork::CutPoint;

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
