//! Builds each trigger as the HTTP request that its real sender makes, with its address and signature.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use sha2::Sha256;

/// An event from outside, to be sent to the server.
#[derive(Clone, Debug)]
pub enum Trigger {
    Chat {
        conversation_id: String,
        text: String,
        user_id: Option<String>,
        agent: Option<String>,
        client_key: Option<String>,
    },
    /// A whole mail, RFC 5322.
    Email { raw: Vec<u8> },
    /// A schedule's tick, now.
    Cron { schedule: String },
    Message {
        via: Via,
        /// The provider's own JSON, byte for byte.
        body: Vec<u8>,
        /// The secret that the provider signs with.
        secret: SecretString,
        /// The sender's id of the message.
        message_id: String,
    },
    /// A notice from another system: `{"notice": {"title", "body"}, "conversation_id"?, "client_key"?}`.
    Herald { body: Vec<u8> },
}

/// A messenger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Via {
    /// The Events API.
    Slack,
    /// A bot's webhook.
    Telegram,
    /// Standard Webhooks.
    Webhook,
}

/// One POST.
#[derive(Clone, Debug)]
pub struct Request {
    /// The path's segments.
    pub path: Vec<String>,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// The request carries a signature, so it needs no token.
    pub signed: bool,
}

/// A secret that does not have the form of this provider's secrets.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadSecret(&'static str);

impl Trigger {
    /// Builds the request, signed at `now_unix_s`.
    ///
    /// # Errors
    /// `BadSecret`.
    pub fn request(&self, now_unix_s: i64) -> Result<Request, BadSecret> {
        let json = ("content-type", "application/json".to_owned());
        let request = |path: &[&str], headers, body, signed| Request {
            path: ["v1"].iter().chain(path).map(|&part| part.to_owned()).collect(),
            headers,
            body,
            signed,
        };
        Ok(match self {
            Trigger::Chat { conversation_id, text, user_id, agent, client_key } => {
                let mut body = json!({"text": text});
                for (name, value) in [("user_id", user_id), ("agent", agent), ("client_key", client_key)] {
                    if let Some(value) = value {
                        body[name] = json!(value);
                    }
                }
                request(
                    &["chat", conversation_id, "messages"],
                    vec![json],
                    body.to_string().into_bytes(),
                    false,
                )
            }
            Trigger::Email { raw } => {
                let mail = ("content-type", "message/rfc822".to_owned());
                request(&["triggers", "email", "raw"], vec![mail], raw.clone(), false)
            }
            Trigger::Cron { schedule } => {
                request(&["schedules", schedule, "trigger"], vec![json], b"{}".to_vec(), false)
            }
            Trigger::Herald { body } => request(&["triggers", "herald"], vec![json], body.clone(), false),
            Trigger::Message { via, body, secret, message_id } => {
                let mut headers = vec![json];
                headers.extend(via.signature(secret, message_id, body, now_unix_s)?);
                request(&["triggers", "messenger", via.as_str()], headers, body.clone(), true)
            }
        })
    }
}

