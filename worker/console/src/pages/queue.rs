//! The queue, its last day, the gates, the pauses, and the workers.

use super::pauses::{KINDS, Pause};
use crate::draw::Line;
use crate::frame::{Frame, Nav, page};
use crate::list::List;
use crate::model::{Queue, Worker};
use crate::refusal::Refusal;
use crate::visit::Visit;
use askama::Template;
use axum::response::Response;

#[derive(Template)]
#[template(path = "queue.html")]
struct QueuePage {
    frame: Frame,
    queue: Queue,
    workers: Vec<Worker>,
    pauses: Vec<Pause>,
    kinds: [(&'static str, &'static str); 9],
    depth: Option<Line>,
    oldest: Option<Line>,
}

pub(crate) async fn show(visit: Visit) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Queue, "Queue and workers").await?;
    frame.refresh_s = 5;
    let visit = visit.again(&frame);
    let (queue, workers, pauses) = tokio::try_join!(
        visit.api.get::<Queue>("/v1/queue"),
        visit.api.get::<List<Worker>>("/v1/workers"),
        visit.api.get::<List<Pause>>("/v1/pauses"),
    )?;
    let line = |of: &dyn Fn(&crate::model::Sample) -> f64| {
        Line::of(&queue.history.iter().map(of).collect::<Vec<_>>())
    };
    let depth = line(&|one| (one.ready + one.leased + one.delayed) as f64);
    let oldest = line(&|one| one.oldest_ready_s);
    let (workers, pauses) = (workers.items, pauses.items);
    Ok(page(&QueuePage { frame, depth, oldest, workers, pauses, kinds: KINDS, queue }))
}
