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
use std::collections::BTreeMap;

/// The agent of those who name none.
const DEFAULT_AGENT: &str = "default";
/// The offline model of `wakeful dev`, and what its scenario answers: `worker/engine/scenarios/demo.toml`.
const DEMO: &str = "scripted/demo";
const EXAMPLES: [&str; 4] =
    ["What time is it?", "Write a note about the meeting", "Help me choose", "Write a report"];

#[derive(Template)]
#[template(path = "chats.html")]
struct Chats {
    frame: Frame,
    items: Vec<Session>,
    /// What the box begins with.
    text: String,
    /// Empty: the visitor may not know them.
    agents: Vec<Offered>,
    /// The agent that is chosen and its model, if that needs no provider.
    offline: Option<(String, String)>,
    /// Texts that the offline model answers, each with the link that fills the box.
    examples: Vec<(&'static str, String)>,
}

impl Chats {
    /// Whether the visitor may name an agent. A token of one agent speaks to that one.
    fn names_agent(&self) -> bool {
        self.frame.me.as_ref().is_some_and(|me| me.agent.is_none())
    }
}

/// An agent that may be chosen.
struct Offered {
    name: String,
    model: String,
    is_chosen: bool,
}

impl Offered {
    /// Empty for the default agent: then a conversation that exists keeps its own agent.
    fn value(&self) -> &str {
        if self.name == DEFAULT_AGENT { "" } else { &self.name }
    }
}

/// `GET /v1/capabilities`.
#[derive(Deserialize)]
struct Capabilities {
    agents: BTreeMap<String, Capable>,
}

#[derive(Deserialize)]
struct Capable {
    model: String,
    /// The only spaces that have it.
    spaces: Option<Vec<String>>,
}

impl Capabilities {
    /// The agents of a space, one of which is chosen if there are any.
    fn offered(self, space: &str, asked: &str) -> Vec<Offered> {
        let here =
            |one: &Capable| one.spaces.as_ref().is_none_or(|spaces| spaces.iter().any(|own| own == space));
        let mut agents: Vec<Offered> = self
            .agents
            .into_iter()
            .filter(|(_, one)| here(one))
            .map(|(name, one)| Offered { name, model: one.model, is_chosen: false })
            .collect();
        let at = |name: &str| agents.iter().position(|one| one.name == name);
        let chosen = at(asked).or_else(|| at(DEFAULT_AGENT)).unwrap_or(0);
        if let Some(one) = agents.get_mut(chosen) {
            one.is_chosen = true;
        }
        agents
    }
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
    /// A token of one agent begins no session by itself.
    fn begins_anew(&self) -> bool {
        let is_whole = self.frame.me.as_ref().is_some_and(|me| me.operates() && me.agent.is_none());
        // A session to which nothing was said is new already.
        is_whole && !self.said.is_empty()
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

/// What the page of all chats is asked for: how its form is filled in.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Filled {
    text: String,
    agent: String,
}

pub(crate) async fn list(visit: Visit, Query(filled): Query<Filled>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Chat, "Chat").await?;
    frame.refresh_s = 5;
    let visit = visit.again(&frame);
    let agents = match &frame.me {
        Some(me) if me.everywhere && me.agent.is_none() => {
            let found: Capabilities = visit.api.get("/v1/capabilities").await?;
            found.offered(&me.space_id, &filled.agent)
        }
        Some(_) | None => Vec::new(),
    };
    let chosen = agents.iter().find(|one| one.is_chosen && one.model.starts_with("scripted/"));
    let offline = chosen.map(|one| (one.name.clone(), one.model.clone()));
    let link = |text: &'static str| {
        (text, format!("{}/chat{}", frame.base, query(&[("text", text), ("agent", &filled.agent)])))
    };
    let examples = match &offline {
        Some((_, model)) if model == DEMO => EXAMPLES.map(link).to_vec(),
        Some(_) | None => Vec::new(),
    };
    let found: List<Session> = visit.api.get("/v1/sessions?trigger_type=chat&limit=50").await?;
    let mut items: Vec<Session> = Vec::new();
    for one in found.items {
        if !items.iter().any(|known| known.conversation_id == one.conversation_id) {
            items.push(one);
        }
    }
    Ok(page(&Chats { frame, items, text: filled.text, agents, offline, examples }))
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

/// Begins a new session in the conversation. Its model sees nothing of what was said before.
pub(crate) async fn anew(Path(conversation): Path<String>, form: Form) -> Result<Response, Refusal> {
    let to = format!("{}/chat/{}", form.visit.base(), part(&conversation));
    form.act(&to, async {
        let path = format!("/v1/conversations/{}/new", part(&conversation));
        form.visit.api.post(&path, &Value::Object(Map::new()), Some(&form.key())).await?;
        Ok(done(&to, "A new session has begun: its agent knows nothing of what was said before."))
    })
    .await
}

async fn send(form: &Form, conversation: &str, back: &str, to: &str) -> Result<Response, Refusal> {
    let mut body = Map::new();
    body.insert("text".to_owned(), form.filled("text").unwrap_or_default().into());
    if let Some(agent) = form.filled("agent") {
        body.insert("agent".to_owned(), agent.into());
    }
    let to = format!("{to}#say");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_of_a_space_are_offered_and_one_is_chosen() {
        let all = r#"{"agents": {"acmes": {"model": "openai/x", "spaces": ["acme"]}, "default": {"model": "scripted/demo",
            "spaces": null}, "sales": {"model": "openai/x"}}}"#;
        let offered = |space: &str, asked: &str| -> Vec<String> {
            let found: Capabilities = serde_json::from_str(all).unwrap();
            let one = |one: Offered| format!("{}{}", if one.is_chosen { "*" } else { "" }, one.name);
            found.offered(space, asked).into_iter().map(one).collect()
        };
        assert_eq!(offered("default", ""), ["*default", "sales"]);
        assert_eq!(offered("acme", "sales"), ["acmes", "default", "*sales"]);
        assert_eq!(offered("bolt", "acmes"), ["*default", "sales"], "an agent of another space is none here");
    }
}
