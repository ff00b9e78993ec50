//! Failed runs in groups: which there are, what one is about, and what a person does about it.

use crate::api::{part, query};
use crate::draw::Spark;
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::Session;
use crate::refusal::Refusal;
use crate::text::{Moment, count};
use crate::visit::Visit;
use askama::Template;
use axum::extract::{Path, Query};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use chrono::{Duration, DurationRound as _, SecondsFormat, Utc};
use serde::Deserialize;
use serde_json::json;

/// A group of failed runs, as `GET /v1/errors` has it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Group {
    pub fingerprint: String,
    pub kind: String,
    pub source: String,
    pub text: String,
    pub example: String,
    count: i64,
    /// Failures of each hour, the oldest first.
    #[serde(default)]
    hours: Vec<i64>,
    pub first_at: Moment,
    pub last_at: Moment,
    pub first_version: String,
    pub last_version: String,
    #[serde(default)]
    pub muted: bool,
    pub muted_until: Option<Moment>,
    pub muted_by: Option<String>,
    pub mute_reason: Option<String>,
    pub note: Option<String>,
    pub noted_by: Option<String>,
    pub noted_at: Option<Moment>,
    /// How many of its sessions are still failed. Only the page of one group asks for it.
    #[serde(default)]
    failed_now: i64,
}

impl Group {
    pub fn count(&self) -> String {
        count(self.count)
    }

    /// When it failed: over a day in a list, over a week on its own page.
    pub fn spark(&self) -> Spark {
        let hours: Vec<f64> = self.hours.iter().map(|count| *count as f64).collect();
        Spark::of("Failures", &hours, |failures| failures)
    }

    fn failed_now(&self) -> String {
        count(self.failed_now)
    }

    pub fn kind(&self) -> String {
        self.kind.replace('_', " ")
    }

    pub fn line(&self) -> String {
        crate::text::cut(&self.text, 200)
    }

    fn title(&self) -> String {
        crate::text::cut(&self.text, 90)
    }
}

/// The groups that failed within the last day, the newest first.
pub(super) async fn of_the_last_day(visit: &Visit, limit: &str) -> Result<Vec<Group>, Refusal> {
    let query = query(&[("since", &ago(24)), ("limit", limit)]);
    Ok(visit.api.get::<List<Group>>(&format!("/v1/errors{query}")).await?.items)
}

/// A whole minute, so that pages that look within it ask the same.
fn ago(hours: i64) -> String {
    let then = Utc::now() - Duration::hours(hours);
    then.duration_trunc(Duration::minutes(1)).unwrap_or(then).to_rfc3339_opts(SecondsFormat::Secs, true)
}

#[derive(Template)]
#[template(path = "errors.html")]
struct Errors {
    frame: Frame,
    asked: Asked,
    chips: Vec<(&'static str, String, bool)>,
    items: Vec<Group>,
    next: String,
    /// Why it cannot be looked for.
    wrong: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    muted: String,
    text: String,
    kind: String,
    within: String,
    cursor: String,
}

const SPANS: [(&str, &str, i64); 3] =
    [("hour", "the last hour", 1), ("day", "the last day", 24), ("week", "the last week", 168)];

impl Asked {
    fn link(&self, muted: &str, cursor: &str) -> String {
        let text = self.text.trim();
        let own = [("text", text), ("kind", self.kind.trim()), ("within", &self.within)];
        query(&[&[("muted", muted)], own.as_slice(), &[("cursor", cursor)]].concat())
    }

    fn spans(&self) -> [(&'static str, &'static str, i64); 3] {
        SPANS
    }

    fn is_narrowed(&self) -> bool {
        !(self.text.is_empty() && self.kind.is_empty() && self.within.is_empty())
    }
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Errors, "Errors").await?;
    if asked.cursor.is_empty() {
        frame.refresh_s = 5;
    }
    let visit = visit.again(&frame);
    let since = SPANS.iter().find(|(word, ..)| *word == asked.within).map(|(.., hours)| ago(*hours));
    // The page shows kinds with spaces.
    let kind = asked.kind.trim().replace(' ', "_");
    let query = query(&[
        ("muted", &asked.muted),
        ("text", asked.text.trim()),
        ("kind", kind.as_str()),
        ("since", since.as_deref().unwrap_or_default()),
        ("cursor", &asked.cursor),
        ("limit", "50"),
    ]);
    let found = visit.api.get::<List<Group>>(&format!("/v1/errors{query}")).await;
    let (items, next, wrong) = match found {
        Ok(found) => {
            let next = found.next_link(|next| asked.link(&asked.muted, next));
            (found.items, next, String::new())
        }
        Err(refusal) if refusal.status == StatusCode::BAD_REQUEST => {
            (Vec::new(), String::new(), refusal.detail)
        }
        Err(refusal) => return Err(refusal),
    };
    let chips = [("open", ""), ("muted", "true"), ("all", "all")];
    let chips = chips.map(|(word, muted)| (word, asked.link(muted, ""), asked.muted == muted)).to_vec();
    let status = if wrong.is_empty() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    Ok((status, page(&Errors { frame, chips, items, next, asked, wrong })).into_response())
}

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorPage {
    frame: Frame,
    group: Group,
    /// Its newest failed sessions.
    items: Vec<Session>,
    /// The search for all of them.
    all: String,
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>) -> Result<Response, Refusal> {
    let group: Group = visit.api.get(&format!("/v1/errors/{}", part(&id))).await?;
    let mut frame = Frame::of(&visit, Nav::Errors, group.title()).await?;
    frame.refresh_s = 5;
    let all = query(&[("error", &group.fingerprint)]);
    let found: List<Session> = visit.api.get(&format!("/v1/sessions{all}&limit=20")).await?;
    Ok(page(&ErrorPage { frame, items: found.items, all, group }))
}

/// Mutes a group for as long as the form says, or ends that.
pub(crate) async fn mute(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/errors/{}", form.visit.base(), part(&id));
    let seconds = form.get("for_s").parse::<u64>().ok();
    let mut body = json!({});
    if let Some(seconds) = seconds {
        body["for_s"] = json!(seconds);
    }
    if let Some(reason) = form.filled("reason") {
        body["reason"] = json!(super::act::one_line(&reason));
    }
    let said = if seconds == Some(0) { "The group is listed again." } else { "The group is muted." };
    form.act(&back, async {
        form.visit.api.post(&format!("/v1/errors/{}/mute", part(&id)), &body, None).await?;
        Ok(done(&back, said))
    })
    .await
}

/// Writes the note for those who look next.
pub(crate) async fn note(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/errors/{}", form.visit.base(), part(&id));
    let note = form.filled("note").map(|note| super::act::one_line(&note)).unwrap_or_default();
    let said = if note.is_empty() { "The note is removed." } else { "The note is written down." };
    form.act(&back, async {
        form.visit.api.post(&format!("/v1/errors/{}/note", part(&id)), &json!({"note": note}), None).await?;
        Ok(done(&back, said))
    })
    .await
}
