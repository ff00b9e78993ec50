//! Who did what, and why.

use crate::api::query;
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::Audited;
use crate::refusal::Refusal;
use crate::visit::Visit;
use askama::Template;
use axum::extract::Query;
use axum::response::Response;
use serde::Deserialize;

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPage {
    frame: Frame,
    asked: Asked,
    items: Vec<Audited>,
    next: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    actor: String,
    verb: String,
    target: String,
    outcome: String,
    cursor: String,
}

impl Asked {
    fn query(&self, cursor: &str) -> String {
        query(&[
            ("actor", self.actor.trim()),
            ("verb", self.verb.trim()),
            ("target", self.target.trim()),
            ("outcome", &self.outcome),
            ("cursor", cursor),
        ])
    }
}

pub(crate) async fn show(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let frame = Frame::of(&visit, Nav::Audit, "Audit").await?;
    let found: List<Audited> = visit.api.get(&format!("/v1/audit{}", asked.query(&asked.cursor))).await?;
    let next = found.next_link(|next| asked.query(next));
    Ok(page(&AuditPage { frame, asked, items: found.items, next }))
}
