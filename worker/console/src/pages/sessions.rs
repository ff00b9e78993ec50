//! The list of sessions, with its filters in the address.

use crate::frame::{Frame, Nav, page};
use crate::list::{Chip, List, chips};
use crate::model::Session;
use crate::refusal::Refusal;
use crate::search::Search;
use crate::visit::Visit;
use askama::Template;
use axum::extract::Query;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

const STATUSES: [&str; 10] = [
    "queued",
    "running",
    "waiting_input",
    "needs_attention",
    "failed",
    "completed",
    "cancelled",
    "created",
    "archived",
    "terminated",
];
pub(super) const TRIGGERS: [&str; 7] = ["chat", "email", "message", "cron", "herald", "replay", "import"];

#[derive(Template)]
#[template(path = "sessions.html")]
struct Sessions {
    frame: Frame,
    search: Search,
    triggers: [&'static str; 7],
    chips: Vec<Chip>,
    items: Vec<Session>,
    next: String,
    /// What the API says of a field that it cannot read.
    wrong: String,
    /// A batch of the sessions that are listed.
    batch: String,
}

impl Sessions {
    /// Words that stand where an id is asked for, and the link that looks for them in what was said.
    fn in_what_was_said(&self) -> Option<(String, String)> {
        let other = self.search.in_what_was_said()?;
        Some((other.text.trim().to_owned(), other.link(&[])))
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    #[serde(flatten)]
    search: Search,
    cursor: String,
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let Asked { search, cursor } = asked;
    let mut frame = Frame::of(&visit, Nav::Sessions, "Sessions").await?;
    if cursor.is_empty() {
        frame.refresh_s = 5;
    }
    let visit = visit.again(&frame);
    let query = search.asked(&[("cursor", &cursor), ("limit", "50")]);
    let found = visit.api.get::<List<Session>>(&format!("/v1/sessions{query}")).await;
    let (items, next, wrong) = match found {
        Ok(found) => {
            let next = found.next();
            (found.items, next, String::new())
        }
        // A field that cannot be read is mended on the page on which it stands.
        Err(refusal) if refusal.status == StatusCode::BAD_REQUEST => {
            (Vec::new(), String::new(), refusal.detail)
        }
        Err(refusal) => return Err(refusal),
    };
    let chips = chips(&STATUSES, &search.status, |status| search.with_status(status).link(&[]));
    let next = if next.is_empty() { next } else { search.link(&[("cursor", &next)]) };
    let makes_batches = frame.operates() && frame.me.as_ref().is_some_and(|me| me.agent.is_none());
    let batch = if makes_batches && !search.is_empty() && !items.is_empty() {
        search.link(&[("verb", verb_for(&search.status))])
    } else {
        String::new()
    };
    let status = if wrong.is_empty() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    let shown = Sessions { frame, search, triggers: TRIGGERS, chips, items, next, wrong, batch };
    Ok((status, page(&shown)).into_response())
}

/// What a batch of sessions of this status most likely does.
fn verb_for(status: &str) -> &'static str {
    match status {
        "queued" | "running" | "waiting_input" => "cancel",
        "completed" | "created" | "cancelled" => "archive",
        _ => "retry",
    }
}
