//! A session: what happened, why, and what a person can do about it.

mod crash;
mod fill;
mod transcript;

pub(super) use crash::survived;
pub(super) use transcript::{Block, Said, said, said_in};

use self::fill::Fills;
use crate::api::{part, query};
use crate::draw::{Bars, Known, Waterfall};
use crate::form::see_other;
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::{Branch, Call, Delivery, Detail, Event, Message, Worker};
use crate::refusal::Refusal;
use crate::text::{count, cut, dollars};
use crate::visit::Visit;
use askama::Template;
use axum::Json;
use axum::extract::{Path, Query};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use chrono::Utc;
use serde::Deserialize;
use serde_json::Value;

/// How many messages a page shows.
const MESSAGES: i64 = 50;
/// How many entries of the journal are drawn, and how many are listed.
const DRAWN: i64 = 500;
const LISTED: i64 = 100;
/// In how many the page of the context looks for rebases.
const SEARCHED: i64 = 200;

#[derive(Template)]
#[template(path = "session.html")]
struct SessionPage {
    frame: Frame,
    one: Detail,
    tab: Tab,
    said: Vec<Said>,
    /// Links to older and newer messages.
    older: String,
    is_newest: bool,
    /// The calls and deliveries whose end is unknown.
    uncertain: Vec<Uncertain>,
    /// The calls that wait for approval.
    unapproved: Vec<Call>,
    fall: Option<Waterfall>,
    /// Entries of the journal before those that are drawn.
    undrawn: i64,
    /// A worker died, and another one went on.
    survived: bool,
    bars: Option<Bars>,
    context: Option<Context>,
    fills: Option<Fills>,
    tree: Vec<Branch>,
    entries: Vec<Event>,
    /// Cursors of the pages before and after, or empty.
    earlier_entries: String,
    next_entries: String,
    state: String,
}

struct Uncertain {
    kind: &'static str,
    field: &'static str,
    id: String,
    name: String,
    /// Why its end is unknown, as a sentence.
    cause: String,
}

/// Why a call is uncertain of which no reason is known.
const DIED: &str = "A worker died while it ran.";

/// As much of a delivery's error as is shown.
const CAUSE: usize = 300;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tab {
    Transcript,
    Timeline,
    Effects,
    Context,
    Forks,
    Journal,
}

impl Tab {
    const ALL: [(Tab, &'static str, &'static str); 6] = [
        (Tab::Transcript, "", "Transcript"),
        (Tab::Timeline, "timeline", "Timeline"),
        (Tab::Effects, "effects", "Effects"),
        (Tab::Context, "context", "Context"),
        (Tab::Forks, "forks", "Forks"),
        (Tab::Journal, "journal", "Journal"),
    ];

    fn of(word: &str) -> Tab {
        Tab::ALL.iter().find(|(_, name, _)| *name == word).map_or(Tab::Transcript, |(tab, ..)| *tab)
    }
}

impl SessionPage {
    fn tabs(&self) -> [(Tab, &'static str, &'static str); 6] {
        Tab::ALL
    }

    /// Forks, without the session itself.
    fn has_kin(&self) -> bool {
        self.tree.len() > 1
    }
}

/// What the next model call would see.
#[derive(Deserialize)]
struct Context {
    model: String,
    window_tokens: i64,
    messages: i64,
    bytes: i64,
    tokens: i64,
    #[serde(default)]
    compaction_due: bool,
    #[serde(default)]
    rebase: Value,
    #[serde(default)]
    system: String,
    tools: Vec<Value>,
    strategies: Vec<Outlook>,
}

#[derive(Deserialize)]
struct Outlook {
    strategy: String,
    current: bool,
    messages: i64,
    tokens: i64,
    window_percent: f64,
    cost_micros: i64,
    cached_cost_micros: i64,
}

impl Context {
    /// The share of the window, as the width of a bar in an SVG of 600.
    fn fill(&self) -> String {
        format!("{:.1}", (self.tokens as f64 * 600.0 / self.window_tokens.max(1) as f64).clamp(2.0, 600.0))
    }

    fn percent(&self) -> String {
        format!("{:.1} %", self.tokens as f64 * 100.0 / self.window_tokens.max(1) as f64)
    }

