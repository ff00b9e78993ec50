//! Sends with `chat.postMessage`, and looks up whether a message was posted.

use super::super::http::{self, Answer, word};
use super::super::limits::{Limits, Rate};
use super::mrkdwn::mrkdwn;
use super::{NAME, text::escaped};
use async_trait::async_trait;
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use std::time::Duration;
use wakeful_engine::channel::{Channel, Found, Outbound, SendError};
use wakeful_engine::web::Reach;

/// The metadata type that marks our messages; the payload is the delivery id.
const EVENT_TYPE: &str = "wakeful_delivery";

/// Slack lets an app post one message a second in a channel, with short bursts …
const IN_CHANNEL: Rate = Rate::per(1100, 1);
/// … and several hundred a minute in a workspace.
const IN_WORKSPACE: Rate = Rate::per(200, 10);

/// The bucket of the workspace.
const WORKSPACE: &str = "the workspace";

/// How many pages of a conversation the search reads. If the message is not in them, it may still have been
/// sent.
const PAGES: usize = 10;

/// A bot of a workspace.
#[derive(Debug)]
pub struct Slack {
    token: SecretString,
    base_url: String,
    client: reqwest::Client,
    limits: Limits,
}

impl Slack {
    pub fn new(token: SecretString, base_url: String) -> anyhow::Result<Slack> {
        let client = http::client(Reach::Named(&[&base_url])).build()?;
        Ok(Slack { token, base_url, client, limits: Limits::new() })
    }

    /// Calls an API method. On success the body has `ok: true`.
    async fn ask(&self, request: reqwest::RequestBuilder) -> Result<Answer, SendError> {
        let answer = http::ask("Slack", request.bearer_auth(self.token.expose_secret())).await?;
        if answer.status == StatusCode::TOO_MANY_REQUESTS {
            return Err(self.throttled(answer.wait()));
        }
        let body = answer.json();
        match body["ok"].as_bool() {
            None if answer.status.is_server_error() => Err(answer.server_error("Slack")),
            Some(true) => Ok(answer),
            Some(false) => match body["error"].as_str().unwrap_or_default() {
                "ratelimited" | "rate_limited" => Err(self.throttled(answer.wait())),
                error => Err(refusal(error, body["needed"].as_str())),
            },
            None if answer.status.is_success() => {
                Err(SendError::Unknown("Slack's answer is not what it should be".to_owned()))
            }
            None => Err(SendError::Refused(format!(
                "Slack answered {}: check messenger.slack.base_url",
                answer.status
            ))),
        }
    }

    /// Slack limits by method and workspace, so its wait holds for everything that this process sends.
    fn throttled(&self, after: Duration) -> SendError {
        self.limits.close(WORKSPACE, after);
        SendError::Throttled { error: "Slack takes no more messages just now".to_owned(), after }
    }
}

#[async_trait]
impl Channel for Slack {
    fn name(&self) -> &str {
        NAME
    }

    fn is_idempotent(&self) -> bool {
        false
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let content = message.content;
        let (Some(channel), Some(text)) = (content["to"]["channel"].as_str(), content["text"].as_str())
        else {
            return Err(SendError::Refused("the message has no text, or no channel of Slack".to_owned()));
        };
        let buckets = [(WORKSPACE.to_owned(), IN_WORKSPACE), (channel.to_owned(), IN_CHANNEL)];
        self.limits
            .take(&buckets, "Slack takes one message a second in a channel: this one waits for its turn")?;
        // Our own cards, and the text beside them, have Slack's marks already.
        let has_blocks = content["blocks"].is_array();
        let mut body = json!({
            "channel": channel,
            "text": if has_blocks { escaped(text) } else { mrkdwn(text) },
            // No name in the text becomes a mention and Slack fetches no link in it: the text may come from
            // anyone.
            "parse": "none",
            "link_names": false,
            "unfurl_links": false,
            "unfurl_media": false,
            "metadata": {"event_type": EVENT_TYPE, "event_payload": {"delivery_id": message.delivery_id}},
        });
        if has_blocks {
            body["blocks"] = content["blocks"].clone();
        }
        if let Some(thread_ts) = content["to"]["thread_ts"].as_str() {
            body["thread_ts"] = json!(thread_ts);
        }
        let request = self
            .client
            .post(format!("{}/chat.postMessage", self.base_url))
            // Slack warns when the charset is missing.
            .header(CONTENT_TYPE, "application/json; charset=utf-8")
            .body(body.to_string());
        let posted = self.ask(request).await?.json();
        Ok(json!({"channel": posted["channel"], "ts": posted["ts"]}))
    }

