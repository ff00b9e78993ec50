//! A webhook for any other messenger. Both directions are signed as Standard Webhooks specifies.

mod send;

pub(super) use send::Webhook;

use super::{Incoming, accept, not_signed, whole_body};
use crate::signed;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::Refused;
use wakeful_http::problem::Problem;
use wakeful_store::Error;
use wakeful_store::wake::Woken;
use wakeful_workflow::policy::ReplyRoute;

/// The word in `deliveries.channel`.
const NAME: &str = "webhook";

/// The body of a message.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    conversation_id: String,
    text: String,
    sender: Option<String>,
    /// Only a conversation's first message uses this field.
    agent: Option<String>,
}

/// Accepts a message: 202, or 200 with the first answer when its `webhook-id` was used before.
pub(super) async fn receive(
    State(ctx): State<Arc<Ctx>>,
    request: Request,
) -> Result<(StatusCode, Json<Woken>), Problem> {
    let config = &ctx.config.messenger.webhook;
    let (now, headers) = (chrono::Utc::now().timestamp(), request.headers().clone());
    signed::is_fresh(&headers, now).map_err(|error| not_signed("a webhook", error))?;
    let body = whole_body(request).await?;
    let verified = signed::standard_webhooks(&config.secrets, &headers, &body, now);
    let id = verified.and_then(|()| signed::webhook_id(&headers));
    let id = id.map_err(|error| not_signed("a webhook", error))?;
    let message = read(&body)?;
    let reply = config.reply_url.is_some().then(|| ReplyRoute {
        channel: NAME.to_owned(),
        to: json!({"conversation_id": message.conversation_id}),
        split_at: None,
    });
    let incoming = Incoming {
        space_id: config.space().to_owned(),
        // The prefix keeps webhooks out of chats and out of other messengers' conversations.
        conversation_id: format!("webhook/{}", message.conversation_id),
        key: format!("webhook/{id}"),
        text: message.text,
        sender: message.sender,
        agent: message.agent.or_else(|| config.agent.clone()),
        reply,
    };
    let woken = accept(&ctx, incoming).await.map_err(|refused| match refused {
        // The sender knows its header, and not the key that we make of it.
        Refused::Store(Error::KeyReused { .. }) => Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            format!("webhook-id {id:?} was used before with another message"),
        ),
        refused => refused.into(),
    })?;
    let status = if woken.duplicate { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(woken)))
}

fn read(body: &[u8]) -> Result<Message, Problem> {
    // serde would also accept an array, and read the fields in order.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Err(Problem::bad_request("the body is not the JSON that is expected: an object"));
    }
    let message: Message = serde_json::from_slice(body).map_err(|error| {
        let error = error.to_string();
        // Only the configuration says where replies go; otherwise a sender could make us post to any address.
        if error.starts_with("unknown field `reply_url`") {
            return Problem::bad_request(
                "`reply_url` is not taken from a message: set messenger.webhook.reply_url",
            );
        }
        Problem::bad_request(format!("the body is not the JSON that is expected: {error}"))
    })?;
    let has_control = |text: &str| text.chars().any(char::is_control);
    for (name, text) in
        [("conversation_id", Some(&message.conversation_id)), ("sender", message.sender.as_ref())]
    {
        if text.is_some_and(|text| text.is_empty() || text.len() > 200 || has_control(text)) {
            let detail = format!("`{name}` has 1 to 200 bytes and no control characters");
            return Err(Problem::bad_request(detail));
        }
    }
    if message.text.trim().is_empty() || message.text.contains('\0') {
        return Err(Problem::bad_request("`text` is empty, or has a NUL character in it"));
    }
    Ok(message)
}
