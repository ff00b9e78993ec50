//! What an operator looks at first: counts of open and troubled sessions, and the queue's last day.

use super::*;
use wakeful_store::wake::NewSession;
use wakeful_workflow::access::Reach;

async fn counts(world: &World, reach: &Reach) -> Vec<(String, i64)> {
    let counted = world.store.count_sessions(reach).await.unwrap();
    counted.into_iter().map(|one| (one.status, one.count)).collect()
}

#[tokio::test]
async fn open_and_troubled_sessions_are_counted_and_replays_and_others_are_not() {
    let world = World::new().await;
    for (name, trigger_type) in [("a", "chat"), ("b", "chat"), ("c", "email"), ("d", "replay"), ("e", "chat")]
    {
        let new = NewSession { trigger_type: trigger_type.into(), ..new_session(name, name) };
        world.store.wake(&new, &message("hello")).await.unwrap();
    }
    for (name, status) in [("a", "failed"), ("c", "needs_attention"), ("d", "failed"), ("e", "completed")] {
        sqlx::query("update conversation_sessions set status = $2 where trigger_id = $1")
            .bind(name)
            .bind(status)
            .execute(&world.database.pool)
            .await
            .unwrap();
    }
    let one = |status: &str| (status.to_owned(), 1);
    let all = [one("failed"), one("needs_attention"), one("queued")];
    assert_eq!(counts(&world, &Reach::default()).await, all);
    let space = |space: &str| Reach { space_id: Some(space.to_owned()), ..Reach::default() };
    assert_eq!(counts(&world, &space("default")).await, all);
    assert_eq!(counts(&world, &space("elsewhere")).await, []);
    let of_another = Reach { agent: Some("missing".to_owned()), ..Reach::default() };
    assert_eq!(counts(&world, &of_another).await, []);
}

#[tokio::test]
async fn the_queue_is_written_down_once_a_minute_and_old_minutes_are_forgotten() {
    let world = World::new().await;
    world.store.wake(&new_session("a", "a"), &message("hello")).await.unwrap();
    let samples = "insert into queue_samples select now() - age, 7, 0, 0, 1.5 \
        from unnest(array['3 days', '30 hours', '1 hour']::interval[]) age";
    sqlx::query(samples).execute(&world.database.pool).await.unwrap();
    for _ in 0..3 {
        world.store.sample_queue().await.unwrap();
    }
    let history = world.store.queue_history().await.unwrap();
    let ready: Vec<i64> = history.iter().map(|one| one.ready).collect();
    // A minute may pass between the three.
    assert!(ready == [7, 1] || ready == [7, 1, 1], "{history:?}");
    assert!(world.count("queue_samples").await <= 4, "that of three days ago is gone");
}
