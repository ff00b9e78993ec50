//! What a step's job waits for when the reason is not a worker: a provider's outage, or the command of a replay. And what
//! `session why` says of anything: a finding.

use super::super::output::{age, count, span};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use wakeful_store::queue::LACKS;
use wakeful_store::standing::JobView;
use wakeful_workflow::gate::{CLONE, STORE, whose};

/// Facts from outside the session's own rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings<'a> {
    /// Workers whose heartbeat is fresh.
    pub workers_alive: usize,
    /// A worker without a heartbeat for longer than this counts as dead.
    pub silent_after_s: f64,
    /// Those of them that have the session's agent.
    pub workers_with_agent: usize,
    /// Attempts at one step after which the run fails. `None` if this configuration does not know the agent.
    pub attempts: Option<i64>,
    /// Seconds of a provider's outage after which the run fails. `None` if this configuration does not know the agent.
    pub outage_s: Option<f64>,
    /// Seconds that a call of a tool may take. `None`: as above.
    pub tool_s: Option<u64>,
    /// The agent's model.
    pub model: &'a str,
    /// Seconds that a call of it may be silent, and that it may take in all. `None`: its provider is not built in.
    pub call_s: Option<(u64, u64)>,
}

/// A reason, and what to do about it. No remedy means that nothing needs to be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub why: String,
    pub remedy: Option<String>,
}

/// Explains a job that a pause holds. `None`: none does.
pub(super) fn of_pause(job: &JobView) -> Option<Finding> {
    let held = job.held.as_ref().filter(|_| !job.leased)?;
    let text = |key: &str| held[key].as_str();
    let at = |key: &str| text(key)?.parse::<DateTime<Utc>>().ok();
    let (kind, name) = (text("kind").unwrap_or_default(), text("name").unwrap_or_default());
    let by = text("by").map(|by| format!(" by {by}")).unwrap_or_default();
    let since = at("since").map(|at| format!(" {} ago", age(at))).unwrap_or_default();
    let until = at("until")
        .map(|at| format!(" The pause ends by itself in {}.", span((at - Utc::now()).as_seconds_f64())));
    let what = format!("{kind} {name}").trim_end().to_owned();
    if held["resuming"] == true {
        return Some(Finding {
            why: format!(
                "The pause of {what} has ended, and its sessions go on one after the other. This one has its turn soon."
            ),
            remedy: None,
        });
    }
    Some(Finding {
        why: format!(
            "It waits, because {} was paused{by}{since}: {}.{}",
            if kind == "queue" { "the whole queue" } else { &what },
            text("reason").unwrap_or_default().trim_end_matches('.'),
            until.unwrap_or_default()
        ),
        remedy: Some(format!("When it may go on:\nwakeful pause end {what}")),
    })
}

/// Explains a job that waits for a worker that has its agent. `None`: it does not.
pub(super) fn of_lacked_agent(job: &JobView, around: Surroundings<'_>) -> Option<Finding> {
    let agent = job.lacks_agent.as_deref().filter(|_| !job.leased)?;
    let since = job.lacks_agent_s.map(|lasted| format!(" for {}", span(lasted))).unwrap_or_default();
    let (why, remedy) = match around.workers_with_agent {
        0 => (
            format!("It waits{since}: no live worker has agent {agent}."),
            Some(format!(
                "Start a worker whose configuration has [agents.{agent}], for the session's space:\nwakeful serve --roles worker\n\
                 Or end the run:\nwakeful session cancel {{id}}"
            )),
        ),
        one_or_more => (
            format!(
                "A worker without agent {agent} left it to the others{since}; {} that {} the agent take it when they have room.",
                count(one_or_more as i64, "live worker"),
                if one_or_more == 1 { "has" } else { "have" }
            ),
            None,
        ),
    };
    Some(Finding { why, remedy })
}

/// Explains a job that a provider's outage holds up. `None`: none does, or a worker has the job.
pub(super) fn of_outage(job: &JobView, around: Surroundings<'_>) -> Option<Finding> {
    let lasted = job.outage_s.filter(|_| !job.leased)?;
    let step = job.step_number.unwrap_or(0);
    let last =
        job.last_error.as_deref().map(|error| format!(" Last error: {}.", error.trim_end_matches('.')));
    let last = last.unwrap_or_default();
    let calls = match job.outage_faults {
        0 => String::new(),
        1 => " One call failed.".to_owned(),
        calls => format!(" {calls} calls failed."),
    };
    let end = around.outage_s.map(|limit| format!(" The run fails after an outage of {}.", span(limit)));
    let end = end.unwrap_or_default();
    let why = match &job.waits_for {
        Some(provider) => {
            let since = span(job.provider_down_s.unwrap_or(lasted));
            let next = match job.next_probe_in_s {
                Some(due) if due > 0.0 => format!("the next probe is in {}", span(due)),
                Some(_) => "a probe is under way or due".to_owned(),
                None => "it is back, and the waiting sessions go on in their order".to_owned(),
            };
            if provider.starts_with(STORE) {
                return Some(Finding {
                    why: format!(
                        "Step {step} needs files of the {provider}, which has been away for {since}: {next}.{last}"
                    ),
                    remedy: Some(
                        "It goes on by itself when the store answers; an outage of it fails no run. `wakeful doctor` asks the store. \
                         If this host does not know it, name it in [blobs] also and restart the workers"
                            .to_owned(),
                    ),
                });
            }
            if let Some(url) = provider.strip_prefix(CLONE) {
                return Some(Finding {
                    why: format!(
                        "Step {step} needs the files that its agent's sessions begin with, from {url}, which has not answered \
                         for {since}: {next}.{last}"
                    ),
                    remedy: Some(
                        "It goes on by itself when the URL answers; an outage of it fails no run. If it has moved, correct clone in \
                         [agents.NAME.workspace] and restart the workers"
                            .to_owned(),
                    ),
                });
            }
            format!(
                "Step {step} waits for {}, which has failed for {since}: {next}.{last}{calls}{end}",
                whose(provider)
            )
        }
        None if job.due_in_s > 0.0 => format!(
            "The calls of its model have failed for {}; step {step} is tried again in {}.{last}{calls}{end}",
            span(lasted),
            span(job.due_in_s)
        ),
        None => return None,
    };
    // `queue status` lists gates. While no gate is shut it shows nothing, and a scripted model has none.
    let list = match job.waits_for {
        Some(_) => " All models that fail: wakeful queue status",
        None => "",
    };
    let remedy = format!(
        "It goes on by itself when the provider answers. To answer meanwhile, give the agent another model ([agents.NAME] \
         fallback) and restart the workers.{list}"
    );
    Some(Finding { why, remedy: Some(remedy) })
}

