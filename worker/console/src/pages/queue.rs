//! The queue, its last day, the gates, and the workers.

use crate::draw::Line;
use crate::frame::{Frame, Nav, page};
use crate::model::{List, Queue, Worker};
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
    depth: Option<Line>,
    oldest: Option<Line>,
}

pub(crate) async fn show(visit: Visit) -> Result<Response, Refusal> {
    let mut frame = Frame::of(&visit, Nav::Queue, "Queue").await?;
    frame.refresh_s = 5;
    let (queue, workers) =
        tokio::try_join!(visit.api.get::<Queue>("/v1/queue"), visit.api.get::<List<Worker>>("/v1/workers"),)?;
    let line = |of: &dyn Fn(&crate::model::Sample) -> f64| {
        Line::of(&queue.history.iter().map(of).collect::<Vec<_>>())
    };
    let depth = line(&|one| (one.ready + one.leased + one.delayed) as f64);
    let oldest = line(&|one| one.oldest_ready_s);
    Ok(page(&QueuePage { frame, depth, oldest, workers: workers.items, queue }))
}
