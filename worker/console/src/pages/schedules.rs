//! Schedules: when each fires next, and what became of its last firings.

use crate::api::{part, query};
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::{Firing, Schedule};
use crate::refusal::Refusal;
use crate::text::Moment;
use crate::visit::Visit;
use askama::Template;
use axum::extract::{Path, Query};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

#[derive(Template)]
#[template(path = "schedules.html")]
struct Schedules {
    frame: Frame,
    items: Vec<Schedule>,
    /// A link to those after these.
    next: String,
}

#[derive(Template)]
#[template(path = "schedule.html")]
struct SchedulePage {
    frame: Frame,
    schedule: Schedule,
    next: Vec<Tick>,
    firings: Vec<Firing>,
}

/// A firing to come.
#[derive(Deserialize)]
struct Tick {
    tick: Moment,
    local: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    cursor: String,
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let frame = Frame::of(&visit, Nav::Schedules, "Schedules").await?;
    let asked = query(&[("cursor", &asked.cursor), ("limit", "100")]);
    let found: List<Schedule> = visit.api.get(&format!("/v1/schedules{asked}")).await?;
    let next = query(&[("cursor", &found.next())]);
    Ok(page(&Schedules { frame, items: found.items, next }))
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>) -> Result<Response, Refusal> {
    let path = format!("/v1/schedules/{}", part(&id));
    let schedule: Schedule = visit.api.get(&path).await?;
    let next: List<Tick> = visit.api.get(&format!("{path}/next?count=5")).await?;
    let firings: List<Firing> = visit.api.get(&format!("{path}/firings?limit=50")).await?;
    let mut frame = Frame::of(&visit, Nav::Schedules, schedule.name.clone()).await?;
    frame.refresh_s = 10;
    Ok(page(&SchedulePage { frame, schedule, next: next.items, firings: firings.items }))
}

pub(crate) async fn steer(Path((id, verb)): Path<(String, String)>, form: Form) -> Result<Response, Refusal> {
    let said = match verb.as_str() {
        "pause" => "The schedule is paused.",
        "resume" => "The schedule goes on.",
        "trigger" => "The schedule has fired.",
        _ => return Err(Refusal::new(StatusCode::NOT_FOUND, "a schedule has no such button")),
    };
    let back = format!("{}/schedules/{}", form.visit.base(), part(&id));
    form.act(&back, async {
        let body = if verb == "trigger" { json!({"client_key": form.key()}) } else { json!({}) };
        form.visit.api.post(&format!("/v1/schedules/{}/{verb}", part(&id)), &body, None).await?;
        Ok(done(&back, said))
    })
    .await
}
