//! Conversations that a trigger without a user will use: no user can be there before it.

use super::stage::{Stage, TOKEN, problem, send};
use crate::support::messengers::{TELEGRAM_SECRET, TELEGRAM_TOKEN, WEBHOOK_SECRET, webhook_signature};
use crate::support::{Client, eventually};
use reqwest::StatusCode;
use serde_json::{Value, json};

fn messengers() -> String {
    format!(
        "[agents.other]\nmodel = \"openai/test\"\nsystem_prompt = \"x\"\n\
         [messenger.telegram]\ntoken = \"{TELEGRAM_TOKEN}\"\nwebhook_secrets = [\"{TELEGRAM_SECRET}\"]\n\
         allow_users = [\"5\"]\n[messenger.webhook]\nsecrets = [\"{WEBHOOK_SECRET}\"]"
    )
}

/// The conversations that [`telegram`], [`webhook`] and the schedule `report` use.
const USED: [&str; 3] = ["telegram/4242/1", "webhook/w1", "schedule-report"];

async fn telegram(client: &Client) -> (StatusCode, Value) {
    let message = json!({"message_id": 1, "date": 1, "from": {"id": 5, "is_bot": false},
        "chat": {"id": 1, "type": "private"}, "text": "My secret"});
    let request = client
        .post_request("/v1/triggers/messenger/telegram")
        .header("X-Telegram-Bot-Api-Secret-Token", TELEGRAM_SECRET)
        .body(json!({"update_id": 1, "message": message}).to_string());
    send(request).await
}

async fn webhook(client: &Client) -> (StatusCode, Value) {
    let body = json!({"conversation_id": "w1", "text": "My secret", "sender": "ann"}).to_string();
    let at = chrono::Utc::now().timestamp().to_string();
    let request = client
        .post_request("/v1/triggers/messenger/webhook")
        .header("webhook-id", "msg_1")
        .header("webhook-signature", webhook_signature(WEBHOOK_SECRET, "msg_1", &at, &body))
        .header("webhook-timestamp", at)
        .body(body);
    send(request).await
}

async fn scheduled(stage: &Stage) {
    let schedule = json!({"name": "report", "cron": "0 9 * * *", "prompt": "My secret"});
    let (status, body) = stage.post(TOKEN, "/v1/schedules", &schedule).await;
    assert_eq!(status, StatusCode::CREATED, "{body}");
}

fn chat(conversation: &str) -> String {
    format!("/v1/chat/{}/messages", conversation.replace('/', "%2F"))
}

