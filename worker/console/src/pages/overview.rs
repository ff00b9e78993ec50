//! The overview: is it healthy, and what needs a person.

use super::errors::{Group, of_the_last_day};
use crate::draw::Line;
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::{Delivery, Queue, Session, Worker};
use crate::refusal::Refusal;
use crate::text::seconds;
use crate::visit::Visit;
use askama::Template;
use axum::response::Response;
use serde::Deserialize;

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    frame: Frame,
    counts: Counts,
    /// In the order in which a person should look.
    needs: Vec<Session>,
    deliveries: Vec<Delivery>,
    /// How many effects are uncertain, up to [`EFFECTS`].
    effects: usize,
    errors: Vec<Group>,
    running: Vec<Session>,
    recent: Vec<Session>,
    /// Only a token of the whole installation sees these.
    fleet: Option<Fleet>,
}

/// As far as uncertain effects are counted.
const EFFECTS: usize = 50;

struct Fleet {
    queue: Queue,
    alive: usize,
    silent: usize,
    ready: i64,
    oldest: String,
    /// The oldest ready job has waited for a minute.
    is_late: bool,
    history: Option<Line>,
}

#[derive(Deserialize)]
struct Counted {
    sessions: Counts,
    counted_to: i64,
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

    fn is_calm(&self) -> bool {
        self.needs.is_empty()
            && self.deliveries.is_empty()
            && self.effects == 0
            && self.fleet.as_ref().is_none_or(|fleet| fleet.alive > 0 && fleet.queue.gates.is_empty())
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
    let list = async |query: &str| -> Result<Vec<Session>, Refusal> {
        Ok(api.get::<List<Session>>(&format!("/v1/sessions?{query}")).await?.items)
    };
    let unsent = async {
        if !of_space {
            return Ok(Vec::new());
        }
        let mut all: Vec<Delivery> = Vec::new();
        for status in ["uncertain", "failed"] {
            all.extend(
                api.get::<List<Delivery>>(&format!("/v1/deliveries?status={status}&limit=5")).await?.items,
            );
        }
        Ok(all)
    };
    let effects = async {
        let found: List<serde::de::IgnoredAny> = api.get(&format!("/v1/effects?limit={EFFECTS}")).await?;
        Ok(found.items.len())
    };
    let errors = async { if of_space { of_the_last_day(&visit, "5").await } else { Ok(Vec::new()) } };
    let fleet = async { if whole { fleet(&visit).await.map(Some) } else { Ok(None) } };
    let (counted, attention, failed, asks, running, recent, deliveries, effects, errors, fleet) = tokio::try_join!(
        api.get::<Counted>("/v1/overview"),
        list("status=needs_attention&limit=5"),
        list("status=failed&limit=5"),
        list("status=waiting_input&limit=5"),
        list("status=running&limit=8"),
        list("limit=8"),
        unsent,
        effects,
        errors,
        fleet,
    )?;
    let counts = Counts { most: counted.counted_to, ..counted.sessions };
    let needs = [attention, failed, asks].concat();
    Ok(page(&Overview { frame, counts, needs, deliveries, effects, errors, running, recent, fleet }))
}

async fn fleet(visit: &Visit) -> Result<Fleet, Refusal> {
    let (queue, workers) =
        tokio::try_join!(visit.api.get::<Queue>("/v1/queue"), visit.api.get::<List<Worker>>("/v1/workers"),)?;
    let alive: Vec<&Worker> = workers.items.iter().filter(|worker| worker.alive).collect();
    let oldest_s = queue.queues.iter().map(|one| one.oldest_ready_s).fold(0.0, f64::max);
    let ready = queue.queues.iter().map(|one| one.ready).sum();
    let depths: Vec<f64> = queue.history.iter().map(|one| (one.ready + one.leased) as f64).collect();
    Ok(Fleet {
        alive: alive.len(),
        silent: workers.items.len() - alive.len(),
        ready,
        oldest: if ready > 0 { seconds(oldest_s) } else { "none".to_owned() },
        is_late: oldest_s > 60.0,
        history: Line::of(&depths),
        queue,
    })
}
