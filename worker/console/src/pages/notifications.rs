//! What people were told by the rules of `[[notify]]`.

use crate::api::{part, query};
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::{Chip, List, chips};
use crate::refusal::Refusal;
use crate::text::{Badge, Moment, badge, cut, short};
use crate::visit::Visit;
use askama::Template;
use axum::extract::{Path, Query};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

const STATUSES: [&str; 5] = ["waiting", "uncertain", "failed", "sending", "sent"];

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Notification {
    pub notification_id: String,
    pub rule: String,
    pub kind: String,
    pub phase: String,
    pub label: String,
    pub count: i64,
    pub total: i64,
    pub status: String,
    pub attempt: i64,
    pub last_error: Option<String>,
    pub receipt: Option<Value>,
    pub created_at: Moment,
    pub next_attempt_at: Option<Moment>,
    pub settled_at: Option<Moment>,
    #[serde(default)]
    pub items: Vec<Told>,
}

/// One of the transitions that it told, as it is now.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Told {
    pub at: Moment,
    pub subject: String,
    pub session_id: Option<String>,
    pub agent: Option<String>,
    pub status: Option<String>,
    pub error: Option<String>,
    pub question: Option<String>,
}

impl Notification {
    pub fn badge(&self) -> Badge {
        badge(&self.status)
    }

    pub fn may_resend(&self) -> bool {
        matches!(self.status.as_str(), "failed" | "uncertain")
    }

    /// What happened, in words.
    pub fn title(&self) -> String {
        let kind = self.kind.replace('_', " ");
        match self.phase.as_str() {
            "over" => format!("{kind}: over, {} in all", self.total),
            "more" => format!("{kind}: {} more", self.count),
            _ => format!("{kind}: {}", self.count),
        }
    }

    pub fn line(&self) -> String {
        let error = self.last_error.as_deref().map(|error| format!(" · {error}")).unwrap_or_default();
        cut(&format!("{}{error}", self.label), 200)
    }
}

impl Told {
    pub fn badge(&self) -> Option<Badge> {
        self.status.as_deref().map(badge)
    }

    pub fn about(&self) -> String {
        cut(self.question.as_deref().or(self.error.as_deref()).unwrap_or_default(), 200)
    }
}

#[derive(Template)]
#[template(path = "notifications.html")]
struct Notifications {
    frame: Frame,
    chips: Vec<Chip>,
    items: Vec<Notification>,
    next: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    status: String,
    cursor: String,
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Notifications, "Notifications").await?;
    if asked.cursor.is_empty() {
        frame.refresh_s = 5;
    }
    let visit = visit.again(&frame);
    let link = |status: &str, cursor: &str| query(&[("status", status), ("cursor", cursor)]);
    let found: List<Notification> =
        visit.api.get(&format!("/v1/notifications{}", link(&asked.status, &asked.cursor))).await?;
    let chips = chips(&STATUSES, &asked.status, |status| link(status, ""));
    let next = found.next_link(|next| link(&asked.status, next));
    Ok(page(&Notifications { frame, chips, items: found.items, next }))
}

#[derive(Template)]
#[template(path = "notification.html")]
struct NotificationPage {
    frame: Frame,
    one: Notification,
    receipt: String,
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Notifications, short(&id)).await?;
    frame.refresh_s = 5;
    let one: Notification = visit.api.get(&format!("/v1/notifications/{}", part(&id))).await?;
    let receipt = one.receipt.as_ref().map(|receipt| format!("{receipt:#}")).unwrap_or_default();
    Ok(page(&NotificationPage { frame, receipt, one }))
}

pub(crate) async fn resend(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/notifications/{}", form.visit.base(), part(&id));
    form.act(&back, async {
        let path = format!("/v1/notifications/{}/resend", part(&id));
        form.visit.api.post(&path, &json!({}), None).await?;
        Ok(done(&back, "The notification is sent again, under its id."))
    })
    .await
}
