//! Documents have versions (`ETag`, `If-None-Match`, `If-Match`), and lists have pages.

use crate::access::stage::{Stage, TOKEN};
use crate::support::eventually;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

const DAILY: &str = "/v1/schedules/daily";

struct Told {
    status: StatusCode,
    tag: String,
    body: String,
}

/// Asks with one header.
async fn ask(stage: &Stage, method: Method, path: &str, header: (&'static str, &str), body: &Value) -> Told {
    let request = stage.request(TOKEN, method, path).header(header.0, header.1).body(body.to_string());
    let answer = request.send().await.expect("the server answers");
    let tag = answer.headers().get("etag").map(|tag| tag.to_str().unwrap().to_owned());
    Told { status: answer.status(), tag: tag.unwrap_or_default(), body: answer.text().await.unwrap() }
}

async fn get(stage: &Stage, path: &str, tag: &str) -> Told {
    ask(stage, Method::GET, path, ("if-none-match", tag), &json!({})).await
}

fn daily(name: &str) -> Value {
    json!({"name": name, "cron": "0 9 * * *", "prompt": "What is new?"})
}

#[tokio::test]
async fn a_document_that_has_not_changed_is_not_sent_again() {
    let stage = Stage::new("").await;
    let session = stage.chat(TOKEN, "c1", json!({"text": "Hello?"})).await;
    stage.post(TOKEN, "/v1/schedules", &daily("daily")).await;
    let path = format!("/v1/sessions/{session}");
    eventually("the run to complete", || async {
        (stage.get(TOKEN, &path).await.1["status"] == "completed").then_some(())
    })
    .await;
    for path in [path.as_str(), DAILY, "/v1/openapi.json"] {
        let first = get(&stage, path, "\"other\"").await;
        assert_eq!(first.status, StatusCode::OK, "{path}: {}", first.body);
        assert!(first.tag.starts_with('"') && first.tag.len() > 20, "{path}: {}", first.tag);
        let again = get(&stage, path, &first.tag).await;
        assert_eq!((again.status, again.body.as_str()), (StatusCode::NOT_MODIFIED, ""), "{path}");
        assert_eq!(again.tag, first.tag);
    }
    let before = get(&stage, DAILY, "").await;
    stage.post(TOKEN, "/v1/schedules/daily/pause", &json!({})).await;
    let after = get(&stage, DAILY, &before.tag).await;
    assert_eq!(after.status, StatusCode::OK);
    assert_ne!(after.tag, before.tag);
    assert_eq!(get(&stage, "/v1/sessions/none", "*").await.status, StatusCode::NOT_FOUND);
    assert_eq!(get(&stage, "/v1/schedules", "*").await.status, StatusCode::OK, "a list has no version");
}

#[tokio::test]
async fn a_change_for_another_version_is_refused_and_changes_nothing() {
    let stage = Stage::new("").await;
    stage.post(TOKEN, "/v1/schedules", &daily("daily")).await;
    let first = get(&stage, DAILY, "").await;
    let mut changed = daily("daily");
    changed["prompt"] = json!("What is old?");
    let put = async |tag: &str| ask(&stage, Method::PUT, DAILY, ("if-match", tag), &changed).await;
    assert_eq!(put("\"other\"").await.status, StatusCode::PRECONDITION_FAILED);
    assert_eq!(get(&stage, DAILY, "").await.tag, first.tag);
    // A tick moves the schedule, and changes nothing that a client has set.
    stage.execute("update schedules set last_tick = next_at, next_at = next_at + interval '1 day'").await;
    let ticked = get(&stage, DAILY, &first.tag).await;
    assert_eq!(ticked.status, StatusCode::OK, "the document has another time");
    let told = put(&first.tag).await;
    assert_eq!(told.status, StatusCode::OK, "{}", told.body);
    let stale = ask(&stage, Method::DELETE, DAILY, ("if-match", &first.tag), &json!({})).await;
    assert_eq!(stale.status, StatusCode::PRECONDITION_FAILED, "{}", stale.body);
    let second = get(&stage, DAILY, &first.tag).await;
    assert_eq!(second.status, StatusCode::OK);
    let pause = "/v1/schedules/daily/pause";
    let told = ask(&stage, Method::POST, pause, ("if-match", &second.tag), &json!({})).await;
    assert_eq!(told.status, StatusCode::BAD_REQUEST, "nothing compares it: {}", told.body);
    let gone = ask(&stage, Method::DELETE, DAILY, ("if-match", &second.tag), &json!({})).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT, "{}", gone.body);
}

