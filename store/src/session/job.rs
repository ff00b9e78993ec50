//! The job of a session's step as it is shown, for the OpenAPI document alone: the query makes its JSON.
#![allow(dead_code, reason = "a schema is derived from the type, and no value is made")]

use chrono::{DateTime, Utc};
use schemars::JsonSchema;

/// The row of a session's step job.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(super) struct StepJob {
    step_number: i64,
    /// Claims of this step.
    attempt: i32,
    /// Claims without progress since, crashes included.
    stuck: i32,
    /// The worker that holds it, or held it last.
    worker_id: Option<String>,
    /// A worker holds it.
    leased: bool,
    /// When the lease ends, or when the job may be claimed.
    run_at: DateTime<Utc>,
    last_error: Option<String>,
    /// Since when the step has failed, and how often.
    fault_since: Option<DateTime<Utc>>,
    faults: i32,
    /// The pause that holds it (`queue`, `agent:NAME`, …), or `lacks:AGENT`; and the pause's reason.
    held_by: Option<String>,
    held_for: Option<String>,
    /// Since when its provider has failed, as this job has seen it, and how often.
    outage_since: Option<DateTime<Utc>>,
    outage_faults: i32,
    /// The provider whose gate it waits at; since when that provider has failed, and when the gate lets the next call through.
    waits_for: Option<String>,
    provider_down_since: Option<DateTime<Utc>>,
    next_probe_at: Option<DateTime<Utc>>,
}
