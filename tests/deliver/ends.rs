//! A message is out, and its worker ends, or cannot write that down.

use super::Office;
use crate::support::proxy::{CutAt, Proxy};
use crate::support::{eventually, outlast_the_leases};
use serde_json::json;

/// Waits until so many messages are out.
async fn sends(office: &Office, messages: usize) {
    eventually("the messages", || async { (office.sent().len() == messages).then_some(()) }).await;
}

#[tokio::test]
async fn a_worker_that_drains_begins_no_other_message() {
    let mut office = Office::new("guarded").await;
    office.says("held back");
    let mut process = office.serve().await;
    let client = process.client();
    office.ask(&client, "First").await;
    sends(&office, 1).await;
    for text in ["Second", "Third"] {
        office.ask(&client, text).await;
        client.wait_for(&office.session_id, "completed").await;
    }
    process.signal(15);
    process.wait_for_log("Draining").await;
    office.says("receipt it is done");
    assert!(process.wait().success());
    assert_eq!(office.sent().len(), 1);
    let statuses: Vec<String> = office.outbox().await.into_iter().map(|(status, _)| status).collect();
    assert_eq!(statuses, ["sent", "queued", "queued"]);
    let process = office.comes_back().await;
    assert_eq!(office.sent().len(), 3);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_paused_channel_keeps_its_messages_and_sends_each_once_when_the_pause_ends() {
    let mut office = Office::new("guarded").await;
    let process = office.serve().await;
    let client = process.client();
    let paused = json!({"kind": "channel", "name": "email", "reason": "wrong prices"});
    let (status, pause) = client.post("/v1/pauses", &paused).await;
    assert_eq!(status.as_u16(), 201, "{pause}");
    process.wait_for_log("Paused now: channel:email").await;
    for text in ["First", "Second"] {
        office.ask(&client, text).await;
        client.wait_for(&office.session_id, "completed").await;
    }
    process.wait_for_log("channel email is paused: wrong prices").await;
    let (_, listed) = client.get("/v1/deliveries").await;
    assert_eq!(listed["items"][0]["held_for"], "wrong prices", "{listed}");
    let shown = office.cli("why");
    assert!(shown.contains("email is paused: wrong prices"), "{shown}");
    process.kill();
    // Another process knows it before it claims anything.
    let process = office.serve().await;
    let client = process.client();
    office.ask(&client, "Third").await;
    client.wait_for(&office.session_id, "completed").await;
    assert_eq!(office.sent(), []);
    let ends = json!({"kind": "channel", "name": "email"});
    assert_eq!(client.post("/v1/pauses/end", &ends).await.0.as_u16(), 202);
    office.is_done().await;
    let subjects: Vec<String> = office.sent().into_iter().map(|(_, subject)| subject).collect();
    assert_eq!(subjects, ["First", "Second", "Third"]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_claim_whose_answer_is_lost_makes_no_message_uncertain() {
    let mut office = Office::new("guarded").await;
    let proxy = Proxy::start(&office.database.url);
    proxy.cut_when("with oldest as", CutAt::BeforeAnswer);
    let process = office.options.spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    office.ask(&process.client(), "First").await;
    office.is_done().await;
    assert_eq!(proxy.cut_count(), 1);
    let outbox = office.outbox().await;
    assert_eq!(outbox[0].0, "sent", "{outbox:?}");
    assert_eq!(office.sent().len(), 1);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_message_that_was_not_sent_is_not_uncertain_when_the_statement_that_says_so_is_cut() {
    let mut office = Office::new("guarded").await;
    let proxy = Proxy::start(&office.database.url);
    office.says("later not now");
    proxy.cut_when("set status = case when $3 then 'queued'", CutAt::BeforeServer);
    let process = office.options.spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    office.ask(&process.client(), "First").await;
    eventually("the cut", || async { (proxy.cut_count() == 1).then_some(()) }).await;
    office.says("receipt sent");
    office.is_done().await;
    let outbox = office.outbox().await;
    assert_eq!(outbox[0].0, "sent", "{outbox:?}");
    assert!(process.terminate().success());
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_message_that_went_out_while_the_database_was_away_for_longer_than_a_lease_is_sent_and_not_uncertain()
 {
    let mut office = Office::new("guarded").await;
    office.options = office.options.clone().short_lease();
    let proxy = Proxy::start(&office.database.url);
    office.says("held back");
    let process = office.options.spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    office.ask(&client, "First").await;
    sends(&office, 1).await;
    client.wait_for(&office.session_id, "completed").await;
    proxy.refuse(true);
    proxy.cut();
    office.says("receipt it is done");
    outlast_the_leases(&process, &office.database, "An outcome was not recorded; trying again").await;
    proxy.refuse(false);
    office.is_done().await;
    assert_eq!(office.sent().len(), 1);
    let outbox = office.outbox().await;
    assert_eq!(outbox[0].0, "sent", "{outbox:?}");
    assert!(process.terminate().success());
}
