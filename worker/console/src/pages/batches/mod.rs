//! Batches: which there are, how one goes, and what stops it or lets it go on. [`plan`] makes one.

mod plan;

pub(super) use plan::{create, plan};

use crate::api::{part, query};
use crate::draw::Shares;
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::list::{Chip, List, chips};
use crate::refusal::Refusal;
use crate::search::Search;
use crate::text::{Badge, Moment, badge, count, cut, short};
use crate::visit::Visit;
use askama::Template;
use axum::extract::{Path, Query};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

const STATUSES: [&str; 5] = ["proving", "running", "paused", "done", "cancelled"];

/// A batch, as `GET /v1/batches` has it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Batch {
    batch_id: String,
    verb: String,
    reason: Option<String>,
    #[serde(default)]
    filter: Value,
    decision: Option<Decision>,
    status: String,
    status_reason: Option<String>,
    rate: f64,
    #[serde(default)]
    stages: Vec<i64>,
    stage: usize,
    stop_share: Option<f64>,
    model: Option<String>,
    proof: Option<Proof>,
    by: String,
    created_at: Moment,
    started_at: Option<Moment>,
    ended_at: Option<Moment>,
    members: i64,
    counts: Counts,
}

/// What is said of each effect.
#[derive(Clone, Debug, Deserialize)]
struct Decision {
    outcome: String,
    result: Option<String>,
    tell: bool,
}

