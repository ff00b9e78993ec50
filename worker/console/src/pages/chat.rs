//! Talk with an agent: a page per conversation. The answer comes live; without JavaScript the page is loaded again.

use super::session::{Block, Said, said, survived};
use crate::api::{part, query};
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::{Event, Message, Session, Step};
use crate::refusal::Refusal;
use crate::seal::random_word;
use crate::text::visible;
use crate::visit::Visit;
use askama::Template;
use axum::extract::{Path, Query};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Template)]
#[template(path = "chats.html")]
struct Chats {
    frame: Frame,
    items: Vec<Session>,
}

#[derive(Template)]
#[template(path = "chat.html")]
struct Chat {
    frame: Frame,
    conversation: String,
    session: Option<Session>,
    said: Vec<Said>,
    older: String,
    /// Earlier sessions of the conversation.
    earlier: Vec<Session>,
    /// A worker died, and another one went on.
    survived: bool,
}

impl Chat {
    /// The agent is at work, or will be.
    fn is_busy(&self) -> bool {
        self.session.as_ref().is_some_and(|one| matches!(one.status.as_str(), "queued" | "running"))
    }

    fn listens(&self) -> bool {
        self.session.as_ref().is_none_or(Session::listens)
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    before: String,
}

pub(crate) async fn list(visit: Visit) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Chat, "Chat").await?;
    frame.refresh_s = 5;
    let found: List<Session> = visit.api.get("/v1/sessions?trigger_type=chat&limit=50").await?;
    let mut items: Vec<Session> = Vec::new();
    for one in found.items {
        if !items.iter().any(|known| known.conversation_id == one.conversation_id) {
            items.push(one);
        }
    }
    Ok(page(&Chats { frame, items }))
}

/// Begins a conversation with its first message.
pub(crate) async fn begin(form: Form) -> Result<Response, Refusal> {
    let conversation = form.filled("conversation").unwrap_or_else(|| format!("chat-{}", &random_word()[..8]));
    let back = format!("{}/chat", form.visit.base());
    let to = format!("{back}/{}", part(&conversation));
    send(&form, &conversation, &back, &to).await
}

pub(crate) async fn say(Path(conversation): Path<String>, form: Form) -> Result<Response, Refusal> {
    let to = format!("{}/chat/{}", form.visit.base(), part(&conversation));
    send(&form, &conversation, &to, &to).await
}

async fn send(form: &Form, conversation: &str, back: &str, to: &str) -> Result<Response, Refusal> {
    let mut body = Map::new();
    body.insert("text".to_owned(), form.filled("text").unwrap_or_default().into());
    if let Some(agent) = form.filled("agent") {
        body.insert("agent".to_owned(), agent.into());
    }
    let to = format!("{to}#end");
    form.act(back, async {
        let path = format!("/v1/chat/{}/messages", part(conversation));
        form.visit.api.post(&path, &Value::Object(body), Some(&form.key())).await?;
        Ok(done(to, ""))
    })
    .await
}

pub(crate) async fn show(
    visit: Visit,
    Path(conversation): Path<String>,
    Query(asked): Query<Asked>,
) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Chat, visible(&conversation)).await?;
    let of = query(&[("conversation_id", &conversation), ("limit", "20")]);
    let mut sessions = visit.api.get::<List<Session>>(&format!("/v1/sessions{of}")).await?.items;
    let earlier = if sessions.is_empty() { Vec::new() } else { sessions.split_off(1) };
    let session = sessions.pop();
    let (mut messages, mut older, mut is_survivor) = (Vec::new(), String::new(), false);
    if let Some(session) = &session {
        let path = format!("/v1/sessions/{}", part(&session.session_id));
        let newest: List<Event> = visit.api.get(&format!("{path}/events?newest=true&limit=1")).await?;
        if asked.before.is_empty() {
            let after = newest.items.last().map_or(0, |event| event.seq);
            let id = part(&session.session_id);
            frame.live = format!("{}/sessions/{id}/stream?after={after}", frame.base);
        }
        let pages = query(&[("cursor", &asked.before), ("limit", "50"), ("internal", "false")]);
        let found: List<Message> = visit.api.get(&format!("{path}/messages{pages}")).await?;
        let next = found.next();
        if !next.is_empty() {
            older = query(&[("before", &next)]);
        }
        messages = found.items;
        let steps: List<Step> = visit.api.get(&format!("{path}/steps")).await?;
        is_survivor = survived(&visit, &path, &steps.items).await?;
    }
    let said = said(messages);
    Ok(page(&Chat { frame, conversation, session, said, older, earlier, survived: is_survivor }))
}
