//! The job of a session's step, as the API shows it.

use crate::text::Moment;
use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Job {
    pub step_number: Option<i64>,
    pub attempt: Option<i64>,
    pub worker_id: Option<String>,
    #[serde(default)]
    pub leased: bool,
    pub run_at: Option<Moment>,
    pub last_error: Option<String>,
    pub waits_for: Option<String>,
    pub next_probe_at: Option<Moment>,
    held_by: Option<String>,
    held_for: Option<String>,
}

impl Job {
    /// Why no worker takes it now: a pause, or an agent that no worker has. `None`: neither holds it.
    pub fn held(&self) -> Option<String> {
        let held = self.held_by.as_deref().filter(|_| !self.leased)?;
        if let Some(agent) = held.strip_prefix("lacks:") {
            return Some(format!("It waits for a worker that has the agent {agent}."));
        }
        let what = if held == "queue" { "The queue".to_owned() } else { held.replacen(':', " ", 1) };
        let why = self.held_for.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
        Some(format!("{what} is paused{why}"))
    }
}
