//! Batches on their rows: what tries a member dry, what a cancel leaves, and what a list counts.

use super::*;
use sqlx::AssertSqlSafe;
use wakeful_store::batch::{Counts, Steer};

/// A batch in this status, whose members are these sessions. Each is to be tried dry.
async fn batch(world: &World, status: &str, sessions: &[&str]) {
    let members: Vec<String> = sessions.iter().map(|id| format!("'{id}'")).collect();
    let members = members.join(", ");
    let sql = format!(
        "update conversation_sessions set status = 'failed';
        update conversation_counters set open_run_id = null;
        update session_runs set status = 'failed', error = 'it broke';
        delete from jobs;
        insert into batches (batch_id, space_id, verb, filter, status, rate, prove, actor_kind, actor, request_sha256, members)
        values ('batch_1', 'default', 'retry', '{{}}', '{status}', 1, 9, 'cli', 'x', '', {});
        insert into batch_members (batch_id, ordinal, space_id, session_id, stage)
        select 'batch_1', n, 'default', id, 0 from unnest(array[{members}]) with ordinality as m (id, n);
        insert into batch_proofs (batch_id, ordinal, space_id, session_id)
        select batch_id, ordinal, space_id, session_id from batch_members",
        sessions.len()
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.database.pool).await.unwrap();
}

/// A session whose run has begun. The batch's helper makes it fail.
async fn begun(world: &World, conversation: &str) -> String {
    let session_id = world.wake(conversation, "Hello.").await;
    world.drive(&session_id).await.continues(Performed::Begun).await;
    session_id
}

const COPIES: &str = "select count(*) from conversation_sessions where trigger_type = 'replay'";
const CANCELLED: &str = "select count(*) from conversation_sessions
    where trigger_type = 'replay' and (cancel_requested or status = 'cancelled')";

async fn turn(world: &World) {
    world.run_sql("update batches set next_at = clock_timestamp()").await;
    let turn = world.store.work_on_batch().await.unwrap();
    assert_eq!(turn.batch_id.as_deref(), Some("batch_1"));
}

#[tokio::test]
async fn a_member_whose_key_cannot_be_had_holds_up_no_other_and_counts_as_failed_in_the_end() {
    let world = World::new().await;
    let (sealed, clear) = (begun(&world, "c1").await, begun(&world, "c2").await);
    batch(&world, "proving", &[&sealed, &clear]).await;
    // This process has no [encryption].
    let seal = "update conversation_sessions set data_key = '0123456789abcdef' where session_id = $1";
    sqlx::query(seal).bind(&sealed).execute(&world.database.pool).await.unwrap();
    // A turn takes one member, and the first is tried again in the third turn.
    for copies in [0, 1, 1] {
        turn(&world).await;
        assert_eq!(world.one(COPIES).await, copies);
    }
    let open = "select count(*) from batch_proofs where result is null and ordinal = 1";
    assert_eq!(world.one(open).await, 1, "the key store may be back soon");
    world.run_sql("update batch_proofs set tried_since = tried_since - interval '1 hour'").await;
    turn(&world).await;
    let failed = "select count(*) from batch_proofs
        where ordinal = 1 and result = 'failed' and error like 'it cannot be tried: %[encryption]%'";
    assert_eq!(world.one(failed).await, 1);
}

