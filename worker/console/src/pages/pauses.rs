//! Pauses, which the page of the queue shows: one begins, one ends.

use crate::form::{Form, done};
use crate::press::Outcome;
use crate::refusal::Refusal;
use crate::text::{Badge, Moment, badge, count};
use crate::visit::Visit;
use axum::http::StatusCode;
use axum::response::{Redirect, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// What may be paused.
pub(super) const KINDS: [(&str, &str); 9] = [
    ("agent", "an agent"),
    ("provider", "a provider of models"),
    ("tool", "a tool"),
    ("conversation", "a conversation"),
    ("trigger", "a trigger"),
    ("schedule", "a schedule"),
    ("channel", "a channel: what leaves by it"),
    ("space", "a space"),
    ("queue", "the whole queue"),
];

/// One pause, as `GET /v1/pauses` has it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Pause {
    pub kind: String,
    pub name: String,
    pub reason: String,
    pub by: Option<String>,
    pub since: Moment,
    pub until: Option<Moment>,
    pub resuming_since: Option<Moment>,
    rate: Option<f64>,
    waiting: i64,
}

impl Pause {
    pub fn badge(&self) -> Badge {
        badge(if self.ends() { "resuming" } else { "paused" })
    }

    /// What is paused, in words.
    pub fn what(&self) -> String {
        if self.kind == "queue" { "The queue".to_owned() } else { format!("{} {}", self.kind, self.name) }
    }

    /// Its sessions go on, as fast as its rate lets them.
    pub fn ends(&self) -> bool {
        self.resuming_since.is_some()
    }

    pub fn waiting(&self) -> String {
        count(self.waiting)
    }

    pub fn rate(&self) -> Option<String> {
        self.rate.map(|rate| rate.to_string())
    }
}

/// What is paused, from the form's fields.
fn subject(form: &Form) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("kind".to_owned(), form.get("kind").into());
    if form.get("kind") != "queue"
        && let Some(name) = form.filled("name")
    {
        body.insert("name".to_owned(), name.into());
    }
    if let Some(rate) = form.filled("rate") {
        body.insert("rate".to_owned(), rate.parse::<f64>().map_or_else(|_| json!(rate), |rate| json!(rate)));
    }
    body
}

/// The pauses are on the page of the queue.
pub(crate) async fn show(visit: Visit) -> Redirect {
    Redirect::to(&format!("{}/queue", visit.base()))
}

pub(crate) async fn begin(form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/queue", form.visit.base());
    let mut body = subject(&form);
    let reason = form.filled("reason").map(|reason| super::act::one_line(&reason)).unwrap_or_default();
    body.insert("reason".to_owned(), reason.into());
    if let Some(minutes) = form.filled("minutes") {
        // A half of a minute is a time too. What is no number stays a text, and the API says so.
        let seconds = minutes.parse::<f64>().map(|minutes| (minutes * 60.0).round() as u64);
        body.insert("for_s".to_owned(), seconds.map_or_else(|_| json!(minutes), |seconds| json!(seconds)));
    }
    form.act(&back, async {
        let made = form.visit.api.post("/v1/pauses", &Value::Object(body), None).await?;
        let said = "It is paused. Messages are still accepted, and what runs ends first.";
        Ok(match made["warning"].as_str() {
            // The name may be misspelt.
            Some(warning) => Outcome { went_well: false, ..done(&back, format!("{said} But {warning}.")) },
            None => done(&back, said),
        })
    })
    .await
}

pub(crate) async fn end(form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/queue", form.visit.base());
    let body = Value::Object(subject(&form));
    form.act(&back, async {
        let ended = form.visit.api.post("/v1/pauses/end", &body, None).await;
        ended.map_err(|refusal| match refusal.status {
            // Another person was quicker, or its time was over.
            StatusCode::NOT_FOUND => Refusal::new(StatusCode::CONFLICT, "it is not paused any more"),
            _ => refusal,
        })?;
        Ok(done(&back, "The pause ends, and what waits goes on."))
    })
    .await
}
