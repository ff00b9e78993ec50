//! Notices from other systems. Each notice wakes a session without a message from a user.
//!
//! A user who then writes in a notice's conversation gets a separate session there. That session has seen the
//! notice and the agent's reaction to it: [`wakeful_workflow::trigger::separate_session_type`].

use crate::cron::definition::{addresses, mailing, shown};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use sha2::Digest;
use std::fmt::Write as _;
use std::sync::Arc;
use wakeful_config::DEFAULT_AGENT;
use wakeful_config::address::is_address;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::{ingest, new_session};
use wakeful_http::access::Caller;
use wakeful_http::body::{Body, accepted, check_text, key_of, parse};
use wakeful_http::openapi::{Operation, of};
use wakeful_http::problem::Problem;
use wakeful_store::new_id;
use wakeful_store::wake::{Continues, NewMessage, NewSession, Woken};
use wakeful_workflow::access::Speaker;
use wakeful_workflow::trigger::HERALD;

/// `/v1/triggers/herald`.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new().route("/triggers/herald", post(accept))
}

/// The body of `POST /v1/triggers/herald`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Notice")]
struct Heralded {
    notice: Value,
    /// Without an id the notice gets a conversation of its own.
    conversation_id: Option<String>,
    /// The person that the notice is for, in the sender's own words.
    user_id: Option<String>,
    agent: Option<String>,
    client_key: Option<String>,
    #[serde(default, deserialize_with = "addresses")]
    mail_to: Option<Vec<String>>,
}

#[derive(Debug)]
enum Notice {
    Text(String),
    Parts(Parts),
}

#[derive(Debug)]
struct Parts {
    title: String,
    body: String,
    source: Option<String>,
    url: Option<String>,
}

impl Notice {
    /// Reads `notice`.
    ///
    /// # Errors
    /// 400 that names the field, shows its value and says what it must be.
    fn read(value: Value) -> Result<Notice, Problem> {
        let mut fields = match value {
            Value::String(text) => return Ok(Notice::Text(text)),
            Value::Object(fields) => fields,
            other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_)) => {
                return Err(Problem::bad_request(format!(
                    "`notice` is {}: it must be a text, or an object of `title`, `body` and, if you like, `source` and `url`",
                    shown(&other)
                )));
            }
        };
        let mut text = |name: &str| match fields.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => {
                Err(Problem::bad_request(format!("`notice.{name}` is {}: it must be a text", shown(&other))))
            }
        };
        let missing =
            |name: &str| Problem::bad_request(format!("`notice.{name}` is missing: it must be a text"));
        let parts = Parts {
            title: text("title")?.ok_or_else(|| missing("title"))?,
            body: text("body")?.ok_or_else(|| missing("body"))?,
            source: text("source")?,
            url: text("url")?,
        };
        match fields.keys().next() {
            None => Ok(Notice::Parts(parts)),
            Some(unknown) => Err(Problem::bad_request(format!(
                "`notice` has {unknown:?}: it takes `title`, `body`, `source` and `url`"
            ))),
        }
    }
}

/// Accepts a notice: 202, or 200 with the first answer when its `client_key` was used before.
async fn accept(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Woken>), Problem> {
    let heralded: Heralded = parse(&body?)?;
    let given = key_of("client_key", heralded.client_key.clone(), &headers)?;
    check_text("user_id", heralded.user_id.as_deref(), 256)?;
    let mail_to = heralded.mail_to.unwrap_or_default();
    if let Some(wrong) = mail_to.iter().find(|address| !is_address(address)) {
        return Err(Problem::bad_request(format!("`mail_to` has {wrong:?}: it must be a mail address")));
    }
    let notice = Notice::read(heralded.notice)?;
    let (text, subject) = rendered(&notice, heralded.user_id.as_deref())?;
    let client_key = given.unwrap_or_else(|| new_id("key"));
    // A repeated key must find the conversation that the first request made.
    let own = || {
        let digest = hex::encode(sha2::Sha256::digest(client_key.as_bytes()));
        format!("herald-{}", &digest[..20])
    };
    let conversation = heralded.conversation_id.clone().unwrap_or_else(own);
    let conversation_id = caller.conversation(&conversation)?;
    // A token of one agent enters no conversation of another.
    if caller.reach.agent.is_some() {
        let _permit = ctx.intake.enter().await?;
        let latest = ctx.store.latest_trigger(&conversation_id).await?;
        if latest.is_some() || heralded.conversation_id.is_some() {
            caller.enters(&conversation_id, latest.as_ref().map(|(_, agent)| agent.as_str()))?;
        }
    }
    let agent = caller.agent(heralded.agent.as_deref())?.or(ctx.config.herald.agent.as_deref());
    let agent = agent.unwrap_or(DEFAULT_AGENT);
    let mail_to: Vec<String> = mail_to.iter().map(|address| address.to_ascii_lowercase()).collect();
    let new = NewSession {
        trigger_type: HERALD.to_owned(),
        // The length prefix makes the id unambiguous: no other conversation and key give the same text.
        trigger_id: format!("{}:{conversation}:{client_key}", conversation.len()),
        continues: Continues::Trigger,
        policy: mailing(&ctx.config, &mail_to, &subject),
        speaker: heralded.user_id.map(|user_id| Speaker::NoticeFor { user_id }),
        only_agent: caller.reach.agent.is_some(),
        ..new_session::of_chat(&ctx.config, &ctx.plugins.tools, conversation_id, Some(agent))?
    };
    let message = NewMessage {
        client_key: Some(client_key),
        text,
        sender: Some(HERALD.to_owned()),
        trace_context: None,
        attachments: Vec::new(),
    };
    Ok(accepted(ingest::accept(&ctx, new, message).await?))
}

/// The notice as the agent reads it, and a subject for mails about it. The text starts by saying that no user
/// wrote it, because the rest comes from another system.
fn rendered(notice: &Notice, user_id: Option<&str>) -> Result<(String, String), Problem> {
    let mut text = String::from("A notice from another system. These are not the user's words.\n");
    if let Some(user_id) = user_id {
        let _ = writeln!(text, "For: {user_id}");
    }
    let (body, subject) = match notice {
        Notice::Text(body) => {
            let line = body.trim().lines().next().unwrap_or_default();
            (body, line.chars().take(100).collect())
        }
        Notice::Parts(parts) => {
            check_text("notice.title", Some(&parts.title), 500)?;
            check_text("notice.source", parts.source.as_deref(), 256)?;
            check_text("notice.url", parts.url.as_deref(), 2000)?;
            if let Some(source) = &parts.source {
                let _ = writeln!(text, "From: {source}");
            }
            let _ = writeln!(text, "Title: {}", parts.title);
            if let Some(url) = &parts.url {
                let _ = writeln!(text, "Link: {url}");
            }
            (&parts.body, parts.title.clone())
        }
    };
    if body.trim().is_empty() || body.contains('\0') {
        return Err(Problem::bad_request("`notice` has no text, or a NUL character in it"));
    }
    let _ = write!(text, "\n{}", body.trim_end());
    Ok((text, subject))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post("/v1/triggers/herald", "A notice of another system wakes a session")
            .body::<Heralded>()
            .answers(StatusCode::ACCEPTED, "accepted", of::<Woken>())
            .answers(StatusCode::OK, "the first answer to this key", of::<Woken>())
            .refuses(&[StatusCode::NOT_FOUND]),
    ]
}
