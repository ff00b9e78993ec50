//! A notification's webhook at a receiver that verifies it with the library of Standard Webhooks (npm's standardwebhooks).

use crate::support::messengers::WEBHOOK_SECRET;
use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::{Value, json};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

#[tokio::test]
#[ignore = "needs node: make test-peers"]
async fn the_library_of_standard_webhooks_takes_what_a_rule_posts() {
    let peers = std::env::var("WAKEFUL_PEERS").expect("make test-peers sets it");
    let mut receiver = Command::new("node")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/notify.mjs"))
        .arg(WEBHOOK_SECRET)
        .env("WAKEFUL_PEERS", peers)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("node runs");
    let mut lines = BufReader::new(receiver.stdout.take().expect("piped")).lines();
    let mut next = async || -> Value {
        let line = lines.next_line().await.expect("it prints").expect("it goes on");
        serde_json::from_str(&line).expect("JSON")
    };
    let url = next().await["url"].as_str().expect("an address").to_owned();
    let model = ModelServer::start(|_, _| Answer::Error(400)).await;
    let database = Database::new().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(&format!(
        "[web]\nprivate_hosts = [\"127.0.0.1\"]\n[[notify]]\nname = \"ops\"\nto = \"webhook\"\nurl = \"{url}\"\n\
         secrets = [\"{WEBHOOK_SECRET}\"]\nwindow_s = 0.2"
    ));
    let process = options.serve(&database).await;
    let session =
        process.client().chat("desk", "Grüße 🙂").await["session_id"].as_str().expect("an id").to_owned();
    let told = next().await;
    assert_eq!(told["event"]["type"], "notification.failed", "{told}");
    assert_eq!(told["event"]["data"]["items"][0]["session_id"], json!(session));
    assert_eq!(told["id"], told["event"]["data"]["notification_id"]);
    assert_eq!((&told["anybody"], &told["altered"]), (&json!(false), &json!(false)), "{told}");
}
