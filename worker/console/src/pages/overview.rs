//! The overview: is it healthy, and what needs a person.

use super::errors::{Group, of_the_last_day};
use super::notifications::Notification;
use super::pauses::Pause;
use crate::draw::{Line, Spark};
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::{Delivery, Queue, Session, Worker};
use crate::refusal::Refusal;
use crate::text::{count, dollars, seconds, span};
use crate::visit::Visit;
use askama::Template;
use axum::response::Response;
use chrono::{DateTime, DurationRound as _, TimeDelta, Utc};
use serde::Deserialize;

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    frame: Frame,
    counts: Counts,
    /// What became of the runs of the last day.
    figures: Vec<Figure>,
    /// Only the latest sessions were read for them.
    is_partial: bool,
    /// In the order in which a person should look.
    needs: Vec<Session>,
    deliveries: Vec<Delivery>,
    /// How many effects are uncertain, up to [`EFFECTS`].
    effects: usize,
    /// Messages of `[[notify]]` of the last day that did not reach people, up to [`SHOWN`].
    unheard: Vec<Notification>,
    errors: Vec<Group>,
    running: Vec<Session>,
    recent: Vec<Session>,
    /// Only a token of the whole installation sees these.
    fleet: Option<Fleet>,
}

/// How many of each kind that needs a person are shown, and how many of those that run.
const SHOWN: usize = 5;
const RUNNING: i64 = 8;

/// As far as uncertain effects are counted.
const EFFECTS: usize = 50;

struct Fleet {
    queue: Queue,
    pauses: Vec<Pause>,
    alive: usize,
    silent: usize,
    ready: i64,
    oldest: String,
    /// The oldest ready job has waited for a minute.
    is_late: bool,
    history: Option<Line>,
}

/// A number of the last day, and what it was in each hour.
struct Figure {
    name: &'static str,
    value: String,
    about: String,
    spark: Spark,
    /// Colours the columns.
    class: &'static str,
}

#[derive(Deserialize)]
struct Counted {
    sessions: Counts,
    counted_to: i64,
    day: Day,
}

#[derive(Deserialize)]
struct Day {
    #[serde(flatten)]
    all: Runs,
    hours: Vec<Runs>,
    is_partial: bool,
}

#[derive(Clone, Deserialize)]
struct Runs {
    hour: Option<DateTime<Utc>>,
    runs: i64,
    completed: i64,
    failed: i64,
    cost_micros: i64,
    first_reply_p95_ms: Option<i64>,
}

impl Day {
    fn figures(&self, now: DateTime<Utc>) -> Vec<Figure> {
        let hour = now.duration_trunc(TimeDelta::hours(1)).unwrap_or(now);
        // Hours without a run have no row.
        let hours = |of: &dyn Fn(&Runs) -> i64| -> Vec<f64> {
            let at = |ago: i64| {
                let begin = hour - TimeDelta::hours(ago);
                self.hours.iter().find(|one| one.hour == Some(begin)).map_or(0, of) as f64
            };
            (0..24).rev().map(at).collect()
        };
        let number = |value: f64| count(value as i64);
        let all = &self.all;
        let ended = all.completed + all.failed;
        let this_hour = self.hours.iter().find(|one| one.hour == Some(hour)).map_or(0, |one| one.runs);
        let share = match ended {
            0 => "-".to_owned(),
            // 99.96 % is not 100 %.
            _ if all.failed == 0 => "100 %".to_owned(),
            _ => format!("{:.1} %", (all.completed as f64 * 1000.0 / ended as f64).floor() / 10.0),
        };
        let a_run = if all.runs > 0 { dollars(all.cost_micros / all.runs) } else { "-".to_owned() };
        vec![
            Figure {
                name: "runs",
                value: count(all.runs),
                about: format!("{} in this hour", count(this_hour)),
                spark: Spark::of("Runs", &hours(&|one| one.runs), number),
                class: "",
            },
            Figure {
                name: "went well",
                value: share,
                about: format!("{} failed", count(all.failed)),
                spark: Spark::of("Failed runs", &hours(&|one| one.failed), number),
                class: "failures",
            },
            Figure {
                name: "until the first reply, p95",
                value: all.first_reply_p95_ms.map_or_else(|| "-".to_owned(), span),
                about: no_longer(all),
                spark: Spark::of(
                    "Time until the first reply",
                    &hours(&|one| one.first_reply_p95_ms.unwrap_or(0)),
                    |ms| span(ms as i64),
                ),
                class: "",
            },
            Figure {
                name: "cost",
                value: dollars(all.cost_micros),
                about: format!("{a_run} a run"),
                spark: Spark::of("Cost", &hours(&|one| one.cost_micros), |micros| dollars(micros as i64)),
                class: "",
            },
        ]
    }
}

