//! Slack, Telegram and the signed webhook, both ways. An incoming message counts once, however often the
//! messenger repeats it. An outgoing message is sent once if the messenger can tell whether it was sent.

mod arrivals;
mod kills;
mod replies;
mod spaces;
mod told;

use crate::support::messengers::{
    self, Messengers, SLACK_SECRET, SLACK_TOKEN, TELEGRAM_SECRET, TELEGRAM_TOKEN, WEBHOOK_SECRET,
};
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use reqwest::{RequestBuilder, StatusCode};
use serde_json::{Value, json};

/// One of the three messengers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    Slack,
    Telegram,
    Webhook,
}

const ALL: [Medium; 3] = [Medium::Slack, Medium::Telegram, Medium::Webhook];

/// A person's message as its messenger posts it, any number of times.
#[derive(Clone, Debug)]
struct Post {
    medium: Medium,
    /// The webhook's message id.
    id: String,
    body: String,
}

impl Post {
    /// The `number`th message of conversation `conversation`, both from 1.
    fn new(medium: Medium, conversation: u32, number: u32, text: &str) -> Post {
        let (id, body) = match medium {
            Medium::Slack => {
                let mut body = slack_event(conversation, number, text);
                body["event"]["type"] = json!("app_mention");
                (String::new(), body)
            }
            Medium::Telegram => {
                let message = json!({"message_id": number, "date": 1, "from": {"id": 5, "is_bot": false},
                    "chat": {"id": conversation, "type": "private"}, "text": text});
                (String::new(), json!({"update_id": conversation * 1000 + number, "message": message}))
            }
            Medium::Webhook => {
                let body =
                    json!({"conversation_id": format!("w{conversation}"), "text": text, "sender": "ann"});
                (format!("msg_{conversation}_{number}"), body)
            }
        };
        Post { medium, id, body: body.to_string() }
    }

    /// A request with the headers that its messenger would send.
    fn request(&self, client: &Client) -> RequestBuilder {
        self.signed(client, chrono::Utc::now().timestamp(), [SLACK_SECRET, TELEGRAM_SECRET, WEBHOOK_SECRET])
    }

    /// The request as sent at time `at`, signed with these secrets of Slack, Telegram and the webhook.
    fn signed(&self, client: &Client, at: i64, [slack, telegram, webhook]: [&str; 3]) -> RequestBuilder {
        let (body, at) = (self.body.clone(), at.to_string());
        match self.medium {
            Medium::Slack => client
                .post_request("/v1/triggers/messenger/slack")
                .header("X-Slack-Signature", messengers::slack_signature(slack, &at, &body))
                .header("X-Slack-Request-Timestamp", at)
                .body(body),
            Medium::Telegram => client
                .post_request("/v1/triggers/messenger/telegram")
                .header("X-Telegram-Bot-Api-Secret-Token", telegram)
                .body(body),
            Medium::Webhook => client
                .post_request("/v1/triggers/messenger/webhook")
                .header("webhook-id", &self.id)
                .header("webhook-signature", messengers::webhook_signature(webhook, &self.id, &at, &body))
                .header("webhook-timestamp", at)
                .body(body),
        }
    }

    /// Sends the message until it is accepted, as its messenger does. A busy server may answer that it should come again.
    async fn send(&self, client: &Client) {
        eventually("a message to be taken", || async {
            let response = self.request(client).send().await.unwrap();
            let status = response.status();
            let busy = matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS);
            let taken = status.is_success();
            assert!(taken || busy, "{status} {}: {}", response.text().await.unwrap(), self.body);
            taken.then_some(())
        })
        .await;
    }
}

/// Message `number` of a Slack thread. Each `conversation` is one thread in its own channel.
fn slack_event(conversation: u32, number: u32, text: &str) -> Value {
    let root = format!("{conversation}.000001");
    let mut event = json!({"type": "message", "channel": format!("C{conversation}"), "channel_type": "channel",
        "user": "U1", "text": text, "ts": format!("{conversation}.{number:06}")});
    if number > 1 {
        event["thread_ts"] = json!(root);
    }
    json!({"type": "event_callback", "team_id": "T1", "api_app_id": "A1", "event_id": format!("Ev{conversation}-{number}"),
        "event_time": 1, "authorizations": [{"team_id": "T1", "user_id": "UBOT", "is_bot": true}], "event": event})
}

/// A world with the three messengers. By default its model answers `Re: ` and the last message.
struct Desk {
    database: Database,
    model: ModelServer,
    messengers: Messengers,
    options: Options,
}

impl Desk {
    async fn new() -> Desk {
        Desk::whose_model(|body| Answer::text(&format!("Re: {}", last_user_text(body)))).await
    }

    async fn whose_model(script: impl Fn(&Value) -> Answer + Send + Sync + 'static) -> Desk {
        let model = ModelServer::start(move |body, _| script(body)).await;
        let messengers = Messengers::start().await;
        let url = &messengers.url;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(&format!(
            "[messenger.slack]\ntoken = \"{SLACK_TOKEN}\"\nsigning_secrets = [\"an older one\", \"{SLACK_SECRET}\"]\n\
             base_url = \"{url}/api\"\n\
             [messenger.telegram]\ntoken = \"{TELEGRAM_TOKEN}\"\nwebhook_secrets = [\"{TELEGRAM_SECRET}\"]\n\
             base_url = \"{url}/\"\nallow_users = [\"5\"]\n\
             [messenger.webhook]\nsecrets = [\"{WEBHOOK_SECRET}\"]\nreply_url = \"{url}/replies\""
        ));
        Desk { database: Database::new().await, model, messengers, options }
    }

    async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    async fn serve_until(&self, failpoint: &str) -> Process {
        self.options.clone().env("FAILPOINTS", failpoint).serve(&self.database).await
    }

    async fn count(&self, sql: &'static str) -> i64 {
        self.database.value(sql, "").await
    }

    /// Counts of sessions, accepted messages, and runs.
    async fn taken(&self) -> (i64, i64, i64) {
        (
            self.count("select count(*) from conversation_sessions where $1 = ''").await,
            self.count("select count(*) from session_inbox where $1 = ''").await,
            self.count("select count(*) from session_runs where $1 = ''").await,
        )
    }

    /// Waits until no job is left.
    async fn is_done(&self) {
        eventually("every job to end", || async {
            (self.count("select count(*) from jobs where $1 = ''").await == 0).then_some(())
        })
        .await;
    }

    /// (status, last_error, attempt), in order.
    async fn outbox(&self) -> Vec<(String, Option<String>, i32)> {
        sqlx::query_as("select status, last_error, attempt from deliveries order by ordinal")
            .fetch_all(&self.database.pool)
            .await
            .unwrap()
    }

    /// The newest session of a conversation.
    async fn session(&self, conversation_id: &str) -> String {
        let sql = "select session_id from conversation_sessions where conversation_id = $1 order by ordinal desc limit 1";
        self.database.value(sql, conversation_id).await
    }
}

/// The text of the last user message.
fn last_user_text(body: &Value) -> String {
    let messages = body["messages"].as_array().unwrap();
    let last = messages.iter().rev().find(|message| message["role"] == "user").unwrap();
    last["content"].as_str().unwrap().to_owned()
}

async fn refused(request: RequestBuilder) -> (StatusCode, String) {
    let response = request.send().await.unwrap();
    (response.status(), response.text().await.unwrap())
}
