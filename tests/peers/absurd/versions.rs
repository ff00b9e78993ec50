//! Older versions of Absurd, and the slim shape: each filled by its own SDK.

use super::stage::{Peer, Version, absurd, command, model, options};
use super::{Database, session_of};
use serde_json::json;

/// What `get_schema_version` says, and what `scripts/setup peers` has of that version. `main` has the tables of 0.4: its last
/// migration in the project's repository is named after that.
const VERSIONS: [(&str, Version); 5] = [
    ("0.1 or older", Version { sdk: "absurd-0.1", sql: "0.1.sql" }),
    ("0.2.0", Version { sdk: "absurd-0.2", sql: "0.2.sql" }),
    ("0.3.0", Version { sdk: "absurd-0.3", sql: "0.3.sql" }),
    ("0.4.0", Version { sdk: "absurd-0.4", sql: "0.4.sql" }),
    ("main", Version { sdk: "absurd-0.4", sql: "main.sql" }),
];

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn tasks_of_each_older_version_come_over_are_equal_and_go_back() {
    for (word, version) in VERSIONS {
        let (mut peer, database, model) = (Peer::of(version).await, Database::new().await, model().await);
        peer.fill(40).await;
        let options = options(&model);
        let over = peer.count("select (select count(*) from absurd.t_default where state in ('completed', 'failed', 'cancelled')) + (select count(*) from absurd.t_parted where state in ('completed', 'failed', 'cancelled'))").await;
        assert!(over > 40, "{word}");

        let scan = absurd(&options, &peer, &database, &["scan"]).await;
        assert_eq!((scan.code, &scan.json["version"]), (Some(0), &json!(word)), "{}", scan.errors);
        let parted = scan.json["queues"].as_array().unwrap().iter().find(|queue| queue["name"] == "parted");
        assert_eq!(parted.unwrap()["partitioned"], json!(version.sdk == "absurd-0.4"), "{word}");
        let imported = absurd(&options, &peer, &database, &["import"]).await;
        // One task is no agent.
        assert_eq!(
            (imported.code, &imported.json["imported"], &imported.json["open"], &imported.json["running"]),
            (Some(1), &json!(over - 1), &json!(7), &json!(1)),
            "{word}: {}{}",
            imported.json,
            imported.errors
        );
        let verified = absurd(&options, &peer, &database, &["verify"]).await;
        assert_eq!(
            (verified.code, &verified.json["equal"]),
            (Some(0), &json!(over - 1)),
            "{word}: {}{}",
            verified.json,
            verified.errors
        );
        let keys = peer.count("select (select count(idempotency_key) from absurd.t_default where state = 'completed') + (select count(idempotency_key) from absurd.t_parted where state = 'completed')").await;
        let here: i64 = database
            .value("select count(idempotency_key) from absurd_imports where source like $1", "absurd:%")
            .await;
        assert_eq!((keys, here), (7, 7), "{word}");

        // The open ones of one name: taken, and given back as they were.
        let rows = "select string_agg(concat_ws(' ', r.run_id, r.state, r.available_at, r.claimed_by, r.wake_event, t.state, t.cancellation), ',' order by r.run_id)
            from absurd.r_default r join absurd.t_default t on t.task_id = r.task_id where $1 <> ''";
        let before: String = peer.database.value(rows, "all").await;
        let of = ["weather-agent", "--queue", "default"];
        let taken =
            absurd(&options, &peer, &database, &[&["take"][..], &of, &["--wait", "0"]].concat()).await;
        assert_eq!(taken.json["imported"], 3, "{word}: {}{}", taken.json, taken.errors);
        assert_ne!(peer.database.value::<String>(rows, "all").await, before, "{word}");
        assert_eq!(absurd(&options, &peer, &database, &["verify"]).await.code, Some(0), "{word}");
        let back = absurd(&options, &peer, &database, &[&["back"][..], &of].concat()).await;
        assert_eq!(back.json["returned"], 3, "{word}: {}{}", back.json, back.errors);
        assert_eq!(peer.database.value::<String>(rows, "all").await, before, "{word}");
        let ours = command(&options, &database, &["session", "verify", "--all"]).await;
        assert_eq!(ours.code, Some(0), "{word}: {}", ours.json);
        println!("{word}: {} of {over} tasks are equal, 3 were taken and given back", over - 1);
    }
}

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn slim_steps_come_with_their_messages_from_the_programs_own_table() {
    let (mut peer, database, model) = (Peer::new().await, Database::new().await, model().await);
    peer.ids = peer.node("slim", &[]).await;
    // Without `records_sql`, the reason says what is missing.
    let refused = absurd(&options(&model), &peer, &database, &["import"]).await;
    assert_eq!((refused.code, &refused.json["imported"]), (Some(1), &json!(0)), "{}", refused.json);
    let reasons = refused.json["cannot_come"].to_string();
    assert!(reasons.contains("set `records_sql`"), "{reasons}");

    let options = options(&model).config(
        "[absurd.tasks.reply-slim]\nrecords_sql = \"select body from conversation_records where conversation_id = $1 and message_number > $2 and message_number <= $3 order by message_number\"",
    );
    let imported = absurd(&options, &peer, &database, &["import"]).await;
    assert_eq!(
        (imported.code, &imported.json["imported"]),
        (Some(0), &json!(4)),
        "{}{}",
        imported.json,
        imported.errors
    );
    let verified = absurd(&options, &peer, &database, &["verify"]).await;
    assert_eq!((verified.code, &verified.json["equal"]), (Some(0), &json!(4)), "{}", verified.json);
    // Each task has its own question and its own turns, and none of an earlier task.
    for i in 0..4 {
        let session = session_of(&database, peer.id(&format!("slim {i}"))).await;
        let (count, texts): (i64, String) = sqlx::query_as(
            "select count(*), string_agg(content::text, ' ' order by message_number) from conversation_records where session_id = $1",
        )
        .bind(&session)
        .fetch_one(&database.pool)
        .await
        .unwrap();
        assert_eq!(count, 1 + 2 * (10 + i) + 1, "{texts}");
        let others =
            (0..4).filter(|&other| other != i && texts.contains(&format!("Question {other}?"))).count();
        assert!(others == 0 && texts.contains(&format!("Question {i}?")), "{texts}");
    }
    let theirs = peer.count("select count(*) from conversation_records").await;
    let here = super::count(&database.pool, "select count(*) from conversation_records").await;
    assert_eq!(theirs, here);
}
