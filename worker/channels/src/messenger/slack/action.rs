//! Buttons of the cards that `[[notify]]` sends. Slack signs each press and says who pressed; the button's token says what it does, and is
//! used up in the act's own transaction.

use super::super::ignored;
use super::{NAME, signed_body};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use tracing::warn;
use wakeful_engine::channel::{Outbound, SendError};
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;
use wakeful_store::Error;
use wakeful_store::audit::act::{Act, acting};
use wakeful_store::notify::link::{Choice, Way};
use wakeful_store::queue::Kind;
use wakeful_store::space::{Scope, within};
use wakeful_workflow::notify::LinkState;
use wakeful_workflow::resolve::Resolution;

/// How often we try to post the result of a press, while Slack asks us to wait.
const TRIES: usize = 5;

/// A press of one of our buttons.
#[derive(Debug, PartialEq)]
struct Press {
    user: String,
    channel: String,
    /// The message that has the button.
    ts: String,
    token: String,
    choice: Choice,
}

/// Takes a press. Slack wants an answer within three seconds and shows none of its text, so what came of it is said in the message's
/// thread.
pub(in crate::messenger) async fn act(
    State(ctx): State<Arc<Ctx>>,
    request: Request,
) -> Result<StatusCode, Problem> {
    let config = &ctx.config.messenger.slack;
    let body = signed_body(config, request).await?;
    let Some(press) = payload(&body).as_ref().and_then(read) else {
        return ignored("Slack", "it is not a press of one of our buttons");
    };
    // A list that is not set admits everybody to talk, and no person to act.
    if config.allow.users.is_none() || !config.allow.allows(&press.user, &press.channel) {
        let why = "messenger.slack.allow_users must list who may press buttons, and allow_channels where";
        return ignored("Slack", why);
    }
    let said = match carry_out(&ctx, &press).await {
        Ok(verb) => format!("{verb} by {}", press.user),
        // The thread says already who was first.
        Err(Error::Link { state: LinkState::Used, .. }) => return Ok(StatusCode::OK),
        Err(
            error @ (Error::Link { .. }
            | Error::NotFound { .. }
            | Error::Conflict { .. }
            | Error::Refused { .. }),
        ) => {
            format!("Nothing was done by this press: {error}")
        }
        Err(error) => return Err(error.into()),
    };
    tokio::spawn(async move { tell(&ctx, &press, &said).await });
    Ok(StatusCode::OK)
}

async fn carry_out(ctx: &Ctx, press: &Press) -> wakeful_store::Result<String> {
    let link = within(Scope::All, ctx.store.link(&press.token, Way::Slack)).await?;
    let by = format!("Slack user {}", press.user);
    let act = Act {
        actor_kind: "slack",
        actor: by.clone(),
        verb: format!("link.{}", link.act.as_str()),
        target: Some(link.session_id.clone()),
        space_id: Some(link.space_id.clone()),
        address: Some(format!("slack/{}", press.channel)),
        ..Act::default()
    };
    let acts = ctx.store.act_by_link(&press.token, Way::Slack, &press.choice, &by);
    let (acted, _, _) = acting(act, within(Scope::of(&link.space_id), acts)).await;
    let acted = acted?;
    ctx.bus.notifier.any_job();
    ctx.bus.notifier.job(Kind::Deliver);
    ctx.bus.notifier.session(&acted.session_id);
    Ok(match (link.act.as_str(), &press.choice) {
        ("retry", _) => "Retried",
        ("resolve", _) => "Resolved",
        ("approve", Choice::Resolution(Resolution::Declined)) => "Declined",
        ("approve", _) => "Approved",
        _ => "Sent again",
    }
    .to_owned())
}

/// Says in the thread what came of the press. If that fails, the session's page says it all the same.
async fn tell(ctx: &Ctx, press: &Press, said: &str) {
    let Some(channel) = ctx.plugins.channels.get(NAME) else { return };
    let content = json!({"to": {"channel": press.channel, "thread_ts": press.ts}, "text": said});
    let id = wakeful_store::new_id("prs");
    for _ in 0..TRIES {
        match channel.send(&Outbound::new(&id, &content)).await {
            Ok(_) => return,
            // Slack takes one message a second in a channel, and the card may have been the last one.
            Err(SendError::Throttled { after, .. }) => tokio::time::sleep(after).await,
            Err(error) => {
                warn!(%error, "What came of a button was not said in Slack");
                return;
            }
        }
    }
    warn!("What came of a button was not said in Slack, which takes no more just now");
}

/// The JSON in the form's one field.
fn payload(body: &[u8]) -> Option<Value> {
    let query = std::str::from_utf8(body).ok()?;
    let url = reqwest::Url::parse(&format!("form:?{query}")).ok()?;
    let payload = url.query_pairs().find(|(name, _)| name == "payload")?.1.into_owned();
    serde_json::from_str(&payload).ok()
}

fn read(payload: &Value) -> Option<Press> {
    if payload["type"] != "block_actions" {
        return None;
    }
    let action = payload["actions"]
        .as_array()?
        .iter()
        .find(|action| action["action_id"].as_str().is_some_and(|id| id.starts_with("wakeful_")))?;
    let value = action["value"].as_str()?;
    let (token, choice) = match value.split_once(' ') {
        None => (value, Choice::Go),
        Some((token, "happened")) => {
            (token, Choice::Resolution(Resolution::Happened { result: String::new() }))
        }
        Some((token, "did_not_happen")) => (token, Choice::Resolution(Resolution::DidNotHappen)),
        Some((token, "approved")) => (token, Choice::Resolution(Resolution::Approved)),
        Some((token, "declined")) => (token, Choice::Resolution(Resolution::Declined)),
        Some(_) => return None,
    };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    Some(Press {
        user: text(&payload["user"]["id"])?,
        channel: text(&payload["channel"]["id"]).or_else(|| text(&payload["container"]["channel_id"]))?,
        ts: text(&payload["message"]["ts"]).or_else(|| text(&payload["container"]["message_ts"]))?,
        token: token.to_owned(),
        choice,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_press_is_read_from_its_form_and_nothing_else_is_one() {
        let said = |action: Value| {
            json!({"type": "block_actions", "user": {"id": "U1"}, "channel": {"id": "C1"}, "message": {"ts": "1.2"},
                "actions": [action]})
        };
        let press = read(&said(json!({"action_id": "wakeful_retry", "value": "wkl_1"}))).unwrap();
        assert_eq!((press.user.as_str(), press.token.as_str(), &press.choice), ("U1", "wkl_1", &Choice::Go));
        let resolved =
            read(&said(json!({"action_id": "wakeful_resolve x", "value": "wkl_1 did_not_happen"}))).unwrap();
        assert_eq!(resolved.choice, Choice::Resolution(Resolution::DidNotHappen));
        for (word, resolution) in [("approved", Resolution::Approved), ("declined", Resolution::Declined)] {
            let value = format!("wkl_1 {word}");
            let press =
                read(&said(json!({"action_id": format!("wakeful_0_approve_{word}"), "value": value})));
            assert_eq!(press.map(|press| press.choice), Some(Choice::Resolution(resolution)));
        }
        assert_eq!(read(&said(json!({"action_id": "other", "value": "wkl_1"}))), None);
        assert_eq!(read(&said(json!({"action_id": "wakeful_x", "value": "wkl_1 perhaps"}))), None);
        assert_eq!(read(&json!({"type": "view_submission"})), None);
        assert_eq!(payload(b"payload=%7B%22a%22%3A%22x+y%22%7D"), Some(json!({"a": "x y"})));
        assert_eq!(payload(b"nothing"), None);
    }
}