#[tokio::test]
async fn the_audit_has_the_reason_for_which_a_schedule_was_paused() {
    let stage = Stage::new("").await;
    stage.post(TOKEN, "/v1/schedules", &daily("daily")).await;
    for (verb, reason) in [("pause", "a holiday"), ("resume", "it is over")] {
        let path = format!("{DAILY}/{verb}");
        let (status, told) = stage.post(TOKEN, &path, &json!({"for_s": 60})).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "it has no such field: {told}");
        let (status, told) = stage.post(TOKEN, &path, &json!({"reason": reason})).await;
        assert_eq!(status, StatusCode::OK, "{told}");
        let (_, acts) = stage.get(TOKEN, &format!("/v1/audit?outcome=done&verb=schedule.{verb}")).await;
        assert_eq!(acts["items"][0]["reason"], reason, "{acts}");
    }
}

#[tokio::test]
async fn of_two_changes_of_one_version_at_once_one_wins() {
    let stage = Stage::new("").await;
    stage.post(TOKEN, "/v1/schedules", &daily("daily")).await;
    let first = get(&stage, DAILY, "").await;
    let mut holds = stage.database.pool.begin().await.unwrap();
    sqlx::query("select from schedules for update").execute(&mut *holds).await.unwrap();
    let put = async |prompt: &str| {
        let mut changed = daily("daily");
        changed["prompt"] = json!(prompt);
        ask(&stage, Method::PUT, DAILY, ("if-match", &first.tag), &changed).await.status
    };
    let release = async {
        eventually("both to wait for the row", || async {
            let waiting = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
            let waiting = sqlx::query(waiting).fetch_all(&stage.database.pool).await.unwrap();
            (waiting.len() == 2).then_some(())
        })
        .await;
        holds.rollback().await.unwrap();
    };
    let (one, other, ()) = tokio::join!(put("one"), put("other"), release);
    let mut told = [one, other];
    told.sort();
    assert_eq!(told, [StatusCode::OK, StatusCode::PRECONDITION_FAILED]);
}

#[tokio::test]
async fn small_pages_give_what_one_large_page_gives() {
    let stage = Stage::new("").await;
    for name in ["b", "a", "daily"] {
        stage.post(TOKEN, "/v1/schedules", &daily(name)).await;
    }
    // Mails of one moment, whose ids have all sorts of characters.
    stage
        .execute(
            "insert into mails (space_id, mailbox_id, message_id, subject, subject_key, body_sha256, answers, dropped, received_at)
            select 'default', box, '<' || n || '~é/%@' || n || '>', 's', 's', 'x', '{}', 'spam',
                '2026-01-01T00:00:00.123456Z'::timestamptz + make_interval(secs => n / 2)
            from generate_series(1, 5) n, unnest(array['one', 'two']) box",
        )
        .await;
    stage
        .execute(
            "insert into schedule_firings (schedule_id, space_id, tick, reason)
            select schedule_id, space_id, now(), 'reason ' || n from schedules, generate_series(1, 4) n where name = 'daily'",
        )
        .await;
    for (path, count) in [("/v1/mails", 10), ("/v1/schedules", 3), ("/v1/schedules/daily/firings", 4)] {
        let (_, whole) = stage.get(TOKEN, &format!("{path}?limit=100")).await;
        assert_eq!(whole["items"].as_array().unwrap().len(), count, "{path}: {whole}");
        assert_eq!(whole["next"], Value::Null, "{path}");
        for size in [1, 2, 3] {
            let (mut items, mut cursor) = (Vec::new(), String::new());
            loop {
                let (status, page) = stage.get(TOKEN, &format!("{path}?limit={size}{cursor}")).await;
                assert_eq!(status, StatusCode::OK, "{path}: {page}");
                items.extend(page["items"].as_array().unwrap().clone());
                assert!(items.len() <= count, "{path} repeats itself: {items:?}");
                cursor = match &page["next"] {
                    Value::Null => break,
                    Value::String(next) => format!("&cursor={next}"),
                    next => format!("&cursor={next}"),
                };
            }
            assert_eq!(Value::Array(items), whole["items"], "{path} in pages of {size}");
        }
    }
    for cursor in ["x", "W10", "WzEsMiwzXQ"] {
        let (status, told) = stage.get(TOKEN, &format!("/v1/mails?cursor={cursor}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{told}");
    }
}