    /// Searches the messages of the thread for metadata with the delivery id. Slack shows metadata only to a
    /// token with the scope `metadata.message:read`; each answer lists the token's scopes.
    async fn find_message(&self, message: &Outbound<'_>) -> Result<Found, SendError> {
        let to = &message.content["to"];
        let Some(channel) = to["channel"].as_str() else { return Ok(Found::Unknown) };
        let thread = to["thread_ts"].as_str();
        let method = if thread.is_some() { "conversations.replies" } else { "conversations.history" };
        let mut cursor = String::new();
        for _ in 0..PAGES {
            let mut query = vec![("channel", channel), ("include_all_metadata", "true"), ("limit", "200")];
            query.extend(thread.map(|ts| ("ts", ts)));
            if !cursor.is_empty() {
                query.push(("cursor", &cursor));
            }
            let url = reqwest::Url::parse_with_params(&format!("{}/{method}", self.base_url), &query)
                .map_err(|error| SendError::Refused(error.to_string()))?;
            let answer = match self.ask(self.client.get(url)).await {
                Ok(answer) => answer,
                // The app may not read there, so the search can never tell.
                Err(SendError::Refused(_)) => return Ok(Found::Unknown),
                Err(error) => return Err(error),
            };
            let page = answer.json();
            let ours = |message: &&Value| {
                let metadata = &message["metadata"];
                metadata["event_type"] == EVENT_TYPE
            };
            let messages = page["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
            let found = messages
                .iter()
                .filter(ours)
                .find(|of| of["metadata"]["event_payload"]["delivery_id"] == message.delivery_id);
            if let Some(found) = found {
                return Ok(Found::Sent { receipt: json!({"channel": channel, "ts": found["ts"]}) });
            }
            if !sees_metadata(&answer) {
                return Ok(Found::Unknown);
            }
            cursor = page["response_metadata"]["next_cursor"].as_str().unwrap_or_default().to_owned();
            if cursor.is_empty() {
                let whole = page["has_more"] != true;
                return Ok(if whole { Found::NotSent } else { Found::Unknown });
            }
        }
        Ok(Found::Unknown)
    }
}

/// Returns whether Slack shows message metadata to the token that got this answer.
fn sees_metadata(answer: &Answer) -> bool {
    let scopes = answer.headers.get("x-oauth-scopes").and_then(|scopes| scopes.to_str().ok());
    scopes.is_some_and(|scopes| scopes.split(',').any(|scope| scope.trim() == "metadata.message:read"))
}

/// Maps an error code of Slack to an error with a remedy.
fn refusal(error: &str, needed: Option<&str>) -> SendError {
    let remedy = match error {
        // Slack's documentation says that part of the operation may have succeeded.
        "internal_error" | "fatal_error" | "request_timeout" => {
            return SendError::Unknown(format!("Slack answered {error}"));
        }
        "service_unavailable" | "team_added_to_org" => {
            return SendError::Later(format!("Slack answered {error}"));
        }
        "invalid_auth" | "not_authed" | "account_inactive" | "token_revoked" | "token_expired" => {
            "set messenger.slack.token to the token of a bot that is installed"
        }
        "missing_scope" | "no_permission" | "not_allowed_token_type" => {
            "give the app the scope chat:write and install it again"
        }
        "channel_not_found" | "not_in_channel" => "invite the app to the channel",
        "is_archived" => "the channel is archived: unarchive it, or write elsewhere",
        "restricted_action" | "restricted_action_thread_locked" | "restricted_action_read_only_channel" => {
            "the workspace does not let the app write there: change the channel's settings"
        }
        "thread_not_found" | "message_not_found" => "the thread is gone: start another one",
        _ => "Slack's documentation of chat.postMessage says what it means",
    };
    let needed = needed.map(|scope| format!(" (needed: {})", word(scope))).unwrap_or_default();
    SendError::Refused(format!("Slack refused the message: {}{needed}; {remedy}", word(error)))
}
