//! Outgoing messages, and the mail that came in.

use crate::api::{part, query};
use crate::draw::Tries;
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::{Chip, List, chips};
use crate::model::{Delivery, Mail};
use crate::refusal::Refusal;
use crate::text::{Badge, badge, short};
use crate::visit::Visit;
use askama::Template;
use axum::extract::{Path, Query};
use axum::response::Response;
use chrono::Utc;
use serde::Deserialize;
use serde_json::{Value, json};

const STATUSES: [&str; 6] = ["waiting", "uncertain", "failed", "expired", "sending", "sent"];

#[derive(Template)]
#[template(path = "deliveries.html")]
struct Deliveries {
    frame: Frame,
    asked: Asked,
    chips: Vec<Chip>,
    items: Vec<Delivery>,
    next: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    status: String,
    channel: String,
    cursor: String,
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Deliveries, "Deliveries").await?;
    if asked.cursor.is_empty() {
        frame.refresh_s = 5;
    }
    let visit = visit.again(&frame);
    let link = |status: &str, cursor: &str| {
        query(&[("status", status), ("channel", asked.channel.trim()), ("cursor", cursor)])
    };
    let found: List<Delivery> =
        visit.api.get(&format!("/v1/deliveries{}", link(&asked.status, &asked.cursor))).await?;
    let chips = chips(&STATUSES, &asked.status, |status| link(status, ""));
    let next = found.next_link(|next| link(&asked.status, next));
    Ok(page(&Deliveries { frame, chips, items: found.items, next, asked }))
}

#[derive(Template)]
#[template(path = "delivery.html")]
struct DeliveryPage {
    frame: Frame,
    one: Delivery,
    tries: Option<Tries>,
    /// The parts of the message, as text.
    parts: Vec<(String, String)>,
    receipt: String,
    undelivered: String,
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Deliveries, short(&id)).await?;
    frame.refresh_s = 5;
    let one: Delivery = visit.api.get(&format!("/v1/deliveries/{}", part(&id))).await?;
    let parts = match &one.content {
        Some(Value::Object(fields)) => {
            fields.iter().map(|(name, value)| (name.clone(), said(value))).collect()
        }
        Some(other) => vec![("content".to_owned(), said(other))],
        None => Vec::new(),
    };
    let receipt = one.receipt.as_ref().map(|receipt| format!("{receipt:#}")).unwrap_or_default();
    let is_empty = one.undelivered.as_array().is_none_or(Vec::is_empty);
    let undelivered = if is_empty { String::new() } else { format!("{:#}", one.undelivered) };
    let tries = Tries::of(&one.tries, &one.status, Utc::now());
    Ok(page(&DeliveryPage { frame, tries, parts, receipt, undelivered, one }))
}

/// A value of a message as a person reads it.
fn said(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(list) if list.iter().all(Value::is_string) => {
            list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
        }
        Value::Null => String::new(),
        other => format!("{other:#}"),
    }
}

pub(crate) async fn resend(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = match form.get("back") {
        "" => format!("{}/deliveries/{}", form.visit.base(), part(&id)),
        _ => form.back(),
    };
    let body = form.filled("reason").map_or_else(|| json!({}), |reason| json!({"reason": reason}));
    form.act(&back, async {
        form.visit.api.post(&format!("/v1/deliveries/{}/resend", part(&id)), &body, None).await?;
        Ok(done(&back, "The message is sent again, under its id."))
    })
    .await
}

#[derive(Template)]
#[template(path = "mails.html")]
struct Mails {
    frame: Frame,
    only_dropped: bool,
    items: Vec<Mail>,
    /// Query of the next page, or empty.
    next: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct AskedMails {
    dropped: String,
    cursor: String,
}

impl Mail {
    fn badge(&self) -> Badge {
        badge(if self.dropped.is_some() {
            "dropped"
        } else if self.joined {
            "joined"
        } else {
            "created"
        })
    }
}

pub(crate) async fn mails(visit: Visit, Query(asked): Query<AskedMails>) -> Result<Response, Refusal> {
    let frame = Frame::of(&visit, Nav::Mails, "Mails").await?;
    let only_dropped = asked.dropped == "true";
    let dropped = if only_dropped { "true" } else { "" };
    let path =
        format!("/v1/mails{}", query(&[("limit", "100"), ("dropped", dropped), ("cursor", &asked.cursor)]));
    let found: List<Mail> = visit.api.get(&path).await?;
    let next = found.next_link(|cursor| query(&[("dropped", dropped), ("cursor", cursor)]));
    Ok(page(&Mails { frame, only_dropped, items: found.items, next }))
}
