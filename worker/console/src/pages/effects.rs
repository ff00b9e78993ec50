//! Effects whose end is unknown, of all sessions: tool calls and messages. A person ticks some of them, or all, and says once how they
//! ended; that makes a batch.

use crate::api::{part, query};
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::refusal::Refusal;
use crate::text::{Badge, Moment, badge, cut, short};
use crate::visit::Visit;
use askama::Template;
use axum::extract::Query;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// How many effects a page shows.
const PAGE: &str = "100";

/// An effect, as `GET /v1/effects` has it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Effect {
    session_id: String,
    effect_id: String,
    kind: String,
    conversation_id: String,
    agent: String,
    session_status: String,
    name: String,
    arguments: Option<Value>,
    last_error: Option<String>,
    began_at: Option<Moment>,
    may_happen_until: Option<Moment>,
    told: bool,
    in_hand: bool,
}

impl Effect {
    fn badge(&self) -> Badge {
        badge(&self.session_status)
    }

    /// As a ticked box names it.
    fn value(&self) -> String {
        format!("{}/{}", self.session_id, self.effect_id)
    }

    fn is_call(&self) -> bool {
        self.kind == "call"
    }

    fn short(&self) -> String {
        short(&self.effect_id)
    }

    /// What was asked for, or what the last attempt met.
    fn line(&self) -> String {
        let arguments = self.arguments.as_ref().map(ToString::to_string);
        cut(&arguments.or_else(|| self.last_error.clone()).unwrap_or_default(), 200)
    }
}

/// What the page looks for. An empty field asks for nothing.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    kind: String,
    tool: String,
    channel: String,
    agent: String,
    cursor: String,
    /// `all`: every box is ticked.
    ticked: String,
}

impl Asked {
    fn fields(&self) -> [(&'static str, &str); 4] {
        [
            ("kind", self.kind.trim()),
            ("tool", self.tool.trim()),
            ("channel", self.channel.trim()),
            ("agent", self.agent.trim()),
        ]
    }

    /// What was filled in.
    fn filled(&self) -> Vec<(&'static str, &str)> {
        self.fields().into_iter().filter(|(_, value)| !value.is_empty()).collect()
    }

    fn link(&self, more: &[(&str, &str)]) -> String {
        let link = query(&[self.fields().as_slice(), more].concat());
        if link.is_empty() { "?kind=".to_owned() } else { link }
    }

    fn all_are_ticked(&self) -> bool {
        self.ticked == "all"
    }

    fn kinds(&self) -> Vec<(&'static str, String, bool)> {
        [("all", ""), ("calls", "call"), ("messages", "delivery")]
            .map(|(name, kind)| {
                let one = Asked { kind: kind.to_owned(), cursor: String::new(), ..self.clone() };
                (name, one.link(&[]), self.kind == kind)
            })
            .to_vec()
    }
}

#[derive(Template)]
#[template(path = "effects.html")]
struct Effects {
    frame: Frame,
    asked: Asked,
    kinds: Vec<(&'static str, String, bool)>,
    items: Vec<Effect>,
    next: String,
    /// What the API says of a field that it cannot read.
    wrong: String,
    /// Whether the visitor may resolve them.
    acts: bool,
}

impl Effects {
    /// The same page, with every box ticked.
    fn tick_all(&self) -> String {
        self.asked.link(&[("cursor", self.asked.cursor.as_str()), ("ticked", "all")])
    }

    fn tick_none(&self) -> String {
        self.asked.link(&[("cursor", self.asked.cursor.as_str())])
    }
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let frame = Frame::of(&visit, Nav::Effects, "Uncertain effects").await?;
    let query =
        query(&[asked.fields().as_slice(), &[("cursor", asked.cursor.as_str()), ("limit", PAGE)]].concat());
    let found = visit.api.get::<List<Effect>>(&format!("/v1/effects{query}")).await;
    let (items, next, wrong) = match found {
        Ok(found) => {
            let next = found.next_link(|next| asked.link(&[("cursor", next)]));
            (found.items, next, String::new())
        }
        Err(refusal) if refusal.status == StatusCode::BAD_REQUEST => {
            (Vec::new(), String::new(), refusal.detail)
        }
        Err(refusal) => return Err(refusal),
    };
    let acts = frame.operates() && frame.me.as_ref().is_some_and(|me| me.agent.is_none());
    let status = if wrong.is_empty() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    Ok((status, page(&Effects { frame, kinds: asked.kinds(), asked, items, next, wrong, acts }))
        .into_response())
}

/// Makes the batch that says of each chosen effect how it ended.
pub(crate) async fn resolve(form: Form) -> Result<Response, Refusal> {
    let field = |name| form.get(name).to_owned();
    let (kind, tool, channel, agent) = (field("kind"), field("tool"), field("channel"), field("agent"));
    let asked = Asked { kind, tool, channel, agent, ..Asked::default() };
    let back = format!("{}/effects{}", form.visit.base(), asked.link(&[]));
    let mut body = Map::new();
    body.insert("verb".to_owned(), json!("resolve"));
    for name in ["outcome", "result", "reason"] {
        if let Some(value) = form.filled(name) {
            let value = if name == "reason" { super::act::one_line(&value) } else { value };
            body.insert(name.to_owned(), value.into());
        }
    }
    if form.get("outcome") != "happened" {
        body.remove("result");
    }
    if form.get("tell") == "true" {
        body.insert("tell".to_owned(), json!(true));
    }
    if form.get("which") == "all" {
        let filter: Map<String, Value> =
            asked.filled().into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
        body.insert("filter".to_owned(), filter.into());
    } else {
        let ticked = form.all("effect").into_iter().filter_map(|value| value.split_once('/'));
        let ticked: Vec<Value> =
            ticked.map(|(session, effect)| json!({"session_id": session, "effect_id": effect})).collect();
        body.insert("effects".to_owned(), ticked.into());
    }
    form.act(&back, async {
        let made = form.visit.api.post("/v1/batches", &Value::Object(body), Some(&form.key())).await?;
        let id = made["batch_id"].as_str().unwrap_or_default();
        let to = format!("{}/batches/{}", form.visit.base(), part(id));
        Ok(done(to, "The batch is made. It says of each effect what became of it."))
    })
    .await
}
