//! The audit: who did what, on which row, why, from where, when, and how it ended.

use super::stage::{Stage, TOKEN, send};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

/// The audit's rows, newest first, as (actor, verb, target, reason, outcome).
async fn rows(stage: &Stage, filter: &str) -> Vec<Value> {
    let (status, listed) = stage.get(TOKEN, &format!("/v1/audit?{filter}")).await;
    assert_eq!(status, StatusCode::OK, "{listed}");
    listed["items"].as_array().unwrap().clone()
}

#[tokio::test]
async fn every_write_of_the_api_and_the_command_line_is_recorded_with_who_what_why_and_where() {
    let stage = Stage::new("").await;
    let made = stage.run(&["token", "create", "--scope", "operate", "--name", "ci", "--as", "eve"]).await;
    let (token, token_id) = (made["token"].as_str().unwrap(), made["token_id"].as_str().unwrap());
    let id = stage.chat(token, "c1", json!({"text": "Hi"})).await;
    stage.process.wait_for_log("The run is completed").await;
    // The session's second message goes another way into the database than its first.
    let (status, _) = stage.post(token, &format!("/v1/sessions/{id}/messages"), &json!({"text": "Hi"})).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    crate::support::eventually("the session to rest", || async {
        let (_, session) = stage.get(token, &format!("/v1/sessions/{id}")).await;
        (session["status"] == "completed").then_some(())
    })
    .await;
    let reason = json!({"reason": "no longer needed"});
    assert_eq!(
        stage.post(token, &format!("/v1/sessions/{id}/archive"), &reason).await.0,
        StatusCode::ACCEPTED
    );
    stage.run(&["session", "terminate", &id, "--reason", "for good", "--as", "eve"]).await;
    stage
        .run(&["schedule", "create", "daily", "--cron", "0 9 * * *", "--prompt", "Go.", "--as", "eve"])
        .await;
    stage.run(&["session", "list"]).await;
    // A preview only looks.
    let preview = json!({"verb": "archive", "filter": {"status": "completed"}, "dry_run": true});
    assert_eq!(stage.post(token, "/v1/batches", &preview).await.0, StatusCode::OK);
    stage.run(&["pause", "begin", "agent", "default", "--reason", "a fix", "--as", "eve"]).await;
    let paused = json!({"kind": "agent", "name": "default"});
    assert_eq!(stage.post(token, "/v1/pauses/end", &paused).await.0, StatusCode::ACCEPTED);

    let got: Vec<(Value, Value, Value, Value)> = rows(&stage, "")
        .await
        .into_iter()
        .map(|row| (row["actor"].clone(), row["verb"].clone(), row["target"].clone(), row["reason"].clone()))
        .collect();
    let row = |actor: &str, verb: &str, target: &str, reason: Option<&str>| {
        (json!(actor), json!(verb), json!(target), json!(reason))
    };
    let want = [
        row("ci", "pause.end", "agent:default", None),
        row("eve", "pause.begin", "agent:default", Some("a fix")),
        row("eve", "schedule.create", "daily", None),
        row("eve", "session.terminate", &id, Some("for good")),
        row("ci", "session.archive", &id, Some("no longer needed")),
        row("ci", "session.send", &id, None),
        row("ci", "chat.message", &id, None),
        row("eve", "token.create", token_id, None),
    ];
    assert_eq!(got, want);
    let of_token = rows(&stage, &format!("actor={token_id}")).await;
    assert_eq!(of_token.len(), 4);
    for row in &of_token {
        assert_eq!((&row["address"], &row["token_id"]), (&json!("127.0.0.1"), &json!(token_id)));
        assert_eq!((&row["outcome"], &row["space_id"]), (&json!("done"), &json!("default")));
    }
    // Keyset pages, and the same rows on the command line.
    let (_, first) = stage.get(TOKEN, "/v1/audit?limit=2").await;
    let next = rows(&stage, &format!("limit=2&cursor={}", first["next"])).await;
    assert_eq!(next[0]["verb"], "schedule.create");
    let listed = stage.run(&["audit", "list", "--verb", "session"]).await;
    let verbs: Vec<&str> =
        listed.as_array().unwrap().iter().map(|row| row["verb"].as_str().unwrap()).collect();
    assert_eq!(verbs, ["session.terminate", "session.archive", "session.send"]);
    assert_eq!(rows(&stage, &format!("target={id}&verb=session.archive")).await.len(), 1);
    // The journal names who steered.
    let (_, events) = stage.get(TOKEN, &format!("/v1/sessions/{id}/events")).await;
    let steered: Vec<(&Value, &Value)> = events["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|entry| entry["type"] == "SESSION_STEERED")
        .map(|entry| (&entry["payload"]["verb"], &entry["payload"]["by"]))
        .collect();
    assert_eq!(steered, [(&json!("archive"), &json!("ci")), (&json!("terminate"), &json!("eve"))]);
}

#[tokio::test]
async fn refused_requests_are_recorded_and_a_flood_of_them_is_counted() {
    let stage = Stage::new("").await;
    let reader = stage.token(&["--scope", "read", "--name", "dashboard"]).await;
    assert_eq!(stage.post(&reader, "/v1/sessions/s1/cancel", &json!({})).await.0, StatusCode::FORBIDDEN);
    for _ in 0..50 {
        assert_eq!(stage.get("a guess", "/v1/sessions").await.0, StatusCode::UNAUTHORIZED);
    }
    let refused = rows(&stage, "outcome=refused").await;
    assert_eq!(refused.len(), 2, "one row for each actor and verb: {refused:?}");
    let row = &refused[1];
    assert_eq!((&row["actor"], &row["verb"]), (&json!("dashboard"), &json!("session.cancel")));
    assert_eq!((&row["target"], &row["status"]), (&json!("s1"), &json!(403)));
    // Those of a stranger do not hide what a token does from the same address.
    let other = stage.token(&["--scope", "read", "--name", "screen"]).await;
    assert_eq!(stage.post(&other, "/v1/sessions/s2/cancel", &json!({})).await.0, StatusCode::FORBIDDEN);
    assert_eq!(stage.post(&reader, "/v1/sessions/s3/retry", &json!({})).await.0, StatusCode::FORBIDDEN);
    let refused = rows(&stage, "outcome=refused").await;
    let said = |row: &Value| format!("{} {}", row["actor"].as_str().unwrap(), row["verb"].as_str().unwrap());
    assert_eq!(
        refused.iter().take(2).map(said).collect::<Vec<_>>(),
        ["dashboard session.retry", "screen session.cancel"]
    );
    // What was counted is written when the process ends, at the latest.
    let Stage { database, process, .. } = stage;
    assert!(process.terminate().success());
    let times: i64 = database
        .value("select sum(times)::bigint from audit_log where outcome = 'refused' and $1 <> ''", "x")
        .await;
    let lines: i64 =
        database.value("select count(*) from audit_log where outcome = 'refused' and $1 <> ''", "x").await;
    assert_eq!((times, lines), (53, 5));
    let last: String = database
        .value("select actor_kind || ' ' || verb from audit_log where times > 1 and $1 <> ''", "x")
        .await;
    assert_eq!(last, "stranger GET /v1/sessions");
}

#[tokio::test]
async fn a_write_and_its_row_commit_together_or_not_at_all() {
    let stage = Stage::new("").await;
    let id = stage.chat(TOKEN, "c1", json!({"text": "Hi"})).await;
    stage.process.wait_for_log("The run is completed").await;
    let rows =
        async || -> i64 { stage.database.value("select count(*) from audit_log where $1 <> ''", "x").await };
    let before = rows().await;
    // A table that takes no row of the audit takes no write either.
    stage.execute("alter table audit_log add constraint full_disk check (verb = 'x') not valid").await;
    for (path, body) in [
        (format!("/v1/sessions/{id}/archive"), json!({})),
        (format!("/v1/sessions/{id}/messages"), json!({"text": "Hi"})),
        ("/v1/chat/c2/messages".to_owned(), json!({"text": "Hi"})),
        ("/v1/tokens".to_owned(), json!({"scope": "read"})),
    ] {
        let (status, body) = stage.post(TOKEN, &path, &body).await;
        assert!(status.is_server_error(), "{path}: {status} {body}");
    }
    assert_eq!(rows().await, before);
    let (_, session) = stage.get(TOKEN, &format!("/v1/sessions/{id}")).await;
    assert_eq!(session["status"], "completed");
    let left: i64 = stage
        .database
        .value(
            "select (select count(*) from session_inbox) + (select count(*) from api_tokens) where $1 <> ''",
            "x",
        )
        .await;
    assert_eq!(left, 1, "the first message");
    stage.execute("alter table audit_log drop constraint full_disk").await;
    assert_eq!(
        stage.post(TOKEN, &format!("/v1/sessions/{id}/archive"), &json!({})).await.0,
        StatusCode::ACCEPTED
    );
    assert_eq!(rows().await, before + 1);
}

#[tokio::test]
async fn the_audit_is_append_only_and_only_an_admin_reads_it() {
    let stage = Stage::new("").await;
    stage.chat(TOKEN, "c1", json!({"text": "Hi"})).await;
    for statement in ["update audit_log set actor = 'x'", "delete from audit_log", "truncate audit_log"] {
        let refused = sqlx::query(statement).execute(&stage.database.pool).await.unwrap_err();
        assert!(refused.to_string().contains("append-only"), "{statement}: {refused}");
    }
    let operator = stage.token(&["--scope", "operate"]).await;
    assert_eq!(stage.get(&operator, "/v1/audit").await.0, StatusCode::FORBIDDEN);
    let odd = stage.request(TOKEN, Method::GET, "/v1/audit?outcome=maybe");
    assert_eq!(send(odd).await.0, StatusCode::BAD_REQUEST);
}
