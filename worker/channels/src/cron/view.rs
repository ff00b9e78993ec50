//! A schedule as the API and the command line show it.

use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Serialize;
use wakeful_store::schedule::Schedule;
use wakeful_workflow::schedule::Timing;

/// Maximum number of future ticks that one request can list.
pub const NEXT_LIMIT: usize = 1000;

/// The schedule's row. Its conversation id is the one that the API takes, without the space.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "Schedule")]
pub struct View {
    #[serde(flatten)]
    pub schedule: Schedule,
    /// `active` or `paused`.
    pub state: &'static str,
}

/// A future tick.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "NextFiring")]
pub struct Next {
    pub tick: DateTime<Utc>,
    /// The time in the schedule's time zone.
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
    // The pattern was checked when the schedule was written.
    let Ok(timing) = Timing::parse(&definition.cron, &definition.time_zone) else { return Vec::new() };
    // If the clock was ahead, some later ticks have already been fired or skipped.
    let from = now.max(schedule.last_tick);
    timing.ticks(from).take(count).map(|tick| Next { tick, local: timing.local(tick) }).collect()
}
