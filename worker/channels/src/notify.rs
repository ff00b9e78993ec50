//! Posts the webhooks of `[[notify]]`, signed after Standard Webhooks, with the notification's id as `webhook-id`.
//!
//! They leave through the same door as the fetches of tools: only hosts that the rule's `web_allow` and `web_deny` permit, at public
//! addresses or at hosts of `[web] private_hosts`.

use super::signed::sign_webhook;
use async_trait::async_trait;
use secrecy::SecretString;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use wakeful_config::Config;
use wakeful_config::notify::To;
use wakeful_engine::channel::{Channel, Outbound, SendError};
use wakeful_engine::jobs::notify::CHANNEL;
use wakeful_engine::web::{Web, WebError, WebRequest};

/// The receivers of all rules.
struct Webhooks(BTreeMap<String, Receiver>);

struct Receiver {
    url: String,
    secrets: Vec<SecretString>,
    web: Web,
}

/// The channel of the rules that post webhooks, if there is one.
///
/// # Errors
/// When the HTTP client cannot be built.
pub(super) fn senders(config: &Config) -> anyhow::Result<Vec<Arc<dyn Channel>>> {
    let mut receivers = BTreeMap::new();
    for one in &config.notify {
        if let To::Webhook { url, secrets, web } = &one.to {
            let web = Web::new(&config.web)?.under(web, None);
            let receiver = Receiver { url: url.to_string(), secrets: secrets.clone(), web };
            receivers.insert(one.rule.name.clone(), receiver);
        }
    }
    if receivers.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![Arc::new(Webhooks(receivers))])
}

#[async_trait]
impl Channel for Webhooks {
    fn name(&self) -> &str {
        CHANNEL
    }

    /// The receiver recognises a repeated message by its `webhook-id`.
    fn is_idempotent(&self) -> bool {
        true
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let rule = message.content["rule"].as_str().unwrap_or_default();
        let Some(receiver) = self.0.get(rule) else {
            return Err(SendError::Refused(format!("no rule {rule:?} of [[notify]] posts a webhook here")));
        };
        let body = message.content["body"].to_string();
        let now = chrono::Utc::now().timestamp();
        let signature = sign_webhook(&receiver.secrets, message.delivery_id, now, body.as_bytes());
        let header = |name: &str, value: String| (name.to_owned(), value);
        let request = WebRequest {
            method: "POST".to_owned(),
            url: receiver.url.clone(),
            headers: vec![
                header("content-type", "application/json".to_owned()),
                header("webhook-id", message.delivery_id.to_owned()),
                header("webhook-timestamp", now.to_string()),
                header("webhook-signature", signature),
            ],
            body: body.into_bytes(),
        };
        let answer = receiver.web.send(request).await.map_err(|error| match error {
            WebError::Refused(text) if text.contains("private_hosts") => SendError::Refused(text),
            WebError::Refused(text) => {
                SendError::Refused(format!("{text}; or list a private host in [web] private_hosts"))
            }
            WebError::NotSent(text) => SendError::Later(text),
            other => SendError::Unknown(other.to_string()),
        })?;
        match answer.status {
            status @ 200..=299 => Ok(json!({"status": status})),
            // Sending again is safe even if the receiver got it: the `webhook-id` is the same.
            status @ (408 | 425 | 429 | 500..=599) => {
                Err(SendError::Later(format!("the receiver answered {status}")))
            }
            status @ 300..=399 => Err(SendError::Refused(format!(
                "the receiver answered {status}; no redirect is followed: set notify.url to where it leads"
            ))),
            status => Err(SendError::Refused(format!(
                "the receiver answered {status}; look at what it says about the request, and check notify.url and notify.secrets"
            ))),
        }
    }
}
