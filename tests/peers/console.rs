//! The console in a real browser: npm's playwright-core drives Debian's Chromium, and axe-core looks for what hinders people.

use crate::console::{Scene, first, pages};
use crate::support::eventually;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::process::Command;
use wakeful_store::notify::link::{Act, Way};

/// To the folder of mails that every test has.
const NOTIFY: &str =
    "[[notify]]\nname = \"ops\"\nto = \"email\"\naddress = \"ops@example.org\"\nwindow_s = 0.2\n";
const SCHEDULE: &str = "[schedules.daily]\ncron = \"0 9 * * *\"\nprompt = \"What is new?\"\n";

/// The letter of this session may have been sent, as far as the rows say. Returns the delivery.
async fn is_uncertain(scene: &Scene, session: &str) -> String {
    let sent = "select delivery_id from deliveries where status = 'sent' and session_id = $1";
    let letter = eventually("the letter to be sent", || async {
        sqlx::query_scalar::<_, String>(sent)
            .bind(session)
            .fetch_optional(&scene.database.pool)
            .await
            .expect("it answers")
    });
    let letter = letter.await;
    let uncertain =
        "update deliveries set status = 'uncertain', settled_by = clock_timestamp() where delivery_id = $1";
    sqlx::query(uncertain).bind(&letter).execute(&scene.database.pool).await.expect("the row");
    letter
}

/// The page of a batch that tried the failed sessions dry.
async fn proof(scene: &Scene, failed: &serde_json::Map<String, Value>) -> String {
    let ids: Vec<&Value> = failed.values().collect();
    let body = json!({"verb": "retry", "session_ids": ids, "reason": "the model is back", "prove": 3, "canary": [1]});
    let client = scene.process.client();
    let (_, made) = client.post("/v1/batches", &body).await;
    let id = made["batch_id"].as_str().unwrap_or_else(|| panic!("{made}"));
    eventually("the proof", || async {
        let (_, batch) = client.get(&format!("/v1/batches/{id}")).await;
        (batch["status"] == "paused").then_some(())
    })
    .await;
    format!("/batches/{id}")
}

#[tokio::test]
#[ignore = "needs node and Chromium: make test-peers"]
async fn a_person_finds_and_retries_a_failed_run_and_nothing_hinders_or_harms_anybody() {
    let scene = Scene::new(&format!("approve = [\"charge\"]\n{SCHEDULE}{NOTIFY}")).await;
    let session = scene.session("desk", "write a note", "completed").await;
    let hostile =
        scene.session("hostile", &crate::support::payloads::payloads().join("\n"), "completed").await;
    let asks = Value::from(scene.session("asks", "ask me something", "waiting_input").await);
    let question = "select call_id from tool_calls where status = 'waiting' and session_id = $1";
    let question: String = scene.database.value(question, asks.as_str().expect("an id")).await;
    let post = Value::from(scene.session("post", "write a letter", "completed").await);
    let letter = is_uncertain(&scene, post.as_str().expect("an id")).await;
    scene.model_fails.store(true, Ordering::SeqCst);
    let mut failed = serde_json::Map::new();
    for way in ["mouse", "without JavaScript", "keyboard"] {
        let conversation = way.split(' ').next().unwrap();
        failed.insert(way.to_owned(), scene.session(conversation, "Hello?", "failed").await.into());
    }
    scene.model_fails.store(false, Ordering::SeqCst);
    let delivery = first(&scene, "/v1/deliveries", "delivery_id").await;
    let schedule = first(&scene, "/v1/schedules", "schedule_id").await;
    let mut shown = pages(&session, "desk", &hostile, &delivery, &schedule);
    shown.extend(["", "timeline", "context", "journal"].map(|tab| format!("/sessions/{hostile}?tab={tab}")));
    shown.extend(["/chat/hostile", "/chat/asks", "/login", "/compare"].map(str::to_owned));
    let told = first(&scene, "/v1/notifications", "notification_id").await;
    shown.push(format!("/notifications/{told}"));
    let store = scene.database.store().await;
    shown.extend([
        "/effects?ticked=all".to_owned(),
        format!("/deliveries/{letter}"),
        proof(&scene, &failed).await,
    ]);
    for (session, act) in [
        (&failed["mouse"], Act::Retry),
        (&asks, Act::Answer { call_id: question }),
        (&post, Act::Resolve { effect_id: letter }),
    ] {
        let session = session.as_str().expect("an id");
        let made = store.mint_link(&told, session, act, Way::Link, Duration::from_secs(600)).await;
        shown.push(format!("/act/{}", made.expect("the database").expect("it is possible").token));
    }
    let given = json!({"failed": failed, "pages": shown, "chat": "desk"});
    let peers = std::env::var("WAKEFUL_PEERS").expect("make test-peers sets it");
    let output = Command::new("node")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/console.mjs"))
        .args([scene.process.url(), given.to_string()])
        .env("WAKEFUL_PEERS", peers)
        .kill_on_drop(true)
        .output()
        .await
        .expect("node runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let told: Value = serde_json::from_slice(&output.stdout).expect("the script prints JSON");
    for (way, clicks) in told["clicks"].as_object().expect("the ways") {
        assert!(clicks.as_i64().is_some_and(|clicks| clicks <= 4), "{way}: {clicks}");
    }
    let wrong: Vec<&Value> = ["serious", "elsewhere", "ran", "broken", "wide", "covered", "whilePaused"]
        .iter()
        .map(|what| &told[what])
        .filter(|found| **found != json!([]))
        .collect();
    assert!(wrong.is_empty(), "{told:#}");
    assert_eq!(told["live"], true);
    assert_eq!(told["away"], json!([true, true]), "the page says that the server is away, and back");
    assert_eq!(told["streams"], true, "a stream that was refused is opened again");
    assert_eq!(told["ended"], true, "the page says that it is no longer kept up to date");
    assert_eq!(told["first"], "Approve", "the key leads to what is seen");
}