#[tokio::test]
async fn a_limited_token_begins_no_conversation_that_a_messenger_a_schedule_a_mail_or_a_notice_will_use() {
    let stage = Stage::new(&messengers()).await;
    let mallory = stage.user(TOKEN, "mallory").await;
    let of_agent = stage.token(&["--scope", "operate", "--agent", "other"]).await;
    let hi = json!({"text": "Hi"});
    for id in USED.into_iter().chain(["slack/T1/C1", "mail-aaaa", "herald-0123", "absurd-0123"]) {
        for token in [&mallory, &of_agent] {
            let (status, body) = stage.post(token, &chat(id), &hi).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{id}: {body}");
            assert!(problem(&body).contains("begin"), "{body}");
        }
        let notice = json!({"notice": "Hi", "conversation_id": id});
        let (status, body) = stage.post(&of_agent, "/v1/triggers/herald", &notice).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{id}: {body}");
    }
    let client = stage.process.client();
    assert_eq!(telegram(&client).await.0, StatusCode::OK);
    assert_eq!(webhook(&client).await.0, StatusCode::ACCEPTED);
    scheduled(&stage).await;
    let (status, body) = stage.post(TOKEN, "/v1/schedules/report/trigger", &json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{body}");
    for token in [&mallory, &of_agent] {
        let (_, listed) = stage.get(token, "/v1/sessions").await;
        assert_eq!(listed["items"], json!([]));
    }
    // A notice of its own, and the chat about it, are open to the agent's token.
    let (status, woken) = stage.post(&of_agent, "/v1/triggers/herald", &json!({"notice": "Hi"})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
    let (_, session) =
        stage.get(&of_agent, &format!("/v1/sessions/{}", woken["session_id"].as_str().unwrap())).await;
    let conversation = session["conversation_id"].as_str().unwrap();
    assert!(conversation.starts_with("herald-"), "{conversation}");
    assert_eq!(stage.post(&of_agent, &chat(conversation), &hi).await.0, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn a_limited_token_begins_no_conversation_that_a_schedule_names() {
    let config =
        "[schedules.daily]\ncron = \"0 9 * * *\"\nprompt = \"My secret\"\nconversation = \"evenings\"\n";
    let stage = Stage::new(&format!("{}\n{config}", messengers())).await;
    let report =
        json!({"name": "report", "cron": "0 9 * * *", "prompt": "My secret", "conversation_id": "mornings"});
    let (status, body) = stage.post(TOKEN, "/v1/schedules", &report).await;
    assert_eq!(status, StatusCode::CREATED, "{body}");
    eventually("the schedule of the configuration", || async {
        let (_, listed) = stage.get(TOKEN, "/v1/schedules").await;
        (listed["items"].as_array().map(Vec::len) == Some(2)).then_some(())
    })
    .await;
    let mallory = stage.user(TOKEN, "mallory").await;
    let of_agent = stage.token(&["--scope", "operate", "--agent", "other"]).await;
    let hi = json!({"text": "Hi"});
    for id in ["mornings", "evenings"] {
        for token in [&mallory, &of_agent] {
            let (status, body) = stage.post(token, &chat(id), &hi).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{id}: {body}");
            assert!(problem(&body).contains("a schedule begins"), "{body}");
        }
        let notice = json!({"notice": "Hi", "conversation_id": id});
        let (status, body) = stage.post(&of_agent, "/v1/triggers/herald", &notice).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{id}: {body}");
    }
    // Another space has another conversation of that name, and the application may begin even this one.
    let acme = stage.token(&["--scope", "operate", "--space", "acme"]).await;
    let neighbour = stage.user(&acme, "mallory").await;
    assert_eq!(stage.post(&neighbour, &chat("mornings"), &hi).await.0, StatusCode::ACCEPTED);
    assert_eq!(stage.post(TOKEN, &chat("evenings"), &hi).await.0, StatusCode::ACCEPTED);
    let (status, body) = stage.post(TOKEN, "/v1/schedules/report/trigger", &json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{body}");
    assert_eq!(stage.post(&mallory, &chat("a-chat"), &hi).await.0, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn what_speaks_for_no_user_does_not_enter_a_conversation_that_has_one() {
    let stage = Stage::new(&messengers()).await;
    // As an installation from before the rule may have them: the application claims them for a user.
    for id in USED.into_iter().chain(["c1"]) {
        let (status, body) = stage.post(TOKEN, &chat(id), &json!({"text": "Hi", "user_id": "mallory"})).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{body}");
    }
    let client = stage.process.client();
    // Telegram repeats what is not answered with 200.
    assert_eq!(telegram(&client).await.0, StatusCode::OK);
    stage.process.wait_for_log("belongs to a user").await;
    let (status, body) = webhook(&client).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{body}");
    scheduled(&stage).await;
    let (status, body) = stage.post(TOKEN, "/v1/schedules/report/trigger", &json!({})).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{body}");
    assert!(problem(&body).contains("belongs to a user"), "{body}");
    for (user, admitted) in [(None, false), (Some("ann"), false), (Some("mallory"), true)] {
        let notice = json!({"notice": "My secret", "conversation_id": "c1", "user_id": user});
        let (status, body) = stage.post(TOKEN, "/v1/triggers/herald", &notice).await;
        assert_eq!(status == StatusCode::ACCEPTED, admitted, "{user:?}: {body}");
        assert!(admitted || status == StatusCode::FORBIDDEN, "{body}");
    }
    // The application itself writes everywhere.
    assert_eq!(stage.post(TOKEN, &chat("c1"), &json!({"text": "Hi"})).await.0, StatusCode::ACCEPTED);
    let secrets: i64 = stage
        .database
        .value("select count(*) from session_inbox where content like '%' || $1 || '%'", "My secret")
        .await;
    assert_eq!(secrets, 1, "the notice for its user");
    // A notice claims nothing for the person that it names in its sender's own words.
    let notice = json!({"notice": "Hi", "conversation_id": "c2", "user_id": "Ann"});
    assert_eq!(stage.post(TOKEN, "/v1/triggers/herald", &notice).await.0, StatusCode::ACCEPTED);
    assert_eq!(
        stage.post(TOKEN, &chat("c2"), &json!({"text": "Hi", "user_id": "ann"})).await.0,
        StatusCode::ACCEPTED
    );
}
