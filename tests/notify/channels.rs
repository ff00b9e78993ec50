//! Notifications by Slack and by mail; and buttons of Slack, whose presses Slack signs.

use super::*;
use crate::support::SmtpServer;
use crate::support::messengers::{Messengers, SLACK_SECRET, SLACK_TOKEN, slack_signature};
use reqwest::StatusCode as Status;

/// A stage whose rule sends to Slack, with buttons for one person.
async fn with_slack() -> (Stage, Messengers) {
    let mut stage = Stage::new("").await;
    let messengers = Messengers::start().await;
    let cut = stage.options.config.find("[web]").unwrap();
    stage.options.config.truncate(cut);
    stage.options = stage.options.config(&format!(
        "[messenger.slack]\ntoken = \"{SLACK_TOKEN}\"\nsigning_secrets = [\"{SLACK_SECRET}\"]\nbase_url = \"{}/api\"\n\
         allow_users = [\"U1\"]\n[[notify]]\nname = \"ops\"\nto = \"slack\"\nchannel = \"COPS\"\nbuttons = true\n\
         when = [\"failed\"]\nwindow_s = 0.2",
        messengers.url
    ));
    (stage, messengers)
}

fn press(client: &Client, user: &str, value: &str, secret: &str) -> reqwest::RequestBuilder {
    let payload = json!({"type": "block_actions", "user": {"id": user}, "channel": {"id": "COPS"}, "message": {"ts": "99.000001"},
        "actions": [{"action_id": "wakeful_retry", "type": "button", "value": value}]});
    let encoded: String = payload.to_string().bytes().map(|byte| format!("%{byte:02X}")).collect();
    let (body, at) = (format!("payload={encoded}"), chrono::Utc::now().timestamp().to_string());
    client
        .post_request("/v1/triggers/messenger/slack/actions")
        .header("content-type", "application/x-www-form-urlencoded")
        .header("X-Slack-Signature", slack_signature(secret, &at, &body))
        .header("X-Slack-Request-Timestamp", at)
        .body(body)
}

#[tokio::test]
async fn a_button_of_slack_acts_once_for_those_who_may_press_and_only_if_slack_signed_it() {
    let (stage, messengers) = with_slack().await;
    let process = stage.serve().await;
    let session = stage.session(&process, "broken", 400, "failed").await;
    messengers.has(1).await;
    let card = messengers.sent().remove(0);
    assert_eq!(card.place, "COPS");
    assert!(card.text.contains("A run failed"), "{}", card.text);
    let blocks = card.body["blocks"].as_array().unwrap();
    assert!(blocks.iter().all(|block| block["text"]["type"] != "mrkdwn"), "{blocks:?}");
    let actions = blocks.iter().find(|block| block["type"] == "actions").unwrap();
    let value = actions["elements"][0]["value"].as_str().unwrap();
    stage.model_does.store(0, Ordering::SeqCst);
    let client = process.client();
    let status = async |user: &str, value: &str, secret: &str| {
        press(&client, user, value, secret).send().await.unwrap().status()
    };
    assert_eq!(status("U1", value, "another secret").await, Status::UNAUTHORIZED);
    assert_eq!(status("U2", value, SLACK_SECRET).await, Status::OK, "taken, and nothing done");
    // A button's token is not one of a link.
    let (by_link, _) = client.post("/v1/links/use", &json!({"token": value})).await;
    assert_eq!(by_link, Status::NOT_FOUND);
    assert_eq!(stage.count("select count(*) from act_links where used_at is not null and $1 <> ''").await, 0);
    let presses = (0..16).map(|_| status("U1", value, SLACK_SECRET));
    assert!(futures::future::join_all(presses).await.iter().all(|status| *status == Status::OK));
    client.wait_for(&session, "completed").await;
    let retries = "select count(*) from session_events where type = 'SESSION_STEERED' and $1 <> ''";
    assert_eq!(stage.count(retries).await, 1);
    let audited = "select count(*) from audit_log where verb = 'link.retry' and actor = 'Slack user U1' and outcome = 'done'
        and target = $1";
    assert_eq!(stage.database.value::<i64>(audited, &session).await, 1);
    messengers.has(2).await;
    assert!(messengers.sent()[1].text.contains("by U1"), "{:?}", messengers.sent()[1]);
}

#[tokio::test]
async fn a_button_of_slack_declines_a_call_for_its_presser() {
    let (mut stage, messengers) = with_slack().await;
    stage.options.config = stage.options.config.replace("when = [\"failed\"]", "when = [\"approval\"]");
    let process = stage.serve().await;
    let session = stage.session(&process, "till", 2, "needs_attention").await;
    messengers.has(1).await;
    let card = messengers.sent().remove(0);
    let blocks = card.body["blocks"].as_array().unwrap();
    let at = blocks.iter().position(|block| block["type"] == "actions").unwrap();
    assert_eq!(blocks[at - 1]["text"]["text"], "charge {\"cents\": 500}", "above the buttons: {blocks:?}");
    let buttons = blocks[at]["elements"].as_array().unwrap();
    let named: Vec<&str> = buttons.iter().map(|one| one["text"]["text"].as_str().unwrap()).collect();
    assert_eq!(named, ["Approve", "Decline"]);
    let client = process.client();
    let declined = press(&client, "U1", buttons[1]["value"].as_str().unwrap(), SLACK_SECRET);
    assert_eq!(declined.send().await.unwrap().status(), Status::OK);
    let session = client.wait_for(&session, "completed").await;
    let told = &crate::support::client::texts(&session, "tool")[0];
    assert!(told.starts_with("DECLINED") && told.contains("Slack user U1 declined it"), "{told}");
    assert!(stage.options.effects().is_empty());
    messengers.has(2).await;
    assert!(messengers.sent()[1].text.contains("Declined by U1"), "{:?}", messengers.sent()[1]);
}

#[tokio::test]
async fn a_rule_may_send_mail() {
    let mut stage = Stage::new("").await;
    let smtp = SmtpServer::start().await;
    let cut = stage.options.config.find("[web]").unwrap();
    stage.options.config.truncate(cut);
    stage.options = stage.options.config(&smtp.config()).config(
        "[[notify]]\nname = \"ops\"\nto = \"email\"\naddress = \"ops@example.org\"\nwhen = [\"failed\"]\nwindow_s = 0.2",
    );
    let process = stage.serve().await;
    let session = stage.session(&process, "broken", 400, "failed").await;
    let mail = smtp.has(1).await.remove(0);
    assert!(mail.header("Subject").unwrap().contains("A run failed"), "{:?}", mail.header("Subject"));
    assert!(mail.body().contains(&session), "{}", mail.body());
    // A process dies when it has claimed the next one. Whether that was sent cannot be known, so it is sent, under its own id.
    assert!(process.terminate().success());
    stage.copies(&session, 1, 1).await;
    let dying = stage.options.clone().env("FAILPOINTS", "K80_notify=1*return").spawn(&stage.database.url);
    stage.fail(1, 1).await;
    assert!(!dying.ended().await.0.success());
    sqlx::query("update notifications set next_at = now() where status = 'sending'")
        .execute(&stage.database.pool)
        .await
        .unwrap();
    let _process = stage.serve().await;
    let mails = smtp.has(2).await;
    assert!(mails[1].body().contains("sess_copy_1"), "{}", mails[1].body());
    assert!(
        mails[1].header("Message-ID").unwrap().starts_with("<ntf_"),
        "{:?}",
        mails[1].header("Message-ID")
    );
}
