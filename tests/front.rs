//! Strangers at the front line: connections that say nothing, heads and bodies that stop in the middle.
//! Others are served all the while.

use crate::support::messengers::{SLACK_SECRET, TELEGRAM_SECRET, WEBHOOK_SECRET};
use crate::support::{Answer, Database, ModelServer, Options, Process};
use futures::future::join_all;
use reqwest::StatusCode;
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn says(text: &str) -> ModelServer {
    ModelServer::turns(vec![Answer::text(text)]).await
}

fn options(model: &ModelServer) -> Options {
    let messengers = "[messenger.webhook]\nagent = \"default\"\n[messenger.slack]\ntoken = \"xoxb-1\"\n\
        [messenger.telegram]\ntoken = \"1:a\"\nallow_users = [\"*\"]";
    Options::new()
        .env("OPENAI_BASE_URL", &model.url)
        .config("[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"")
        .config(messengers)
        .env("WAKEFUL_MESSENGER__SLACK__SIGNING_SECRETS", SLACK_SECRET)
        .env("WAKEFUL_MESSENGER__TELEGRAM__WEBHOOK_SECRETS", TELEGRAM_SECRET)
        .env("WAKEFUL_MESSENGER__WEBHOOK__SECRETS", WEBHOOK_SECRET)
}

/// A connection that has sent `text`.
async fn sent(process: &Process, text: &str) -> TcpStream {
    let address = process.url().trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The server may already have closed it.
    let _ = stream.write_all(text.as_bytes()).await;
    stream
}

/// What the server says until it closes the connection, which it has to do before the test's time is up.
async fn rest(mut stream: TcpStream) -> String {
    let mut said = Vec::new();
    let end = tokio::time::timeout(crate::support::timeout(), stream.read_to_end(&mut said)).await;
    // A reset is an end too.
    assert!(end.is_ok(), "the connection stays open");
    String::from_utf8_lossy(&said).into_owned()
}

async fn is_well(process: &Process) {
    let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
    let health = client.get(format!("{}/healthz", process.url())).timeout(Duration::from_secs(20)).send();
    assert_eq!(health.await.unwrap().status(), StatusCode::OK);
}

/// A chat's message is accepted, and the agent's reply is there.
async fn chats(process: &Process, conversation: &str) {
    let client = process.client();
    let message = json!({"user_id": "ann", "text": "Hello?"});
    let (status, woken) = client.post(&format!("/v1/chat/{conversation}/messages"), &message).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
    client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
}

#[tokio::test]
async fn half_sent_heads_are_closed_and_meanwhile_everybody_else_is_served() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let heads = ["", "GET /healthz HT", "POST /v1/chat/c1/messages HTTP/1.1\r\nHost: localhost\r\nX-A: "];
    let stalled = join_all((0..200).map(|at| sent(&process, heads[at % heads.len()]))).await;
    let text = form("/login", 15_000, 100);
    let forms = join_all((0..20).map(|_| sent(&process, &text))).await;
    is_well(&process).await;
    chats(&process, "c1").await;
    for said in join_all(stalled.into_iter().map(rest)).await {
        assert!(!said.starts_with("HTTP/1.1 2"), "{said}");
    }
    for said in join_all(forms.into_iter().map(rest)).await {
        assert!(said.starts_with("HTTP/1.1 408") && said.contains("came too slowly"), "{said}");
    }
}

/// A form of the console as a page of it would send it, of which only `sent` bytes come.
fn form(path: &str, length: usize, sent: usize) -> String {
    let head = format!(
        "POST /console{path} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Length: {length}\r\n\r\n"
    );
    head + &"x".repeat(sent)
}

#[tokio::test]
async fn imports_that_stop_on_their_way_do_not_keep_others_out() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let head = "POST /v1/sessions/import HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n";
    let mut stalled = join_all((0..20).map(|_| sent(&process, head))).await;
    for stream in &mut stalled {
        // The server says so when the import asks for its first bytes.
        let mut said = [0; 12];
        stream.read_exact(&mut said).await.unwrap();
        assert_eq!(&said, b"HTTP/1.1 100");
    }
    let import = process.client().post_request("/v1/sessions/import").body("no bundle").send().await.unwrap();
    assert_eq!(import.status(), StatusCode::UNPROCESSABLE_ENTITY);
    for said in join_all(stalled.into_iter().map(rest)).await {
        assert!(said.contains("HTTP/1.1 408") && said.contains("came too slowly"), "{said}");
    }
}

#[tokio::test]
async fn with_few_descriptors_a_flood_of_connections_stops_neither_the_health_nor_the_work() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let few = ["sh", "-c", "ulimit -n 256 && exec \"$@\"", "sh"].map(str::to_owned);
    let process = options(&model).spawn_via(&few, &database.url);
    process.wait_for_log("\"Listening\"").await;
    let mut stalled = Vec::new();
    for round in 0..3 {
        stalled.extend(join_all((0..150).map(|_| sent(&process, "GET /healthz HTTP/1.1\r\n"))).await);
        is_well(&process).await;
        chats(&process, &format!("c{round}")).await;
    }
    assert!(!process.log().contains("Too many open files"), "{}", process.log());
    drop(stalled);
}