/// Of fewer than 20 runs the 95th percentile is the longest.
fn no_longer(all: &Runs) -> String {
    let said = match (all.first_reply_p95_ms, all.runs) {
        (None, _) => "no run has replied",
        (Some(_), ..20) => "no run took longer",
        (Some(_), _) => "19 of 20 runs took no longer",
    };
    said.to_owned()
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Counts {
    queued: i64,
    running: i64,
    waiting_input: i64,
    needs_attention: i64,
    failed: i64,
    #[serde(skip)]
    most: i64,
}

impl Counts {
    fn shown(&self, count: &i64) -> String {
        if *count >= self.most { format!("{}+", self.most) } else { count.to_string() }
    }
}

impl Overview {
    /// “3 effects”. `None`: nothing is uncertain.
    fn uncertain(&self) -> Option<String> {
        let more = if self.effects >= EFFECTS { "+" } else { "" };
        let s = if self.effects == 1 { "" } else { "s" };
        (self.effects > 0).then(|| format!("{}{more} effect{s}", self.effects))
    }

    fn runs_more(&self) -> bool {
        self.counts.running > RUNNING
    }

    /// The link to the rest of what needs a person, if not all of it is shown: its words and its page.
    fn more(&self) -> Vec<(String, String)> {
        let counts = &self.counts;
        let sessions = [
            (counts.needs_attention, "need attention", "needs_attention"),
            (counts.failed, "failed", "failed"),
            (counts.waiting_input, "wait for input", "waiting_input"),
        ];
        let sessions = sessions.into_iter().filter(|(count, ..)| *count > SHOWN as i64);
        let sessions = sessions.map(|(count, words, status)| {
            (format!("All {} that {words}", counts.shown(&count)), format!("/sessions?status={status}"))
        });
        let deliveries = ["uncertain", "failed"]
            .into_iter()
            .filter(|status| self.deliveries.iter().filter(|one| one.status == *status).count() >= SHOWN);
        let deliveries = deliveries
            .map(|status| (format!("All {status} deliveries"), format!("/deliveries?status={status}")));
        sessions.chain(deliveries).collect()
    }

    fn is_calm(&self) -> bool {
        self.needs.is_empty()
            && self.deliveries.is_empty()
            && self.effects == 0
            && self.unheard.is_empty()
            && self.fleet.as_ref().is_none_or(|fleet| {
                fleet.alive > 0 && fleet.queue.gates.is_empty() && fleet.pauses.is_empty()
            })
    }
}

pub(crate) async fn show(visit: Visit) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Overview, "Overview").await?;
    frame.refresh_s = 5;
    let visit = visit.again(&frame);
    let me = frame.me.clone();
    let whole = me.as_ref().is_some_and(|me| me.everywhere && me.agent.is_none());
    let of_space = me.is_some_and(|me| me.agent.is_none());
    let api = &visit.api;
    let list = async |query: String| -> Result<Vec<Session>, Refusal> {
        Ok(api.get::<List<Session>>(&format!("/v1/sessions?{query}")).await?.items)
    };
    let unsent = async {
        if !of_space {
            return Ok(Vec::new());
        }
        let mut all: Vec<Delivery> = Vec::new();
        for status in ["uncertain", "failed"] {
            all.extend(
                api.get::<List<Delivery>>(&format!("/v1/deliveries?status={status}&limit={SHOWN}"))
                    .await?
                    .items,
            );
        }
        Ok(all)
    };
    let unheard = async {
        if !of_space {
            return Ok(Vec::new());
        }
        let failed = format!("/v1/notifications?status=failed&limit={SHOWN}");
        let mut failed = api.get::<List<Notification>>(&failed).await?.items;
        let lately = Utc::now() - TimeDelta::days(1);
        failed.retain(|one| one.settled_at.is_some_and(|at| at.0 >= lately));
        Ok(failed)
    };
    let effects = async {
        let found: List<serde::de::IgnoredAny> = api.get(&format!("/v1/effects?limit={EFFECTS}")).await?;
        Ok(found.items.len())
    };
    let errors = async { if of_space { of_the_last_day(&visit, "5").await } else { Ok(Vec::new()) } };
    let fleet = async { if whole { fleet(&visit).await.map(Some) } else { Ok(None) } };
    let (counted, attention, failed, asks, running, recent, deliveries, effects, unheard, errors, fleet) = tokio::try_join!(
        api.get::<Counted>("/v1/overview"),
        list(format!("status=needs_attention&limit={SHOWN}")),
        list(format!("status=failed&limit={SHOWN}")),
        list(format!("status=waiting_input&limit={SHOWN}")),
        list(format!("status=running&limit={RUNNING}")),
        list("limit=8".to_owned()),
        unsent,
        effects,
        unheard,
        errors,
        fleet,
    )?;
    let counts = Counts { most: counted.counted_to, ..counted.sessions };
    let (figures, is_partial) = (counted.day.figures(Utc::now()), counted.day.is_partial);
    let needs = [attention, failed, asks].concat();
    Ok(page(&Overview {
        frame,
        counts,
        figures,
        is_partial,
        needs,
        deliveries,
        effects,
        unheard,
        errors,
        running,
        recent,
        fleet,
    }))
}

