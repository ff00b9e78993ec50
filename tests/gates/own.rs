//! What fails for one request, or one model, holds up nobody else.

use super::{GATE, SHUT, count, journal, options, post};
use crate::support::client::texts;
use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

async fn until_shut(database: &Database) {
    eventually("a shut gate", || async { (count(database, SHUT).await == 1).then_some(()) }).await;
}

/// Begins sessions that the provider is to fail.
async fn posted_poison(client: &Client, many: usize) -> Vec<String> {
    let mut ids = Vec::new();
    for n in 0..many {
        let answer = client.chat(&format!("p{n}"), "poison").await;
        ids.push(answer["session_id"].as_str().unwrap().to_owned());
    }
    ids
}

/// Waits until a call of each session failed so many times more.
async fn each_fails(client: &Client, ids: &[String], more: usize) {
    for id in ids {
        let before = journal(client, id, "ATTEMPT_FAILED").await.len();
        eventually("more failed calls", || async {
            (journal(client, id, "ATTEMPT_FAILED").await.len() >= before + more).then_some(())
        })
        .await;
    }
}

fn asks(body: &Value, text: &str) -> bool {
    body["messages"].to_string().contains(text)
}

#[tokio::test]
async fn requests_that_fail_by_themselves_keep_nobody_waiting() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match asks(body, "poison") {
        true => Answer::Error(500),
        false => Answer::text("Here I am."),
    })
    .await;
    let process = options(&model, "").serve(&database).await;
    let client = process.client();
    let poison = posted_poison(&client, 4).await;
    // As far as anybody knows, the provider is down.
    until_shut(&database).await;
    each_fails(&client, &poison, 3).await;
    // The first that may well be answered makes the next probe.
    let probes = "select probes::bigint from provider_gates where $1 <> ''";
    let before = count(&database, probes).await;
    let id = post(&client, "c0").await;
    client.wait_for(&id, "completed").await;
    let failed = journal(&client, &poison[0], "ATTEMPT_FAILED").await.len() as i64;
    eventually("an open gate", || async { (count(&database, SHUT).await == 0).then_some(()) }).await;
    assert!(before >= 1 && failed >= 3, "{before} {failed}");

    let opening = "select opening from provider_gates where $1 <> ''";
    let opened = count(&database, opening).await;
    each_fails(&client, &poison, 2).await;
    each_fails(&client, &poison, 2).await;
    let now = count(&database, "select count(*) from provider_gates where phase = 'open' and $1 <> ''").await;
    assert_eq!((now, count(&database, opening).await), (1, opened), "their faults shut it no more");
    let id = post(&client, "c1").await;
    client.wait_for(&id, "completed").await;
    assert_eq!(journal(&client, &id, "ATTEMPT_FAILED").await, Vec::<Value>::new());
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_probe_that_hangs_keeps_nobody_waiting() {
    let (database, hangs) = (Database::new().await, Arc::new(AtomicBool::new(false)));
    let now = Arc::clone(&hangs);
    let model = ModelServer::start(move |body, _| match (asks(body, "poison"), now.load(Ordering::SeqCst)) {
        (true, false) => Answer::Error(500),
        (true, true) => Answer::Never,
        (false, _) => Answer::text("Here I am."),
    })
    .await;
    let process = options(&model, "").short_lease().serve(&database).await;
    let client = process.client();
    posted_poison(&client, 3).await;
    until_shut(&database).await;
    hangs.store(true, Ordering::SeqCst);
    eventually("a probe", || async {
        let held = "select count(*) from provider_gates where probe_until > clock_timestamp() and $1 <> ''";
        (count(&database, held).await == 1).then_some(())
    })
    .await;
    // The provider would be given up after two minutes.
    let id = post(&client, "c0").await;
    client.wait_for(&id, "completed").await;
    process.kill();
}

#[tokio::test]
async fn a_limit_of_one_model_holds_up_no_other_of_its_provider() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match body["model"] == "big" {
        true => Answer::Busy(429, 3_600_000),
        false => Answer::text("The small one answers."),
    })
    .await;
    let options = Options::new().model("openai/big").config("fallback = [\"openai/small\"]").config(GATE);
    let process = options.env("OPENAI_BASE_URL", &model.url).serve(&database).await;
    let client = process.client();
    for turn in 1..=2 {
        let id = post(&client, "c0").await;
        let session = client.wait_for(&id, "completed").await;
        assert_eq!(texts(&session, "assistant").len(), turn, "{session}");
    }
    let asked = model.bodies().iter().filter(|body| body.contains("\"big\"")).count();
    assert_eq!(asked, 1, "its gate is shut for an hour");
    let (_, queue) = client.get("/v1/queue").await;
    let shut: Vec<_> = queue["gates"].as_array().unwrap().iter().map(|gate| &gate["provider"]).collect();
    assert_eq!(shut, [&json!("openai/big")], "{queue}");
    assert!(process.terminate().success());
}
