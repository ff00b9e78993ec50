//! What happens beside an erasure: a fork that commits late, and bundles that were taken before.

use super::{World, everything, found, planted};
use crate::support::eventually;
use serde_json::{Value, json};

#[tokio::test]
async fn a_fork_that_commits_while_its_parent_is_erased_is_erased_too() {
    let world = World::new().await;
    world.database.with_roles().await;
    let first = world.chat("c1", json!({"text": planted(1), "user_id": "ann"})).await;
    // A fork writes its journal last: it has copied the messages, and waits here.
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query("lock table session_events in share mode").execute(&mut *holder).await.unwrap();
    let waits = async |count: i64| {
        eventually("it waits", || async {
            let sql = "select count(distinct pid) from pg_locks where not granted and $1 <> ''
                and database = (select oid from pg_database where datname = current_database())";
            (world.database.value::<i64>(sql, "x").await >= count).then_some(())
        })
        .await;
    };
    let fork = async {
        let fork = json!({"at": "end", "start": false});
        world.client.post(&format!("/v1/sessions/{first}/fork"), &fork).await
    };
    let erasure = async {
        waits(1).await;
        world.run(&["conversation", "erase", "c1", "--yes"]).await
    };
    let release = async {
        waits(2).await;
        holder.rollback().await.unwrap();
    };
    let ((status, forked), erased, ()) = tokio::join!(fork, erasure, release);
    assert!(status.is_success(), "{forked}");
    assert_eq!(erased.0, Some(0), "{erased:?}");
    assert_eq!(found(&everything(&world.database).await), Vec::<usize>::new());
    // A fork that comes later finds nothing.
    let (status, _) = world.client.post(&format!("/v1/sessions/{first}/fork"), &json!({})).await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn an_erasure_and_its_receipt_name_the_bundles_that_were_taken() {
    let world = World::new().await;
    world.database.with_roles().await;
    let id = world.chat("c1", json!({"text": planted(1), "user_id": "ann"})).await;
    let other = world.chat("c2", json!({"text": "Hi", "user_id": "bob"})).await;
    for session in [&id, &other] {
        let export = world.client.get_request(&format!("/v1/sessions/{session}/export?redact=true"));
        let export = export.header("X-Internal-Token", "an internal token of the test").send().await.unwrap();
        assert!(export.text().await.unwrap().ends_with("\"}\n"));
    }
    let file = world.options.path("ann.jsonl").display().to_string();
    let (status, _, said) =
        world.run(&["session", "export", &id, "--file", &file, "--as", "operator eve"]).await;
    assert_eq!(status, Some(0), "{said}");
    // What is not there was not taken.
    assert_eq!(world.run(&["session", "export", "sess_none", "--file", &file]).await.0, Some(3));
    let (_, plan, _) = world.run(&["conversation", "erase", "c1", "--dry-run", "-o", "json"]).await;
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let (status, told, said) = world.run(&["conversation", "erase", "c1", "--yes"]).await;
    assert_eq!(status, Some(0), "{said}");
    assert!(told.contains("operator eve took") && told.contains(&file), "{told}");
    assert!(told.contains("an internal token took") && told.contains("from 127.0.0.1"), "{told}");
    let exports: Value =
        world.database.value("select exports from erasures where pending is null and $1 <> ''", "x").await;
    assert_eq!(exports, plan["exports"]);
    let who: Vec<_> =
        exports.as_array().unwrap().iter().map(|one| (&one["session_id"], &one["actor"])).collect();
    assert_eq!(who, [(&json!(id), &json!("an internal token")), (&json!(id), &json!("operator eve"))]);
    assert!(exports.to_string().contains("redacted"), "{exports}");
}

#[tokio::test]
async fn an_erasure_that_cannot_be_finished_keeps_no_other_from_beginning() {
    let world = World::new().await;
    world.database.with_roles().await;
    let id = world.chat("c1", json!({"text": planted(1), "user_id": "ann"})).await;
    // What is left of an earlier one cannot be read.
    let stuck = "insert into erasures (erasure_id, space_id, subject_sha256, pending)
        values ('erase_0', 'default', 'x', '{\"conversations\": 5}')";
    sqlx::raw_sql(stuck).execute(&world.database.pool).await.unwrap();
    let (status, told, said) = world.run(&["conversation", "erase", "c1", "--yes"]).await;
    assert_eq!(status, Some(0), "{told} {said}");
    assert!(said.contains("erase_0") && said.contains("is not finished"), "{said}");
    let days = [("WAKEFUL_RETENTION__ENDED_DAYS", "90")];
    let (status, _, said) = world.run_with(&["retention", "run"], &days).await;
    assert_eq!((status, said.contains("erase_0")), (Some(0), true), "{said}");
    assert_eq!(world.client.get(&format!("/v1/sessions/{id}")).await.0, 404);
    let pending: Vec<String> =
        sqlx::query_scalar("select erasure_id from erasures where pending is not null")
            .fetch_all(&world.database.pool)
            .await
            .unwrap();
    assert_eq!(pending, ["erase_0"]);
}

#[tokio::test]
async fn an_erasure_that_waits_for_the_blobs_keeps_no_conversation_from_beginning() {
    let world = World::new().await;
    world.database.with_roles().await;
    world.chat("c1", json!({"text": planted(1), "user_id": "ann"})).await;
    // As a vacuum does, for hours if the table is large.
    let mut vacuum = world.database.pool.begin().await.unwrap();
    sqlx::query("lock table blobs in share update exclusive mode").execute(&mut *vacuum).await.unwrap();
    let erasure = async { world.run(&["conversation", "erase", "c1", "--yes"]).await };
    let beside = async {
        eventually("it asks for the lock", || async {
            let sql = "select count(*) from pg_locks where relation = 'blobs'::regclass and not granted and $1 <> ''";
            (world.database.value::<i64>(sql, "x").await > 0).then_some(())
        })
        .await;
        let message = json!({"text": "Hi", "user_id": "bob"});
        let (status, begun) = world.client.post("/v1/chat/c2/messages", &message).await;
        world.client.wait_for(begun["session_id"].as_str().unwrap_or_default(), "completed").await;
        vacuum.rollback().await.unwrap();
        status
    };
    let (erased, status) = tokio::join!(erasure, beside);
    assert!(status.is_success(), "{status}");
    assert_eq!(erased.0, Some(0), "{erased:?}");
}
