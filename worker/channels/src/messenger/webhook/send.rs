//! Replies are posted to the one address that the configuration names, signed, under their delivery's id.

use super::super::http;
use super::super::limits::{Limits, Rate};
use super::{NAME, network};
use crate::signed::sign_webhook;
use async_trait::async_trait;
use reqwest::header::CONTENT_TYPE;
use reqwest::{StatusCode, Url};
use secrecy::SecretString;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use wakeful_config::messenger;
use wakeful_engine::channel::{Channel, Outbound, SendError};

/// The receiver says by itself when it takes no more.
const UNLIMITED: Rate = Rate::per(1, 1000);
const RECEIVER: &str = "the receiver";

/// The receiver of replies.
#[derive(Debug)]
pub struct Webhook {
    url: Url,
    secrets: Vec<SecretString>,
    client: reqwest::Client,
    limits: Limits,
}

impl Webhook {
    /// `None` where the configuration names no receiver.
    pub fn new(config: &messenger::Webhook) -> anyhow::Result<Option<Webhook>> {
        let Some(url) = config.reply_url.clone() else { return Ok(None) };
        // Through a proxy nobody here would see which address is asked.
        let mut client = http::client().no_proxy();
        if !config.private_network && !network::names_itself(&url) {
            client = client.dns_resolver(Arc::new(network::Public));
        }
        let client = client.build()?;
        Ok(Some(Webhook { url, secrets: config.secrets.clone(), client, limits: Limits::new() }))
    }

    fn throttled(&self, after: Duration) -> SendError {
        self.limits.close(RECEIVER, after);
        SendError::Throttled { error: "the webhook's receiver takes no more just now".to_owned(), after }
    }
}

#[async_trait]
impl Channel for Webhook {
    fn name(&self) -> &str {
        NAME
    }

    /// The receiver knows a message by its `webhook-id`.
    fn is_idempotent(&self) -> bool {
        true
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let content = message.content;
        let (Some(conversation_id), Some(text)) =
            (content["to"]["conversation_id"].as_str(), content["text"].as_str())
        else {
            return Err(SendError::Refused("the message has no text, or no conversation".to_owned()));
        };
        self.limits.take(&[(RECEIVER.to_owned(), UNLIMITED)]).map_err(|after| SendError::Throttled {
            error: "the webhook's receiver asked to be left alone".to_owned(),
            after,
        })?;
        // The same bytes in each attempt: nothing in them tells the time.
        let data = json!({"conversation_id": conversation_id, "text": text, "part": content["part"],
            "parts": content["parts"]});
        let body = json!({"type": "message.reply", "data": data}).to_string();
        let (id, now) = (message.delivery_id, chrono::Utc::now().timestamp());
        let request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", now)
            .header("webhook-signature", sign_webhook(&self.secrets, id, now, body.as_bytes()))
            .body(body);
        let answer = http::ask("the webhook's receiver", request).await?;
        let status = answer.status;
        if status.is_success() {
            return Ok(json!({"status": status.as_u16()}));
        }
        if status == StatusCode::TOO_MANY_REQUESTS {
            return Err(self.throttled(answer.wait()));
        }
        if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT {
            return Err(match answer.retry_after() {
                Some(after) => self.throttled(after),
                // Under its key it may be sent again whatever became of it.
                None => SendError::Later(format!("the webhook's receiver answered {status}")),
            });
        }
        let remedy = if status.is_redirection() {
            "no redirect is followed: set messenger.webhook.reply_url to where it leads"
        } else if status == StatusCode::GONE {
            "it wants no more: take messenger.webhook.reply_url out, or set another one"
        } else {
            "look at what it says of the request, and at messenger.webhook.reply_url and secrets"
        };
        Err(SendError::Refused(format!("the webhook's receiver answered {status}; {remedy}")))
    }
}