/// The head of a webhook whose headers are as they should be, and half of its body.
fn webhook(kind: usize, bytes: usize) -> String {
    let at = chrono::Utc::now().timestamp();
    let (path, headers) = match kind % 3 {
        0 => {
            ("slack", format!("X-Slack-Request-Timestamp: {at}\r\nX-Slack-Signature: v0={}", "ab".repeat(32)))
        }
        1 => ("telegram", format!("X-Telegram-Bot-Api-Secret-Token: {TELEGRAM_SECRET}")),
        _ => (
            "webhook",
            format!(
                "webhook-id: m{kind}\r\nwebhook-timestamp: {at}\r\nwebhook-signature: v1,{}",
                "A".repeat(44)
            ),
        ),
    };
    let head = format!(
        "POST /v1/triggers/messenger/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n{headers}\r\n\r\n",
        1 << 20
    );
    head + &"x".repeat(bytes)
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn bodies_that_stop_are_closed_and_take_a_bounded_memory() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    is_well(&process).await;
    let idle = process.peak_mib();
    // 180 MiB in all. What comes buys time, so a longer half would be held for longer.
    let bytes = 600 << 10;
    let mut stalled = Vec::new();
    for kind in 0..300 {
        stalled.push(tokio::spawn({
            let is_form = kind % 4 == 3;
            let text = if is_form { form("/chat", 1 << 20, bytes) } else { webhook(kind, bytes) };
            let address = process.url();
            async move {
                let mut stream = TcpStream::connect(address.trim_start_matches("http://")).await.unwrap();
                // It may be refused before all of it is sent.
                let _ = stream.write_all(text.as_bytes()).await;
                rest(stream).await
            }
        }));
    }
    is_well(&process).await;
    chats(&process, "c1").await;
    for said in join_all(stalled).await {
        let said = said.unwrap();
        // A reset may overtake the answer.
        let refused = ["HTTP/1.1 408", "HTTP/1.1 429"].iter().any(|status| said.starts_with(status));
        assert!(said.is_empty() || refused, "{said}");
    }
    let grown = process.peak_mib() - idle;
    assert!(grown < 150, "it grew by {grown} MiB");
}

#[tokio::test]
async fn what_the_headers_cannot_prove_is_refused_before_the_body_comes() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).env("WAKEFUL_TOKEN", "a token of the tests").serve(&database).await;
    let length = "Content-Length: 1000\r\n";
    let stale = "webhook-id: m\r\nwebhook-timestamp: 1\r\nwebhook-signature: v1,AAAA\r\n";
    let many = format!(
        "webhook-id: m\r\nwebhook-timestamp: {}\r\nwebhook-signature: {}\r\n",
        chrono::Utc::now().timestamp(),
        "v1,AAAA ".repeat(1000)
    );
    for (path, headers) in [
        ("/v1/chat/c1/messages", ""),
        ("/v1/sessions/import", "Authorization: Bearer another\r\n"),
        ("/v1/triggers/messenger/slack", "X-Slack-Signature: v0=00\r\n"),
        ("/v1/triggers/messenger/telegram", "X-Telegram-Bot-Api-Secret-Token: x\r\n"),
        ("/v1/triggers/messenger/webhook", ""),
        ("/v1/triggers/messenger/webhook", stale),
        ("/v1/triggers/messenger/webhook", &many),
    ] {
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}{headers}\r\n");
        let mut stream = sent(&process, &head).await;
        let mut status = [0; 12];
        let told = tokio::time::timeout(crate::support::timeout(), stream.read_exact(&mut status)).await;
        told.unwrap_or_else(|_| panic!("{path} waits for the body")).unwrap();
        assert_eq!(&status, b"HTTP/1.1 401", "{path} {headers}");
    }
}

#[tokio::test]
async fn no_answer_may_be_taken_for_a_page_and_strangers_learn_no_names() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    for path in ["/healthz", "/readyz", "/v1/sessions", "/v1/sessions/none", "/nowhere"] {
        let answer = client.get_request(path).send().await.unwrap();
        assert_eq!(answer.headers()["x-content-type-options"], "nosniff", "{path}");
        let policy = answer.headers()["content-security-policy"].to_str().unwrap();
        assert!(policy.contains("default-src 'none'"), "{path}: {policy}");
    }
    database.refuse_connections().await;
    let told = crate::support::eventually("not to be ready", || async {
        let (status, told) = client.get("/readyz").await;
        (status == StatusCode::SERVICE_UNAVAILABLE).then(|| told.to_string())
    })
    .await;
    assert!(!told.contains(&database.name), "{told}");
}

#[tokio::test]
async fn strangers_who_ask_whether_it_is_ready_share_few_looks_at_the_database() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let recorder = crate::support::recorder::Recorder::start(&database.url);
    let process = options(&model).spawn(&recorder.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    recorder.take();
    let began = std::time::Instant::now();
    for _ in 0..10 {
        let asked = (0..50).map(|_| client.get("/readyz"));
        for (status, _) in futures::future::join_all(asked).await {
            assert_eq!(status, StatusCode::OK);
        }
    }
    let looks = recorder.take().iter().filter(|sent| sent.sql.contains("pg_is_in_recovery")).count();
    // At most one in half a second.
    let most = 1 + began.elapsed().as_millis() / 500;
    assert!((1..=most).contains(&(looks as u128)), "{looks} looks for 500 requests, at most {most}");
}
