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
    /// Nobody is at work on it: it is held, its provider or a store is away, or its last attempt failed and the next one comes later.
    pub fn waits(&self) -> bool {
        let is_to_come = !self.leased && self.last_error.is_some();
        self.held().is_some() || self.waits_for.is_some() || is_to_come
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_at_work_while_a_session_waits_for_something() {
        for (job, waits) in [
            (r#"{"leased": true}"#, false),
            ("{}", false),
            (r#"{"leased": true, "last_error": "the one before failed"}"#, false),
            (r#"{"last_error": "the provider fails"}"#, true),
            (r#"{"waits_for": "openai", "last_error": "the provider fails"}"#, true),
            (r#"{"held_by": "queue"}"#, true),
        ] {
            let read: Job = serde_json::from_str(job).unwrap();
            assert_eq!(read.waits(), waits, "{job}");
        }
    }
}