async fn fleet(visit: &Visit) -> Result<Fleet, Refusal> {
    let (queue, workers, pauses) = tokio::try_join!(
        visit.api.get::<Queue>("/v1/queue"),
        visit.api.get::<List<Worker>>("/v1/workers"),
        visit.api.get::<List<Pause>>("/v1/pauses"),
    )?;
    let alive: Vec<&Worker> = workers.items.iter().filter(|worker| worker.alive).collect();
    let oldest_s = queue.queues.iter().map(|one| one.oldest_ready_s).fold(0.0, f64::max);
    let ready = queue.queues.iter().map(|one| one.ready).sum();
    let depths: Vec<f64> = queue.history.iter().map(|one| (one.ready + one.leased) as f64).collect();
    Ok(Fleet {
        alive: alive.len(),
        silent: workers.items.iter().filter(|worker| worker.state == "silent").count(),
        ready,
        oldest: if ready > 0 { seconds(oldest_s) } else { "none".to_owned() },
        is_late: oldest_s > 60.0,
        history: Line::of(&depths),
        pauses: pauses.items,
        queue,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_a_day_have_a_column_for_each_hour_that_had_runs() {
        let now = "2026-11-25T10:20:00Z".parse::<DateTime<Utc>>().expect("a time");
        let hour = |at: &str, runs: i64, failed: i64| {
            serde_json::json!({"hour": at, "runs": runs, "completed": runs - failed, "failed": failed,
                "cost_micros": runs * 20_000, "first_reply_p95_ms": 1500})
        };
        let mut day = hour("2026-11-25T10:00:00Z", 10_000, 3);
        day["hour"] = serde_json::Value::Null;
        day["hours"] =
            serde_json::json!([hour("2026-11-24T12:00:00Z", 9998, 3), hour("2026-11-25T10:00:00Z", 2, 0)]);
        day["is_partial"] = false.into();
        let day: Day = serde_json::from_value(day).expect("a day");
        let figures = day.figures(now);
        let shown: Vec<_> = figures
            .iter()
            .map(|one| (one.value.as_str(), one.about.as_str(), one.spark.columns.len()))
            .collect();
        assert_eq!(
            shown,
            [
                ("10\u{2009}000", "2 in this hour", 2),
                ("99.9 %", "3 failed", 1),
                ("1.5 s", "19 of 20 runs took no longer", 2),
                ("$200.00", "$0.02 a run", 2),
            ]
        );
        assert_eq!(figures[0].spark.columns[0].title, "22 h ago, 9\u{2009}998");
        let few = |runs, first_reply_p95_ms| Runs { runs, first_reply_p95_ms, ..day.all.clone() };
        let said = [few(19, Some(1)), few(20, Some(1)), few(3, None)].map(|all| no_longer(&all));
        assert_eq!(said, ["no run took longer", "19 of 20 runs took no longer", "no run has replied"]);
    }
}
