//! What `session why` says of the step of a run that is open.

use super::super::job::{Finding, Surroundings, of_lacked_agent, of_outage, of_pause, of_replay};
use crate::command::output::{count, printable, span};
use wakeful_store::standing::{JobView, OpenCall, Standing};

/// A ready job that waits longer than this gets a remedy.
const WAIT_S: f64 = 5.0;
/// A running step that has written nothing for longer than this looks suspicious.
const QUIET_S: f64 = 600.0;

/// Explains the step by its job.
pub(super) fn of_step(job: &JobView, standing: &Standing, around: Surroundings<'_>) -> Finding {
    if standing.session.trigger_type == "replay" {
        return of_replay(job, &standing.session.session_id);
    }
    if let Some(finding) = of_pause(job) {
        return finding;
    }
    if let Some(mut finding) = of_lacked_agent(job, around) {
        finding.remedy = finding.remedy.map(|text| text.replace("{id}", &standing.session.session_id));
        return finding;
    }
    if let Some(finding) = of_outage(job, around) {
        return finding;
    }
    let before = format!("{}{}", last_error(job), tries(job, standing, around));
    match (job.leased, job.due_in_s > 0.0) {
        (true, true) => match job.worker_beat_age_s {
            Some(beat) if beat < around.silent_after_s => at_work(job, standing, around, beat, &before),
            beat => without_sign(job, around, beat, &before),
        },
        (false, true) => Finding {
            why: format!("Step {} failed and is tried again in {}.{before}", number(job), span(job.due_in_s)),
            remedy: Some("Wait if the cause is temporary; otherwise fix it.".to_owned()),
        },
        (_, false) => ready(job, around, &before),
    }
}

fn number(job: &JobView) -> i64 {
    job.step_number.unwrap_or(0)
}

fn worker(job: &JobView) -> &str {
    job.worker_id.as_deref().unwrap_or("an unknown worker")
}

fn named(call: &OpenCall) -> String {
    format!("{} ({})", call.name, call.call_id)
}

/// The calls that the step runs, or is about to run.
fn calls(standing: &Standing) -> Vec<String> {
    standing
        .open_calls
        .iter()
        .filter(|call| !call.told && !matches!(call.status.as_str(), "uncertain" | "unapproved"))
        .map(named)
        .collect()
}

/// How the last attempt failed, and since when the database has failed the step. Empty: neither has.
fn last_error(job: &JobView) -> String {
    let last = job
        .last_error
        .as_deref()
        .map(|error| format!(" The last attempt failed: {}.", error.trim_end_matches('.')));
    match job.fault_s.filter(|_| job.faults > 0) {
        Some(lasted) => format!(
            "{} The database has failed it {} within {}.",
            last.unwrap_or_default(),
            count(job.faults.into(), "time"),
            span(lasted)
        ),
        None => last.unwrap_or_default(),
    }
}

/// How often the step was tried without progress. Empty: this is its first try.
fn tries(job: &JobView, standing: &Standing, around: Surroundings<'_>) -> String {
    match around.attempts {
        _ if job.died > 0 => {
            let calls = calls(standing);
            format!(
                " {} at this step, most likely while it {}; at 5 deaths the run fails.",
                if job.died == 1 { "A worker died".to_owned() } else { format!("{} workers died", job.died) },
                if calls.is_empty() {
                    "called its model".to_owned()
                } else {
                    format!("ran {}", calls.join(", "))
                }
            )
        }
        Some(limit) if job.stuck > 1 => {
            format!(" Attempts without progress: {}; at {limit} the run fails.", job.stuck)
        }
        Some(_) | None if job.stuck > 1 => format!(" Attempts without progress: {}.", job.stuck),
        Some(_) | None => String::new(),
    }
}

/// A worker holds the step and is alive: its last heartbeat was `beat` seconds ago. `before` says what came before.
fn at_work(job: &JobView, standing: &Standing, around: Surroundings<'_>, beat: f64, before: &str) -> Finding {
    let quiet = standing.quiet_s.unwrap_or(0.0);
    let odd = (quiet > QUIET_S).then(|| {
        format!(
            "Nothing was written for {}. If that is too long:\nwakeful session cancel {}",
            span(quiet),
            standing.session.session_id
        )
    });
    Finding {
        why: format!(
            "Worker {} is at step {} and alive (heartbeat {} ago); {}.{before}",
            worker(job),
            number(job),
            span(beat),
            doing(job, standing, around)
        ),
        remedy: odd,
    }
}

/// What a worker that is alive does at the step.
fn doing(job: &JobView, standing: &Standing, around: Surroundings<'_>) -> String {
    // A pure call stays `invoked` while it runs. While a call has no result, the model is not asked.
    let running: Vec<String> = standing
        .open_calls
        .iter()
        .filter(|call| {
            call.status == "started" || call.status == "invoked" && call.effect == "pure" && !call.told
        })
        .map(named)
        .collect();
    let calls = calls(standing);
    if job.faults > 0 {
        "the database fails it".to_owned()
    } else if running.is_empty() && !calls.is_empty() {
        format!("it is about to run {}", calls.join(", "))
    } else if running.is_empty() {
        let limit = around.call_s.map(|(idle_s, total_s)| {
            format!(
                "; the call fails after {} without a word, or after {} in all",
                span(idle_s as f64),
                span(total_s as f64)
            )
        });
        format!("most likely it waits for the model {}{}", printable(around.model), limit.unwrap_or_default())
    } else {
        let limit = around.tool_s.map(|limit| format!("; the call fails after {}", span(limit as f64)));
        format!("it runs {}{}", running.join(", "), limit.unwrap_or_default())
    }
}

/// A worker holds the step and gives no sign of life. `beat`: how many seconds ago its last heartbeat was, if it has one.
fn without_sign(job: &JobView, around: Surroundings<'_>, beat: Option<f64>, before: &str) -> Finding {
    let silent =
        beat.map_or_else(|| "has no heartbeat".to_owned(), |beat| format!("is silent for {}", span(beat)));
    Finding {
        why: format!(
            "Worker {} took step {} and {silent}: it is dead or stopped. Its lease ends in {}; then \
             another worker goes on from the last commit.{before}",
            worker(job),
            number(job),
            span(job.due_in_s)
        ),
        remedy: (around.workers_alive == 0).then(none_alive),
    }
}

/// A worker may take the step, and none has.
fn ready(job: &JobView, around: Surroundings<'_>, before: &str) -> Finding {
    let waited = -job.due_in_s;
    let dropped = if job.leased {
        format!(" Worker {} had it and never gave it back: it died, or lost its connection.", worker(job))
    } else {
        String::new()
    };
    // The queue hands out a job that workers dropped twice only to a worker that runs no other such
    // job, to protect the others.
    let suspect = if job.leased && job.stuck >= 2 {
        " Workers have dropped it before, so it waits for one that has no other such step."
    } else {
        ""
    };
    let remedy = match around.workers_alive {
        0 => Some(none_alive()),
        _ if waited > WAIT_S => Some(
            "The workers that are alive have no free slot, or cannot reach the database. Look which:\nwakeful queue \
             status\nAgainst full slots, more workers help, or a higher [queue] concurrency."
                .to_owned(),
        ),
        _ => None,
    };
    Finding {
        why: format!(
            "Step {} is ready for {} and no worker has taken it.{dropped}{suspect}{before}",
            number(job),
            span(waited)
        ),
        remedy,
    }
}

fn none_alive() -> String {
    "No worker is alive. Start one:\nwakeful serve --roles worker\nThen look:\nwakeful queue status"
        .to_owned()
}
