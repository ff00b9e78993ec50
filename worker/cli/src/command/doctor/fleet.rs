//! The check of the worker processes, by their heartbeats.

use super::super::output::span;
use super::Report;
use std::time::Duration;
use wakeful_config::silent_after_s;
use wakeful_store::queue::WorkerView;

/// At most this many overdue workers are named.
const NAMED: usize = 3;

/// Reports which workers are alive, and returns them. A killed worker counts as alive at first, although the others take its
/// jobs within a second; so one whose heartbeat is overdue is named with the time since its last one.
pub(super) fn check<'a>(
    workers: &'a [WorkerView],
    heartbeat: Duration,
    report: &mut Report,
) -> Vec<&'a WorkerView> {
    let silent_after_s = silent_after_s(heartbeat);
    let (alive, silent): (Vec<&WorkerView>, Vec<&WorkerView>) =
        workers.iter().partition(|worker| worker.is_fresh(silent_after_s));
    if alive.is_empty() {
        let last =
            silent.first().map(|worker| format!("; the last beat was {} ago", span(worker.beat_age_s)));
        report.warning(
            "workers",
            format!("none is alive{}", last.unwrap_or_default()),
            "start one: wakeful serve --roles worker. Until then messages are accepted but not answered",
        );
        return alive;
    }
    let mut versions: Vec<&str> = alive.iter().map(|worker| worker.version.as_str()).collect();
    versions.sort_unstable();
    versions.dedup();
    let versions = versions.join(", ");
    let (held, gone): (Vec<&WorkerView>, Vec<&WorkerView>) =
        silent.iter().copied().partition(|worker| worker.state(silent_after_s) == "silent");
    let held = match held.len() {
        0 => String::new(),
        held => format!(", {held} silent with jobs"),
    };
    let gone = match gone.len() {
        0 => held,
        gone => format!("{held}, {gone} gone within a day"),
    };
    // A beat comes late under load, by no more than this.
    let late_s = (heartbeat.as_secs_f64() * 1.5).max(heartbeat.as_secs_f64() + 2.0);
    let (beating, overdue): (Vec<&WorkerView>, Vec<&WorkerView>) =
        alive.iter().copied().partition(|worker| worker.is_fresh(late_s));
    if overdue.is_empty() {
        report.ok("workers", format!("{} alive (version {versions}){gone}", alive.len()));
        return alive;
    }
    let mut named: Vec<String> = overdue
        .iter()
        .take(NAMED)
        .map(|worker| format!("{} silent for {}", worker.worker_id, span(worker.beat_age_s)))
        .collect();
    if overdue.len() > NAMED {
        named.push(format!("{} more", overdue.len() - NAMED));
    }
    report.warning(
        "workers",
        format!("{} alive (version {versions}){gone}; {}", beating.len(), named.join(", ")),
        match beating.len() {
            0 => "look at its log; if it died, start it again. Until then messages are accepted but not answered",
            _ => "look at its log; if it died, the others have its jobs, and you start it again",
        },
    );
    alive
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(name: &str, beat_age_s: f64) -> WorkerView {
        WorkerView {
            worker_id: name.into(),
            host: "host".into(),
            pid: 1,
            version: "0.1.0".into(),
            concurrency: 4,
            started_at: chrono::Utc::now(),
            beat_age_s,
            leases: 0,
            schema_number: None,
            agents: None,
            drain_asked_at: None,
            drain_asked_by: None,
        }
    }

    fn said(ages: &[f64]) -> String {
        let names = ["one", "two", "three", "four", "five"];
        let workers: Vec<WorkerView> = names.iter().zip(ages).map(|(name, age)| worker(name, *age)).collect();
        let mut report = Report::default();
        check(&workers, Duration::from_secs(10), &mut report);
        serde_json::to_value(&report.checks).expect("checks are JSON")[0].to_string()
    }

    #[test]
    fn a_worker_that_was_killed_a_moment_ago_does_not_count_as_alive() {
        assert!(said(&[1.0, 12.0]).contains("2 alive (version 0.1.0)\""), "{}", said(&[1.0, 12.0]));
        let killed = said(&[1.0, 18.2]);
        assert!(killed.contains("1 alive (version 0.1.0); two silent for 18s"), "{killed}");
        assert!(killed.contains("warning"), "{killed}");
        let many = said(&[20.0, 20.0, 20.0, 20.0, 40.0]);
        assert!(many.contains("0 alive (version 0.1.0), 1 gone within a day; one silent"), "{many}");
        assert!(many.contains("three silent for 20s, 1 more"), "{many}");
        let held = [worker("one", 1.0), WorkerView { leases: 2, ..worker("two", 40.0) }];
        let mut report = Report::default();
        check(&held, Duration::from_secs(10), &mut report);
        let told = serde_json::to_value(&report.checks).expect("checks are JSON")[0].to_string();
        assert!(told.contains("1 alive (version 0.1.0), 1 silent with jobs\""), "{told}");
        assert!(said(&[31.0]).contains("none is alive; the last beat was 31s ago"), "{}", said(&[31.0]));
    }
}
