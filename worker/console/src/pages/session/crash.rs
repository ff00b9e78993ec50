//! Whether a session went on after a crash.

use super::DRAWN;
use crate::draw::{Known, Waterfall};
use crate::list::List;
use crate::model::{Event, Step};
use crate::refusal::Refusal;
use crate::visit::Visit;
use chrono::Utc;

/// Whether a worker died in one of the latest steps, and another one went on. `path` is that of the session in the API. Almost no
/// session has such a step. The journal of one without is not read.
pub(crate) async fn survived(visit: &Visit, path: &str, steps: &[Step]) -> Result<bool, Refusal> {
    if steps.iter().all(|step| step.attempt <= 1) {
        return Ok(false);
    }
    let events: List<Event> = visit.api.get(&format!("{path}/events?newest=true&limit={DRAWN}")).await?;
    let known = Known { events: &events.items, steps, workers: &[], now: Utc::now() };
    Ok(Waterfall::of(&known).survived)
}