#[tokio::test]
async fn a_member_that_cannot_be_acted_on_without_its_key_holds_up_no_other_and_is_acted_on_when_it_is_back()
{
    let world = World::new().await;
    let (sealed, clear) = (begun(&world, "c1").await, begun(&world, "c2").await);
    batch(&world, "running", &[&sealed, &clear]).await;
    // This process has no [encryption].
    let key = async |key: Option<&str>| {
        let sql = "update conversation_sessions set data_key = $2 where session_id = $1";
        sqlx::query(sql).bind(&sealed).bind(key).execute(&world.database.pool).await.unwrap();
    };
    key(Some("0123456789abcdef")).await;
    // A turn acts on one member.
    turn(&world).await;
    let waits = "select count(*) from batch_members
        where ordinal = 1 and outcome = 'pending' and detail like 'key store: %[encryption]%'";
    assert_eq!(world.one(waits).await, 1);
    turn(&world).await;
    let acted = "select count(*) from batch_members where outcome = 'acted'";
    assert_eq!((world.one(acted).await, world.one(waits).await), (1, 1));
    key(None).await;
    world.run_sql("update batch_members set tried_at = tried_at - interval '1 hour'").await;
    turn(&world).await;
    let said = "select count(*) from batch_members where detail is not null";
    assert_eq!((world.one(acted).await, world.one(said).await), (2, 0));
}

#[tokio::test]
async fn a_copy_that_begins_while_its_batch_is_cancelled_is_cancelled_too() {
    let world = World::new().await;
    let session_id = begun(&world, "c1").await;
    batch(&world, "proving", &[&session_id]).await;
    let wait = "create function wait_here() returns trigger language plpgsql as $$
        begin perform pg_advisory_xact_lock(42); return null; end $$;
        create trigger wait_here before update of copy_session_id on batch_proofs for each statement execute function wait_here()";
    sqlx::raw_sql(wait).execute(&world.database.pool).await.unwrap();
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query("select pg_advisory_xact_lock(42)").execute(&mut *holder).await.unwrap();
    let beside = async {
        // The copy is there, and is not noted yet.
        world.until(WAITS_HERE).await;
        assert_eq!(world.one(COPIES).await, 1);
        let cancelled = world.store.steer_batch(None, "batch_1", Steer::Cancel, None).await.unwrap();
        assert_eq!(cancelled.status, "cancelled");
        holder.rollback().await.unwrap();
    };
    let (turn, ()) = tokio::join!(world.store.work_on_batch(), beside);
    turn.unwrap();
    assert_eq!((world.one(COPIES).await, world.one(CANCELLED).await), (1, 1));
}

#[tokio::test]
async fn a_cancel_that_died_before_it_ended_the_copies_ends_them_when_it_is_asked_again() {
    let world = World::new().await;
    let session_id = begun(&world, "c1").await;
    batch(&world, "proving", &[&session_id]).await;
    turn(&world).await;
    world.run_sql("update batches set status = 'cancelled'").await;
    assert_eq!((world.one(COPIES).await, world.one(CANCELLED).await), (1, 0));
    world.store.steer_batch(None, "batch_1", Steer::Cancel, None).await.unwrap();
    assert_eq!(world.one(CANCELLED).await, 1);
}

#[tokio::test]
async fn the_counts_of_a_batch_that_has_ended_are_written_down_and_are_not_counted_again() {
    for cancel in [false, true] {
        let world = World::new().await;
        let ids = [begun(&world, "c1").await, begun(&world, "c2").await];
        batch(&world, "running", &[&ids[0], &ids[1]]).await;
        world.run_sql("update batch_members set outcome = 'acted', run_id = 'none' where ordinal = 1").await;
        let mut counts = Counts { acted: 1, pending: 1, open: 1, ..Counts::default() };
        if cancel {
            world.store.steer_batch(None, "batch_1", Steer::Cancel, None).await.unwrap();
        } else {
            world.run_sql("update batch_members set outcome = 'refused' where ordinal = 2").await;
            turn(&world).await;
            counts = Counts { acted: 1, refused: 1, ..Counts::default() };
        }
        let ended = world.store.batch(None, "batch_1").await.unwrap();
        assert_eq!(
            (ended.status.as_str(), ended.counts),
            (if cancel { "cancelled" } else { "done" }, counts)
        );
        world.run_sql("delete from batch_members").await;
        assert_eq!(world.store.batches(None, None, None, 9).await.unwrap()[0].counts, counts);
    }
}