/// Says in a few words what holds up a session's step, for lists: `job` is that of its summary, and `attempts` the limit of its
/// agent, if that is known.
pub(super) fn note(job: &Value, attempts: Option<i64>) -> Option<String> {
    let time = |key: &str| job[key].as_str().and_then(|at| at.parse::<DateTime<Utc>>().ok());
    let ahead = |at: DateTime<Utc>| span((at - Utc::now()).as_seconds_f64().max(0.0));
    if job["leased"] == true {
        return None;
    }
    if let Some(agent) = job["held_by"].as_str().and_then(|held| held.strip_prefix(LACKS)) {
        return Some(format!("waits for a worker that has agent {agent}"));
    }
    if let Some(pause) = job["held_by"].as_str() {
        let why = job["held_for"].as_str().map(|why| format!(": {why}")).unwrap_or_default();
        return Some(format!("paused ({}){why}", pause.replacen(':', " ", 1)));
    }
    if let Some(provider) = job["waits_for"].as_str() {
        let since = time("provider_down_since").map(|at| format!(" for {}", age(at))).unwrap_or_default();
        let next = time("next_probe_at").map(|at| format!(", next probe in {}", ahead(at)));
        return Some(format!("waits for {provider}, which has failed{since}{}", next.unwrap_or_default()));
    }
    let error = job["last_error"].as_str()?;
    let next = time("run_at").filter(|at| *at > Utc::now())?;
    // An outage has a limit of time, and not of attempts.
    let failed = match (job["outage_faults"].as_i64().filter(|faults| *faults > 0), attempts) {
        (Some(faults), _) => format!("{faults} failed"),
        (None, Some(limit)) => format!("{} of {limit}", job["stuck"].as_i64().unwrap_or(1)),
        (None, None) => format!("{} failed", job["stuck"].as_i64().unwrap_or(1)),
    };
    Some(format!("retrying, {failed}: {}, next in {}", error.trim_end_matches('.'), ahead(next)))
}

/// Explains a replay's job. Only the process of `wakeful replay` runs it, and that process is not in the list
/// of workers.
pub(super) fn of_replay(job: &JobView, session_id: &str) -> Finding {
    let step = job.step_number.unwrap_or(0);
    if job.leased && job.due_in_s > 0.0 {
        return Finding {
            why: format!(
                "A `wakeful replay` command ({}) is at step {step}. If it died, its lease ends in {}.",
                job.worker_id.as_deref().unwrap_or("an unknown process"),
                span(job.due_in_s)
            ),
            remedy: None,
        };
    }
    let last = job.last_error.as_deref().map(|error| format!(" The last attempt failed: {error}"));
    Finding {
        why: format!(
            "Step {step} waits for the `wakeful replay` command that started it; no other worker takes it.{}",
            last.unwrap_or_default()
        ),
        remedy: Some(format!(
            "If that command is over, run it again: it continues here. Or end the run:\nwakeful session cancel {session_id}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_note_says_what_a_step_waits_for() {
        let now = Utc::now();
        let at = |s: i64| (now + chrono::Duration::seconds(s)).to_rfc3339();
        let waits = json!({"leased": false, "waits_for": "openai/gpt-5", "provider_down_since": at(-185), "next_probe_at": at(9),
            "last_error": "x"});
        let note_of = |job: &Value| note(job, Some(8)).unwrap_or_default();
        assert!(
            note_of(&waits).starts_with("waits for openai/gpt-5, which has failed for 3m"),
            "{}",
            note_of(&waits)
        );
        assert!(note_of(&waits).contains("next probe in"), "{}", note_of(&waits));
        let retries =
            json!({"leased": false, "stuck": 3, "outage_faults": 0, "last_error": "503.", "run_at": at(9)});
        assert!(note_of(&retries).starts_with("retrying, 3 of 8: 503, next in"), "{}", note_of(&retries));
        let unknown = note(&retries, None).unwrap_or_default();
        assert!(unknown.starts_with("retrying, 3 failed: 503, next in"), "{unknown}");
        // An outage has a limit of time.
        let outage =
            json!({"leased": false, "stuck": 1, "outage_faults": 5, "last_error": "503", "run_at": at(9)});
        assert!(note_of(&outage).starts_with("retrying, 5 failed: 503, next in"), "{}", note_of(&outage));
        let lacks = json!({"leased": false, "held_by": "lacks:new", "run_at": at(300)});
        assert_eq!(note_of(&lacks), "waits for a worker that has agent new");
        assert_eq!(note(&json!({"leased": true, "last_error": "503", "run_at": at(9)}), None), None);
        assert_eq!(note(&json!({"leased": false, "last_error": null, "run_at": at(9)}), None), None);
    }
}
