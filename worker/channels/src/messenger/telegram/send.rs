//! `sendMessage`. Telegram has no idempotency keys and cannot look up a message, so a message that may have
//! been sent is never sent again automatically.

use super::super::http::{self, word};
use super::super::limits::{Limits, Rate};
use super::NAME;
use async_trait::async_trait;
use reqwest::StatusCode;
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use std::time::Duration;
use wakeful_engine::channel::{Channel, Outbound, SendError};
use wakeful_engine::web::Reach;

/// Telegram recommends at most 30 messages a second, …
const OF_BOT: Rate = Rate::per(40, 5);
/// … one a second in a chat, …
const IN_CHAT: Rate = Rate::per(1100, 1);
/// … and 20 a minute in a group.
const IN_GROUP: Rate = Rate::per(3200, 1);

/// The bucket of the whole bot.
const BOT: &str = "the bot";

/// A bot.
#[derive(Debug)]
pub struct Telegram {
    /// The address of `sendMessage`. Secret, because it contains the token.
    url: SecretString,
    client: reqwest::Client,
    limits: Limits,
}

impl Telegram {
    pub fn new(token: SecretString, base_url: &str) -> anyhow::Result<Telegram> {
        let url = format!("{base_url}/bot{}/sendMessage", token.expose_secret());
        let client = http::client(Reach::Named(&[base_url])).build()?;
        Ok(Telegram { url: url.into(), client, limits: Limits::new() })
    }
}

#[async_trait]
impl Channel for Telegram {
    fn name(&self) -> &str {
        NAME
    }

    fn is_idempotent(&self) -> bool {
        false
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let content = message.content;
        let (Some(chat), Some(text)) = (content["to"]["chat_id"].as_i64(), content["text"].as_str()) else {
            return Err(SendError::Refused("the message has no text, or no chat of Telegram".to_owned()));
        };
        let rate = if chat < 0 { IN_GROUP } else { IN_CHAT };
        let bucket = chat.to_string();
        self.limits.take(
            &[(BOT.to_owned(), OF_BOT), (bucket.clone(), rate)],
            "Telegram takes one message a second in a chat, and 20 a minute in a group: this one waits for its turn",
        )?;
        // Without a `parse_mode` Telegram shows the text as it is and interprets no markup.
        let mut body = json!({"chat_id": chat, "text": text, "link_preview_options": {"is_disabled": true}});
        if let Some(topic) = content["to"]["message_thread_id"].as_i64() {
            body["message_thread_id"] = json!(topic);
        }
        let mut answer =
            http::ask("Telegram", self.client.post(self.url.expose_secret()).json(&body)).await?;
        let mut said = answer.json();
        // A group that became a supergroup has another id. Telegram took nothing, so this is not a second message.
        if let Some(moved) = said["parameters"]["migrate_to_chat_id"].as_i64() {
            body["chat_id"] = json!(moved);
            answer = http::ask("Telegram", self.client.post(self.url.expose_secret()).json(&body)).await?;
            said = answer.json();
        }
        if said["ok"] == true {
            return Ok(json!({"chat_id": body["chat_id"], "message_id": said["result"]["message_id"]}));
        }
        if answer.status == StatusCode::TOO_MANY_REQUESTS || said["error_code"] == 429 {
            let asked = said["parameters"]["retry_after"].as_u64().map(Duration::from_secs);
            let after =
                asked.unwrap_or_else(|| answer.wait()).clamp(Duration::from_secs(1), http::LONGEST_WAIT);
            self.limits.close(&bucket, after);
            // Telegram may mean this chat or the whole bot. So the other chats pause for only a second; if
            // the limit is on the bot, they get a 429 of their own.
            self.limits.close(BOT, Duration::from_secs(1));
            let error = "Telegram takes no more messages just now".to_owned();
            return Err(SendError::Throttled { error, after });
        }
        if answer.status.is_server_error() {
            return Err(answer.server_error("Telegram"));
        }
        if answer.status.is_success() {
            return Err(SendError::Unknown("Telegram's answer is not what it should be".to_owned()));
        }
        let description = word(said["description"].as_str().unwrap_or_default());
        let remedy = match answer.status {
            StatusCode::FORBIDDEN => {
                "the bot was blocked or removed from the chat: somebody there must let it in again"
            }
            StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND => {
                "set messenger.telegram.token to the token that BotFather gives"
            }
            _ => "Telegram's documentation of sendMessage says what it means",
        };
        Err(SendError::Refused(format!(
            "Telegram refused the message: {} {description}; {remedy}",
            answer.status.as_u16()
        )))
    }
}
