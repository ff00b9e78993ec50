//! The list of sessions, with its filters in the address.

use crate::api::query;
use crate::frame::{Frame, Nav, page};
use crate::model::{List, Session};
use crate::refusal::Refusal;
use crate::text::{Badge, badge};
use crate::visit::Visit;
use askama::Template;
use axum::extract::Query;
use axum::response::Response;
use serde::Deserialize;

const STATUSES: [&str; 9] = [
    "queued",
    "running",
    "waiting_input",
    "needs_attention",
    "failed",
    "completed",
    "created",
    "archived",
    "terminated",
];
const TRIGGERS: [&str; 7] = ["chat", "email", "message", "cron", "herald", "replay", "import"];

#[derive(Template)]
#[template(path = "sessions.html")]
struct Sessions {
    frame: Frame,
    asked: Asked,
    chips: Vec<Chip>,
    items: Vec<Session>,
    next: String,
}

struct Chip {
    badge: Option<Badge>,
    link: String,
    is_on: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    status: String,
    conversation: String,
    trigger: String,
    cursor: String,
}

impl Asked {
    fn link(&self, status: &str, cursor: &str) -> String {
        query(&[
            ("status", status),
            ("conversation", &self.conversation),
            ("trigger", &self.trigger),
            ("cursor", cursor),
        ])
    }

    fn triggers(&self) -> [&'static str; 7] {
        TRIGGERS
    }

    fn is_narrowed(&self) -> bool {
        !(self.status.is_empty() && self.conversation.is_empty() && self.trigger.is_empty())
    }
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Sessions, "Sessions").await?;
    if asked.cursor.is_empty() {
        frame.refresh_s = 5;
    }
    let query = query(&[
        ("status", &asked.status),
        ("conversation_id", asked.conversation.trim()),
        ("trigger_type", &asked.trigger),
        ("cursor", &asked.cursor),
        ("limit", "50"),
    ]);
    let found: List<Session> = visit.api.get(&format!("/v1/sessions{query}")).await?;
    let all = Chip { badge: None, link: asked.link("", ""), is_on: asked.status.is_empty() };
    let chips = STATUSES.iter().map(|status| Chip {
        badge: Some(badge(status)),
        link: asked.link(status, ""),
        is_on: asked.status == *status,
    });
    let chips = std::iter::once(all).chain(chips).collect();
    let next = found.next();
    let next = if next.is_empty() { next } else { asked.link(&asked.status, &next) };
    Ok(page(&Sessions { frame, chips, items: found.items, next, asked }))
}
