//! A key store that several use for the first time.

use super::*;
use crate::support::Database;
use wakeful_store::encryption::Settings;
use wakeful_store::wake::NewSession;

#[tokio::test]
async fn the_first_two_keys_of_an_installation_may_be_made_at_once() {
    let world = World::new().await;
    let keys = Database::without_schema().await;
    let settings = || Settings { keys: keys.url.clone(), agents: None, master: [7; 32], old_master: None };
    // Its tables are there, and it is nobody's.
    world.store.encrypt(settings()).unwrap();
    assert!(world.store.prune_keys(true).await.unwrap().is_empty());
    let owner: String = sqlx::query_scalar("delete from wakeful_key_store returning owner")
        .fetch_one(&keys.pool)
        .await
        .unwrap();

    let other = world.database.store().await;
    other.encrypt(settings()).unwrap();
    // Another process has seen that it is nobody's, and looks whether it has keys.
    let mut first = keys.pool.begin().await.unwrap();
    sqlx::query("lock table wakeful_data_keys in access exclusive mode").execute(&mut *first).await.unwrap();
    let woken = tokio::spawn(async move { other.wake(&new_session("c1", "c1"), &message("Hello.")).await });
    eventually("the look", || async {
        let waits =
            "select exists (select from pg_locks where relation = 'wakeful_data_keys'::regclass and not granted)";
        sqlx::query_scalar::<_, bool>(waits).fetch_one(&keys.pool).await.unwrap().then_some(())
    })
    .await;
    // Meanwhile this one claims it, and makes its first key.
    sqlx::query("insert into wakeful_key_store (owner) values ($1)")
        .bind(&owner)
        .execute(&mut *first)
        .await
        .unwrap();
    sqlx::query(
        "insert into wakeful_data_keys (key_id, owner_sha256, master_id, wrapped) values ('k', 'o', 'm', '')",
    )
    .execute(&mut *first)
    .await
    .unwrap();
    first.commit().await.unwrap();
    woken.await.unwrap().unwrap();
}

/// Few connections are for messages, and none of them waits for a key.
#[tokio::test]
async fn a_key_store_that_hangs_keeps_no_message_of_another_conversation_out() {
    let world = World::new().await;
    world.wake("clear", "Hello.").await;
    let keys = Database::without_schema().await;
    let agents = Some(vec!["secret".to_owned()]);
    world
        .store
        .encrypt(Settings { keys: keys.url.clone(), agents, master: [7; 32], old_master: None })
        .unwrap();
    assert!(world.store.prune_keys(true).await.unwrap().is_empty(), "its tables are there");
    let mut hangs = keys.pool.begin().await.unwrap();
    let lock = "lock table wakeful_key_store, wakeful_data_keys in access exclusive mode";
    sqlx::query(lock).execute(&mut *hangs).await.unwrap();
    let secret = |n: usize| {
        let store = world.store.clone();
        async move {
            let new =
                NewSession { agent: "secret".into(), ..new_session(&format!("s{n}"), &format!("s{n}")) };
            store.wake(&new, &message("Her secret.")).await
        }
    };
    let hanging: Vec<_> = (0..30).map(|n| tokio::spawn(secret(n))).collect();
    eventually("a key is asked for", || async {
        let waits = "select exists (select from pg_locks where relation = 'wakeful_key_store'::regclass and not granted)";
        sqlx::query_scalar::<_, bool>(waits).fetch_one(&keys.pool).await.unwrap().then_some(())
    })
    .await;
    for conversation in ["clear", "another"] {
        world.store.wake(&new_session(conversation, conversation), &message("And now?")).await.unwrap();
    }
    for refused in join_all(hanging).await {
        assert!(matches!(refused.unwrap(), Err(Error::Keys { .. })));
    }
    hangs.rollback().await.unwrap();
    eventually("the key store is asked again", || async { secret(30).await.ok() }).await;
}
