//! A schedule as it is shown.

use chrono::{DateTime, Utc};
use serde::Serialize;
use wakeful_store::schedule::Schedule;
use wakeful_workflow::schedule::Timing;

/// The most ticks that are told in advance.
pub const NEXT_LIMIT: usize = 1000;

/// The schedule's row, with its conversation under the name that the API takes.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    #[serde(flatten)]
    pub schedule: Schedule,
    /// `active` or `paused`.
    pub state: &'static str,
}

/// A tick to come.
#[derive(Clone, Debug, Serialize)]
pub struct Next {
    pub tick: DateTime<Utc>,
    /// As the schedule's time zone has it.
    pub local: String,
}

impl View {
    pub fn of(mut schedule: Schedule) -> View {
        let state = if schedule.paused_at.is_some() { "paused" } else { "active" };
        if let Some((_, id)) = schedule.definition.conversation_id.split_once('/') {
            schedule.definition.conversation_id = id.to_owned();
        }
        View { schedule, state }
    }
}

/// The next `count` ticks after `now`.
pub fn next(schedule: &Schedule, now: DateTime<Utc>, count: usize) -> Vec<Next> {
    let definition = &schedule.definition;
    // It was read when it was written.
    let Ok(timing) = Timing::parse(&definition.cron, &definition.time_zone) else { return Vec::new() };
    // A clock that was ahead has decided some already.
    let from = now.max(schedule.last_tick);
    timing.ticks(from).take(count).map(|tick| Next { tick, local: timing.local(tick) }).collect()
}