    fn tool_names(&self) -> String {
        self.tools.iter().filter_map(|tool| tool["name"].as_str()).collect::<Vec<_>>().join(", ")
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Asked {
    tab: String,
    before: String,
    after: String,
}

pub(crate) async fn show(
    visit: Visit,
    Path(id): Path<String>,
    Query(asked): Query<Asked>,
) -> Result<Response, Refusal> {
    let path = format!("/v1/sessions/{}", part(&id));
    let tab = Tab::of(&asked.tab);
    // Weighing a long session takes longest, so nothing is waited for before it.
    let context = async {
        match tab {
            Tab::Context => visit.api.get(&format!("{path}/context?messages=false")).await.map(Some),
            _ => Ok(None),
        }
    };
    let (one, context) = tokio::join!(visit.api.get::<Detail>(&path), context);
    let one = one?;
    let mut frame = Frame::of(&visit, Nav::Sessions, one.session.conversation_id.clone()).await?;
    let base = frame.base.clone();
    // The beginning of an id is enough to find its session, but not for what the page does with it.
    if one.session.session_id != id {
        let whole = part(&one.session.session_id);
        return Ok(see_other(&format!("{base}/sessions/{whole}{}", query(&[("tab", &asked.tab)]))));
    }
    let newest: List<Event> = visit.api.get(&format!("{path}/events?newest=true&limit=1")).await?;
    let last_seq = newest.items.last().map_or(0, |event| event.seq);
    if asked.before.is_empty() && asked.after.is_empty() {
        frame.live = format!("{base}/sessions/{}/stream?after={last_seq}", part(&id));
    }
    let mut shown = SessionPage {
        uncertain: uncertain(&one),
        unapproved: awaiting_approval(&one).cloned().collect(),
        said: Vec::new(),
        older: String::new(),
        is_newest: asked.before.is_empty(),
        fall: None,
        undrawn: 0,
        survived: false,
        bars: None,
        context: None,
        fills: None,
        tree: Vec::new(),
        entries: Vec::new(),
        earlier_entries: String::new(),
        next_entries: String::new(),
        state: String::new(),
        tab,
        frame,
        one,
    };
    match tab {
        Tab::Transcript => {
            let pages = query(&[("cursor", &asked.before), ("limit", &MESSAGES.to_string())]);
            let messages: List<Message> = visit.api.get(&format!("{path}/messages{pages}")).await?;
            let next = messages.next();
            if !next.is_empty() {
                shown.older = query(&[("before", &next)]);
            }
            shown.said = said_in(messages.items, &shown.one);
        }
        Tab::Timeline => {
            let events: List<Event> =
                visit.api.get(&format!("{path}/events?newest=true&limit={DRAWN}")).await?;
            // Not every visitor may see the workers, and the drawing does without.
            let workers = visit.api.get::<List<Worker>>("/v1/workers").await;
            let workers = workers.map(|found| found.items).unwrap_or_default();
            let (events, steps) = (events.items, &shown.one.steps);
            shown.undrawn = events.first().map_or(0, |first| first.seq - 1);
            shown.fall =
                Some(Waterfall::of(&Known { events: &events, steps, workers: &workers, now: Utc::now() }));
            shown.bars = (!shown.one.steps.is_empty()).then(|| tokens(&shown.one));
        }
        Tab::Effects => {}
        Tab::Context => {
            let rebased: List<Event> =
                visit.api.get(&format!("{path}/events?newest=true&limit={SEARCHED}")).await?;
            shown.context = context?;
            shown.fills = shown
                .context
                .as_ref()
                .and_then(|context| Fills::of(&shown.one.steps, &rebased.items, context.window_tokens));
            shown.state = format!("{:#}", shown.one.session.state);
        }
        Tab::Forks => {
            shown.tree = visit.api.get::<List<Branch>>(&format!("{path}/tree")).await?.items;
        }
        Tab::Journal => {
            let pages = match asked.after.as_str() {
                "" => format!("?newest=true&limit={LISTED}"),
                after => query(&[("cursor", after), ("limit", &LISTED.to_string())]),
            };
            let events: List<Event> = visit.api.get(&format!("{path}/events{pages}")).await?;
            shown.next_entries = events.next();
            let before = events.items.first().map_or(0, |first| first.seq - 1);
            if before > 0 {
                shown.earlier_entries = (before - LISTED).max(0).to_string();
            }
            shown.entries = events.items;
        }
    }
    shown.survived = match &shown.fall {
        Some(fall) => fall.survived,
        None => survived(&visit, &path, &shown.one.steps).await?,
    };
    Ok(page(&shown))
}

/// Tokens of each of the latest steps.
fn tokens(one: &Detail) -> Bars {
    let bar = |step: &crate::model::Step| {
        let usage = &step.usage;
        let fresh = (usage.input_tokens - usage.cached_tokens).max(0) as f64;
        let title = format!(
            "Step {}: {} in, {} of them cached, {} out, {}",
            step.step_number,
            count(usage.input_tokens),
            count(usage.cached_tokens),
            count(usage.output_tokens),
            dollars(usage.cost_micros)
        );
        let parts = vec![
            ("cached", usage.cached_tokens as f64),
            ("fresh", fresh),
            ("out", usage.output_tokens as f64),
        ];
        (title, parts)
    };
    Bars::of(one.steps.iter().map(bar).collect())
}

/// The calls that a person may let run. A run that has failed or was cancelled has none.
fn awaiting_approval(one: &Detail) -> impl Iterator<Item = &Call> {
    let open = one.session.is_open();
    one.tool_calls.iter().filter(move |call| open && call.status == "unapproved")
}

fn uncertain(one: &Detail) -> Vec<Uncertain> {
    let calls = one.tool_calls.iter().filter(|call| call.status == "uncertain").map(|call| Uncertain {
        kind: "Tool call",
        field: "call_id",
        id: call.call_id.clone(),
        name: call.name.clone(),
        cause: call.reason.clone().unwrap_or_else(|| DIED.to_owned()),
    });
    let deliveries = one.deliveries.iter().filter(|one| one.is_uncertain()).map(|one: &Delivery| Uncertain {
        kind: "Delivery",
        field: "delivery_id",
        id: one.delivery_id.clone(),
        name: one.channel.clone(),
        cause: cause_of(one),
    });
    calls.chain(deliveries).collect()
}

/// Why the end of a delivery is unknown: its worker died, the other server's answer was lost, or nobody can tell any more.
fn cause_of(delivery: &Delivery) -> String {
    match delivery.last_error.as_deref().map(|error| cut(error, CAUSE)).filter(|error| !error.is_empty()) {
        Some(error) => format!("What is known: {}.", error.trim_end_matches('.')),
        None => "What became of it is not known.".to_owned(),
    }
}

/// The session as the API has it.
pub(crate) async fn raw(visit: Visit, Path(id): Path<String>) -> Result<Json<Value>, Refusal> {
    Ok(Json(visit.api.get(&format!("/v1/sessions/{}", part(&id))).await?))
}

/// The journal as it grows, for the script of the page.
pub(crate) async fn stream(
    visit: Visit,
    Path(id): Path<String>,
    Query(asked): Query<Asked>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let path = format!("/v1/sessions/{}/stream{}", part(&id), query(&[("after", &asked.after)]));
    visit.api.stream(&path, headers.get("last-event-id")).await
}

#[derive(Template)]
#[template(path = "fork.html")]
struct ForkPage {
    frame: Frame,
    one: Detail,
    at: String,
    /// The user's message that may be edited.
    text: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct At {
    at: String,
}

/// The form of a fork, at a message whose text may be edited.
pub(crate) async fn fork_page(
    visit: Visit,
    Path(id): Path<String>,
    Query(At { at }): Query<At>,
) -> Result<Response, Refusal> {
    let frame = Frame::of(&visit, Nav::Sessions, "Fork").await?;
    if !frame.operates() {
        let detail = "a token of the scope `read` makes no fork: log in with one of the scope `operate`";
        return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
    }
    let path = format!("/v1/sessions/{}", part(&id));
    let one: Detail = visit.api.get(&path).await?;
    let number: Option<i64> = at.parse().ok();
    let text = match number {
        Some(number) => {
            let found = format!("{path}/messages?cursor={}&limit=1", number.saturating_add(1));
            let found: List<Message> = visit.api.get(&found).await?;
            let own = found.items.into_iter().find(|message| message.message_number == number);
            own.filter(|message| message.role == "user").map(|message| message.text)
        }
        None => None,
    };
    Ok(page(&ForkPage { frame, one, at, text }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_uncertain_delivery_says_what_is_known_and_not_that_a_worker_died() {
        let cause = |error: Value| {
            let row = json!({"delivery_id": "del_1", "channel": "email", "status": "uncertain", "attempt": 1,
                "last_error": error});
            cause_of(&serde_json::from_value(row).expect("a delivery"))
        };
        let lost = "the connection broke after the mail was handed over";
        assert_eq!(cause(json!(lost)), format!("What is known: {lost}."));
        assert_eq!(cause(json!("Cut off.")), "What is known: Cut off.");
        assert_eq!(cause(json!(null)), "What became of it is not known.");
    }
}
