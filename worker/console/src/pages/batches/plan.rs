//! A batch is planned before it is made: the filter stands in the address, and the page says which sessions it finds now. Only
//! the form below that makes the batch.

use super::super::sessions::TRIGGERS;
use crate::api::part;
use crate::form::{Form, done};
use crate::frame::{Frame, Nav, page};
use crate::model::Session;
use crate::refusal::Refusal;
use crate::search::Search;
use crate::text::{Badge, badge, count};
use crate::visit::Visit;
use askama::Template;
use axum::extract::Query;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The verbs of a batch, and the sessions that each takes.
const VERBS: [(&str, &str, &str); 4] = [
    ("retry", "Retry", "failed ones and those that need attention go on from their last commit"),
    ("cancel", "Cancel", "open runs end as cancelled"),
    ("archive", "Archive", "sessions that rest are put away"),
    ("wake", "Wake", "queued and running ones are looked at and go on with what is still open"),
];
const STATUSES: [&str; 8] =
    ["failed", "needs_attention", "queued", "running", "waiting_input", "completed", "created", "cancelled"];

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    verb: String,
    #[serde(flatten)]
    search: Search,
    #[serde(flatten)]
    how: How,
}

/// How the batch goes about its members, as a form has it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct How {
    reason: String,
    rate: String,
    prove: String,
    canary: String,
    stop_share: String,
}

#[derive(Template)]
#[template(path = "batch_new.html")]
struct Plan {
    frame: Frame,
    verb: String,
    search: Search,
    how: How,
    verbs: [(&'static str, &'static str, &'static str); 4],
    triggers: [&'static str; 7],
    statuses: [&'static str; 8],
    preview: Option<Preview>,
    /// Why the API makes no batch of this.
    wrong: String,
}

/// What the batch would do.
#[derive(Deserialize)]
struct Preview {
    members: i64,
    by_status: BTreeMap<String, i64>,
    skipped: BTreeMap<String, i64>,
    sample: Vec<Session>,
}

impl Preview {
    fn count(&self) -> String {
        count(self.members)
    }

    fn is_one(&self) -> bool {
        self.members == 1
    }
}

impl Plan {
    /// Statuses with their numbers.
    fn counted(&self, by_status: &BTreeMap<String, i64>) -> Vec<(Badge, String)> {
        by_status.iter().map(|(status, number)| (badge(status), count(*number))).collect()
    }

    fn is_verb(&self, verb: &str) -> bool {
        self.verb == verb
    }

    fn about(&self) -> &'static str {
        self.verbs.iter().find(|(word, ..)| *word == self.verb).map_or("", |(.., about)| about)
    }
}

pub(crate) async fn plan(visit: Visit, Query(asked): Query<Asked>) -> Result<Response, Refusal> {
    let Asked { verb, search, how } = asked;
    let frame = Frame::of(&visit, Nav::Batches, "New batch").await?;
    if !frame.operates() {
        let detail = "a token of the scope `read` makes no batch: log in with one of the scope `operate`";
        return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
    }
    let verb = VERBS.iter().find(|(word, ..)| *word == verb).map_or("retry", |(word, ..)| word).to_owned();
    let (mut preview, mut wrong) = (None, String::new());
    if !search.is_empty() {
        let body = json!({"verb": verb, "filter": search.filter(), "dry_run": true});
        match visit.api.look("/v1/batches", &body).await {
            Ok(found) => {
                let found = serde_json::from_value(found);
                preview = Some(found.map_err(|error| Refusal::broken("the preview", &error))?);
            }
            Err(refusal) if refusal.status.is_client_error() && refusal.status != StatusCode::FORBIDDEN => {
                wrong = refusal.detail;
            }
            Err(refusal) => return Err(refusal),
        }
    }
    let (verbs, triggers, statuses) = (VERBS, TRIGGERS, STATUSES);
    Ok(page(&Plan { frame, verb, search, how, verbs, triggers, statuses, preview, wrong }))
}

/// Makes the batch that the page showed.
pub(crate) async fn create(form: Form) -> Result<Response, Refusal> {
    let search = Search::of_form(|name| form.get(name).to_owned());
    let verb = form.get("verb");
    let mut body = Map::new();
    body.insert("verb".to_owned(), verb.into());
    body.insert("filter".to_owned(), search.filter());
    if let Some(reason) = form.filled("reason") {
        body.insert("reason".to_owned(), super::super::act::one_line(&reason).into());
    }
    for (name, value) in [
        ("rate", form.filled("rate").map(|text| number(&text))),
        ("prove", form.filled("prove").map(|text| number(&text))),
        ("canary", form.filled("canary").map(|text| sizes(&text))),
        ("stop_share", form.filled("stop_share").and_then(|text| share(&text)).map(|share| json!(share))),
    ] {
        // The forms of the other verbs lack the fields that only a retry has.
        if let Some(value) = value {
            body.insert(name.to_owned(), value);
        }
    }
    let how = ["reason", "rate", "prove", "canary", "stop_share"].map(|name| (name, form.get(name)));
    let plan = search.link(&[&[("verb", verb)], how.as_slice()].concat());
    let back = format!("{}/batches/new{plan}", form.visit.base());
    form.act(&back, async {
        if form.filled("stop_share").is_some_and(|text| share(&text).is_none()) {
            let said = "\u{201c}Pause if more than this fail again\u{201d} takes a number of percent: 0, or from 1 to 100";
            return Err(Refusal::new(StatusCode::BAD_REQUEST, said));
        }
        let made = form.visit.api.post("/v1/batches", &Value::Object(body), Some(&form.key())).await?;
        let id = made["batch_id"].as_str().unwrap_or_default();
        let said = match made["status"].as_str() {
            Some("proving") => "The batch is made. First, some of its sessions are tried dry.",
            _ => "The batch is made.",
        };
        Ok(done(format!("{}/batches/{}", form.visit.base(), part(id)), said))
    })
    .await
}

/// A number. Any other text stays a text, and the API refuses it.
fn number(text: &str) -> Value {
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Ok(number), _) => json!(number),
        (_, Ok(number)) => json!(number),
        _ => json!(text),
    }
}

/// The sizes of stages, with commas or spaces between them.
fn sizes(text: &str) -> Value {
    text.split([',', ' ']).filter(|size| !size.is_empty()).map(number).collect()
}

/// A share, from a number of percent.
fn share(text: &str) -> Option<f64> {
    let percent: f64 = text.trim_end_matches('%').trim().parse().ok()?;
    // A person who writes 0.2 means a fifth, and would get a five-hundredth.
    (percent == 0.0 || (1.0..=100.0).contains(&percent)).then_some(percent / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_become_numbers_and_what_is_none_stays_as_it_was_typed() {
        assert_eq!(sizes("1, 10,100"), json!([1, 10, 100]));
        assert_eq!(sizes("1;2"), json!(["1;2"]));
        assert_eq!([share("20 %"), share("0"), share("half")], [Some(0.2), Some(0.0), None]);
        assert_eq!([share("0.2"), share("500")], [None, None]);
        assert_eq!((number("20"), number("0.5"), number("x")), (json!(20), json!(0.5), json!("x")));
    }
}