impl Decision {
    fn said(&self) -> String {
        let result = self.result.as_ref().map(|result| format!(": {result}")).unwrap_or_default();
        let told = if self.tell { ", and models are told" } else { "" };
        cut(&format!("{}{result}{told}", self.outcome.replace('_', " ")), 200)
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Counts {
    pending: i64,
    acted: i64,
    refused: i64,
    passed: i64,
    failed_again: i64,
    open: i64,
}

#[derive(Clone, Debug, Deserialize)]
struct Proof {
    asked: i64,
    passed: i64,
    failed: i64,
    pending: i64,
    text: String,
    errors: Vec<ProofError>,
}

#[derive(Clone, Debug, Deserialize)]
struct ProofError {
    text: String,
    count: i64,
    same: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct Member {
    ordinal: i64,
    session_id: String,
    effect_id: Option<String>,
    stage: i64,
    outcome: String,
    detail: Option<String>,
    acted_at: Option<Moment>,
    result: Option<String>,
    result_at: Option<Moment>,
}

/// A stage of a canary.
struct Stage {
    name: String,
    size: String,
    state: Badge,
}

impl Batch {
    fn badge(&self) -> Badge {
        badge(&self.status)
    }

    /// “Retry 120 sessions”.
    fn title(&self) -> String {
        let mut verb = self.verb.clone();
        if let Some(first) = verb.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        let what = if self.is_of_effects() { "effect" } else { "session" };
        format!("{verb} {} {what}{}", count(self.members), if self.members == 1 { "" } else { "s" })
    }

    /// Its members are uncertain effects.
    fn is_of_effects(&self) -> bool {
        self.verb == "resolve"
    }

    fn is_over(&self) -> bool {
        matches!(self.status.as_str(), "done" | "cancelled")
    }

    fn may_pause(&self) -> bool {
        matches!(self.status.as_str(), "running" | "proving")
    }

    fn may_resume(&self) -> bool {
        self.status == "paused"
    }

    fn rate(&self) -> String {
        format!("{} a second", self.rate)
    }

    fn stops_at(&self) -> Option<String> {
        self.stop_share.map(|share| format!("{:.0} % fail again", share * 100.0))
    }

    fn shares(&self) -> Shares {
        let Counts { pending, acted, refused, passed, failed_again, open } = self.counts;
        let other = acted - passed - failed_again - open;
        Shares::of(
            self.members,
            &[
                ("good", "passed", passed),
                ("bad", "failed again", failed_again),
                ("runs", "not over", open),
                ("done", if self.verb == "retry" { "cancelled since" } else { "acted on" }, other),
                ("refused", "refused", refused),
                ("room", "to do", pending),
            ],
        )
    }

    /// What the filter asked for, in words.
    fn asked(&self) -> Vec<(String, String)> {
        let fields = self.filter.as_object().into_iter().flatten();
        fields
            .map(|(name, value)| {
                let value = match value {
                    Value::String(text) => text.clone(),
                    Value::Number(number) if name == "effects" => format!("{number} named"),
                    Value::Array(ids) => format!("{} named", ids.len()),
                    other => other.to_string(),
                };
                (name.replace('_', " "), value)
            })
            .collect()
    }

    /// The search for the sessions that its filter finds now.
    fn search(&self) -> String {
        if self.is_of_effects() { String::new() } else { Search::of_filter(&self.filter).link(&[]) }
    }

    fn stage_rows(&self) -> Vec<Stage> {
        let mut left = self.members;
        let mut sizes: Vec<i64> = Vec::new();
        for size in &self.stages {
            sizes.push(left.min(*size));
            left -= left.min(*size);
        }
        sizes.push(left);
        let rows = sizes.iter().enumerate().filter(|(_, size)| **size > 0).map(|(at, size)| {
            let state = match at.cmp(&self.stage) {
                _ if self.status == "done" => "done",
                std::cmp::Ordering::Less => "done",
                std::cmp::Ordering::Equal => &self.status,
                std::cmp::Ordering::Greater => "pending",
            };
            Stage { name: format!("Stage {}", at + 1), size: count(*size), state: badge(state) }
        });
        rows.collect()
    }
}

impl Proof {
    fn shares(&self) -> Shares {
        Shares::of(
            self.asked,
            &[
                ("good", "would pass", self.passed),
                ("bad", "fail", self.failed),
                ("room", "not known yet", self.pending),
            ],
        )
    }
}

impl Member {
    fn badge(&self) -> Badge {
        badge(self.result.as_deref().unwrap_or(&self.outcome))
    }

    fn short(&self) -> String {
        short(&self.session_id)
    }

    fn stage(&self) -> i64 {
        self.stage + 1
    }
}

#[derive(Template)]
#[template(path = "batches.html")]
struct Batches {
    frame: Frame,
    chips: Vec<Chip>,
    items: Vec<Batch>,
    next: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    status: String,
    cursor: String,
}

pub(crate) async fn list(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Batches, "Batches").await?;
    if asked.cursor.is_empty() {
        frame.refresh_s = 5;
    }
    let link = |status: &str, cursor: &str| query(&[("status", status), ("cursor", cursor)]);
    let found: List<Batch> =
        visit.api.get(&format!("/v1/batches{}", link(&asked.status, &asked.cursor))).await?;
    let chips = chips(&STATUSES, &asked.status, |status| link(status, ""));
    let next = found.next_link(|next| link(&asked.status, next));
    Ok(page(&Batches { frame, chips, items: found.items, next }))
}

#[derive(Template)]
#[template(path = "batch.html")]
struct BatchPage {
    frame: Frame,
    batch: Batch,
    chips: Vec<(&'static str, String, bool)>,
    members: Vec<Member>,
    next: String,
}

/// Which members are shown: the word of the address, that of the page, and what the API is asked.
const MEMBERS: [(&str, &str, &str); 6] = [
    ("", "all", ""),
    ("pending", "to do", "outcome=pending&"),
    ("acted", "acted on", "outcome=acted&"),
    ("refused", "refused", "outcome=refused&"),
    ("passed", "passed", "result=passed&"),
    ("failed_again", "failed again", "result=failed_again&"),
];

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct AskedMembers {
    members: String,
    cursor: String,
}

pub(crate) async fn show(
    visit: Visit,
    Path(id): Path<String>,
    Query(asked): Query<AskedMembers>,
) -> Result<Response, Refusal> {
    let path = format!("/v1/batches/{}", part(&id));
    let batch: Batch = visit.api.get(&path).await?;
    let which = MEMBERS.iter().find(|(word, ..)| *word == asked.members).map_or("", |(.., which)| which);
    let cursor = query(&[("cursor", &asked.cursor)]).replace('?', "&");
    let found: List<Member> = visit.api.get(&format!("{path}/members?{which}limit=50{cursor}")).await?;
    let mut frame = Frame::of(&visit, Nav::Batches, batch.title()).await?;
    if !batch.is_over() || batch.counts.open > 0 {
        frame.refresh_s = 2;
    }
    let link = |members: &str, cursor: &str| {
        let query = query(&[("members", members), ("cursor", cursor)]);
        if query.is_empty() { "?members=".to_owned() } else { query }
    };
    let chips = MEMBERS.map(|(word, name, _)| (name, link(word, ""), asked.members == word)).to_vec();
    let next = found.next_link(|next| link(&asked.members, next));
    Ok(page(&BatchPage { frame, chips, members: found.items, next, batch }))
}

pub(crate) async fn steer(Path((id, verb)): Path<(String, String)>, form: Form) -> Result<Response, Refusal> {
    let said = match verb.as_str() {
        "pause" => "The batch is paused. Runs that it began go on.",
        "resume" => "The batch goes on.",
        "cancel" => "The batch is cancelled. What was done stays done.",
        _ => return Err(Refusal::new(StatusCode::NOT_FOUND, "a batch has no such button")),
    };
    let back = format!("{}/batches/{}", form.visit.base(), part(&id));
    let reason = form.filled("reason").map(|reason| super::act::one_line(&reason));
    let body = reason.map_or_else(|| json!({}), |reason| json!({"reason": reason}));
    form.act(&back, async {
        form.visit.api.post(&format!("/v1/batches/{}/{verb}", part(&id)), &body, None).await?;
        Ok(done(&back, said))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(more: Value) -> Batch {
        let mut batch = json!({"batch_id": "batch_1", "verb": "retry", "filter": {"status": "failed", "cost_over": 0.5},
            "status": "running", "rate": 20.0, "stages": [1, 10], "stage": 1, "by": "ann", "members": 5,
            "created_at": "2026-11-23T09:00:00Z", "counts": {"pending": 1, "acted": 3, "refused": 1, "passed": 1,
            "failed_again": 1, "open": 1}});
        for (name, value) in more.as_object().unwrap() {
            batch[name] = value.clone();
        }
        serde_json::from_value(batch).unwrap()
    }

    #[test]
    fn stages_end_with_the_rest_and_each_has_its_state() {
        let states = |batch: &Batch| -> Vec<(String, &'static str)> {
            batch.stage_rows().into_iter().map(|stage| (stage.size, stage.state.word)).collect()
        };
        let own = |pairs: &[(&str, &'static str)]| -> Vec<(String, &'static str)> {
            pairs.iter().map(|(size, word)| ((*size).to_owned(), *word)).collect()
        };
        assert_eq!(states(&batch(json!({}))), own(&[("1", "done"), ("4", "running")]));
        let large = batch(json!({"members": 2000, "status": "paused"}));
        assert_eq!(states(&large), own(&[("1", "done"), ("10", "paused"), ("1\u{2009}989", "pending")]));
        let done = batch(json!({"members": 20, "status": "done"}));
        assert!(states(&done).iter().all(|(_, word)| *word == "done"));
    }

    #[test]
    fn a_batch_says_what_it_does_and_how_far_it_is() {
        let one = batch(json!({}));
        assert_eq!(one.title(), "Retry 5 sessions");
        assert_eq!(one.shares().said(), "1 passed, 1 failed again, 1 not over, 1 refused, 1 to do of 5");
        assert_eq!(one.search(), "?status=failed&cost_over=0.5");
        let named = batch(json!({"members": 1, "verb": "archive", "filter": {"session_ids": ["a", "b"]},
            "counts": {"acted": 1}}));
        assert_eq!(named.title(), "Archive 1 session");
        assert_eq!(named.shares().said(), "1 acted on of 1");
        assert_eq!(named.asked(), [("session ids".to_owned(), "2 named".to_owned())]);
        assert_eq!(named.search(), "");
    }
}