impl Via {
    /// The name of the messenger in the path.
    pub fn as_str(self) -> &'static str {
        match self {
            Via::Slack => "slack",
            Via::Telegram => "telegram",
            Via::Webhook => "webhook",
        }
    }

    /// Returns the headers that prove that `body` comes from the provider.
    fn signature(
        self,
        secret: &SecretString,
        message_id: &str,
        body: &[u8],
        now_unix_s: i64,
    ) -> Result<Vec<(&'static str, String)>, BadSecret> {
        let secret = secret.expose_secret();
        Ok(match self {
            // https://docs.slack.dev/authentication/verifying-requests-from-slack
            Via::Slack => {
                let mac = mac(secret.as_bytes(), &[format!("v0:{now_unix_s}:").as_bytes(), body]);
                vec![
                    ("x-slack-request-timestamp", now_unix_s.to_string()),
                    ("x-slack-signature", format!("v0={}", hex::encode(mac))),
                ]
            }
            // https://core.telegram.org/bots/api#setwebhook
            Via::Telegram => {
                if secret.is_empty() || !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
                    return Err(BadSecret("a secret token of Telegram has letters, digits, _ and - only"));
                }
                vec![("x-telegram-bot-api-secret-token", secret.to_owned())]
            }
            // https://www.standardwebhooks.com
            Via::Webhook => {
                let key = secret.strip_prefix("whsec_").unwrap_or(secret);
                let key = STANDARD.decode(key).map_err(|_| {
                    BadSecret("a secret of Standard Webhooks is whsec_ and Base64 after it, as the configuration has it")
                })?;
                let mac = mac(&key, &[format!("{message_id}.{now_unix_s}.").as_bytes(), body]);
                vec![
                    ("webhook-id", message_id.to_owned()),
                    ("webhook-timestamp", now_unix_s.to_string()),
                    ("webhook-signature", format!("v1,{}", STANDARD.encode(mac))),
                ]
            }
        })
    }

    /// Builds the JSON that the provider sends when a person writes `text`.
    pub fn message(
        self,
        conversation: &str,
        user: &str,
        text: &str,
        message_id: &str,
        now_unix_s: i64,
    ) -> Value {
        match self {
            Via::Slack => json!({
                "type": "event_callback",
                "team_id": "T0WAKEFUL",
                "api_app_id": "A0WAKEFUL",
                "event_id": format!("Ev{message_id}"),
                "event_time": now_unix_s,
                "event": {
                    "type": "message",
                    "channel": conversation,
                    "channel_type": "im",
                    "user": user,
                    "text": text,
                    "ts": format!("{now_unix_s}.{:06}", number(message_id) % 1_000_000),
                },
            }),
            Via::Telegram => {
                let chat = conversation.parse().unwrap_or_else(|_| number(conversation));
                json!({
                    "update_id": number(message_id),
                    "message": {
                        "message_id": number(message_id) % 1_000_000_000,
                        "date": now_unix_s,
                        "chat": {"id": chat, "type": "private", "first_name": user},
                        "from": {"id": chat, "is_bot": false, "first_name": user},
                        "text": text,
                    },
                })
            }
            Via::Webhook => json!({"conversation_id": conversation, "text": text, "sender": user}),
        }
    }

    /// Returns whether `body` already has this provider's JSON form. Anything else is a plain text that needs
    /// wrapping.
    pub fn sends(self, body: &[u8]) -> bool {
        let Ok(Value::Object(body)) = serde_json::from_slice(body) else { return false };
        match self {
            Via::Slack => body.contains_key("type"),
            Via::Telegram => body.contains_key("update_id"),
            Via::Webhook => body.contains_key("conversation_id") && body.contains_key("text"),
        }
    }
}

/// Derives a number from a name, always the same one. Some providers use numbers as ids.
fn number(name: &str) -> u64 {
    use sha2::Digest;
    let digest = Sha256::digest(name.as_bytes());
    // 48 bits, which fit the 53 bits that a JavaScript number holds exactly.
    digest.iter().take(6).fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(request: &Request, name: &str) -> String {
        let found = request.headers.iter().find(|(header, _)| *header == name);
        found.map(|(_, value)| value.clone()).unwrap_or_default()
    }

    fn message(via: Via, secret: &str, body: &[u8], id: &str) -> Trigger {
        let secret = SecretString::from(secret);
        Trigger::Message { via, body: body.to_vec(), secret, message_id: id.into() }
    }

    #[test]
    fn slack_is_signed_as_its_own_example_is() {
        // The example of Slack's documentation.
        let body = b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&\
                     channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&\
                     response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F\
                     96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";
        let trigger = message(Via::Slack, "8f742231b10e8888abcd99yyyzzz85a5", body, "m");
        let request = trigger.request(1_531_420_618).unwrap();
        assert_eq!(
            header(&request, "x-slack-signature"),
            "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"
        );
        assert_eq!(request.path.join("/"), "v1/triggers/messenger/slack");
        assert!(request.signed);
    }

    #[test]
    fn a_webhook_is_signed_as_the_standards_own_example_is() {
        // The example that the libraries of Standard Webhooks are tested with.
        let body = br#"{"test": 2432232314}"#;
        let trigger = message(
            Via::Webhook,
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            body,
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
        );
        let request = trigger.request(1_614_265_330).unwrap();
        assert_eq!(header(&request, "webhook-signature"), "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert_eq!(header(&request, "webhook-id"), "msg_p5jXN8AQM9LWM0D4loKWxJek");
        assert!(message(Via::Webhook, "not base64!", body, "m").request(0).is_err());
    }

    #[test]
    fn a_text_becomes_what_the_provider_sends_and_its_own_json_stays() {
        for via in [Via::Slack, Via::Telegram, Via::Webhook] {
            let made = via.message("42", "ann", "Hi", "m1", 1_700_000_000).to_string();
            assert!(via.sends(made.as_bytes()), "{made}");
            assert!(made.contains("Hi") && made.contains("42"), "{made}");
            for text in ["Hi", "{", "[1]", "{\"a\": 1}"] {
                assert!(!via.sends(text.as_bytes()), "{text}");
            }
        }
    }

    #[test]
    fn a_schedules_name_is_one_segment_of_the_path() {
        let request = Trigger::Cron { schedule: "daily/report".into() }.request(0).unwrap();
        assert_eq!(request.path, ["v1", "schedules", "daily/report", "trigger"]);
        assert!(!request.signed);
    }
}
