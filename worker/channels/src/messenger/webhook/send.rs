//! Posts replies to the one configured address, signed, with the delivery id as `webhook-id`.

use super::super::http;
use super::super::limits::{Limits, Rate};
use super::NAME;
use crate::signed::sign_webhook;
use async_trait::async_trait;
use reqwest::header::CONTENT_TYPE;
use reqwest::{StatusCode, Url};
use secrecy::SecretString;
use serde_json::{Value, json};
use std::net::IpAddr;
use std::time::Duration;
use wakeful_config::messenger;
use wakeful_engine::channel::{Channel, Outbound, SendError};
use wakeful_engine::web::Reach;

/// In effect no limit. The receiver answers 429 when it wants less.
const UNLIMITED: Rate = Rate::per(1, 1000);
const REMEDY: &str = "; write the address itself, or set messenger.webhook.private_network = true";
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
    /// `None` if the configuration sets no `reply_url`.
    pub fn new(config: &messenger::Webhook) -> anyhow::Result<Option<Webhook>> {
        let Some(url) = config.reply_url.clone() else { return Ok(None) };
        let meant = config.private_network || names_itself(&url);
        let reach = if meant { Reach::Named(&[url.as_str()]) } else { Reach::Public(REMEDY) };
        let client = http::client(reach).no_proxy().build()?;
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

    /// The receiver recognises a repeated message by its `webhook-id`.
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
        self.limits.take(&[(RECEIVER.to_owned(), UNLIMITED)], "the webhook's receiver asked us to wait")?;
        // Every attempt sends the same body, so it contains no time.
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
                // Sending again is safe even if the receiver got it: the `webhook-id` is the same.
                None => SendError::Later(format!("the webhook's receiver answered {status}")),
            });
        }
        let remedy = if status.is_redirection() {
            "no redirect is followed: set messenger.webhook.reply_url to where it leads"
        } else if status == StatusCode::GONE {
            "it wants no more messages: remove messenger.webhook.reply_url, or set another one"
        } else {
            "look at what the receiver says about the request, and check messenger.webhook.reply_url and secrets"
        };
        Err(SendError::Refused(format!("the webhook's receiver answered {status}; {remedy}")))
    }
}

/// Returns whether the URL's host is an IP address or `localhost`. The operator who writes that means it.
fn names_itself(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_written_out_is_meant() {
        for (url, itself) in [
            ("http://127.0.0.1:8/x", true),
            ("http://[::1]/x", true),
            ("http://localhost/", true),
            ("http://example.org/", false),
            ("http://127.0.0.1.example.org/", false),
        ] {
            assert_eq!(names_itself(&url.parse().unwrap()), itself, "{url}");
        }
    }
}
