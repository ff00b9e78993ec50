//! `wakeful session why`: explains why a session does not move, and what to do about it.

use super::super::delivery::{remedy, waits_for};
use super::super::output::{Cell, Column, Output, Table, Tone, age, capital, count, printable, span};
use super::Exit;
use super::effects::{attention, awaits_approval, of_calls, of_failed_calls, quoted};
pub(in crate::command) use super::effects::{decide_call, resolve_call, resolve_delivery};
use super::job::{Finding, Surroundings, of_lacked_agent, of_outage, of_pause, of_replay};
use super::show::header;
use super::unheard::{loop_finding, missed};
use serde_json::json;
use std::fmt::Write as _;
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::event::JournalEntry;
use wakeful_store::session::SessionSummary;
use wakeful_store::standing::{JobView, Standing};
use wakeful_workflow::session::SessionStatus;

/// A ready job that waits longer than this gets a remedy.
const WAIT_S: f64 = 5.0;
/// A running step that has written nothing for longer than this looks suspicious.
const QUIET_S: f64 = 600.0;

pub(super) async fn why(store: &Store, config: &Config, output: &Output, id: &str) -> anyhow::Result<Exit> {
    let standing = store.standing(None, id).await?;
    let silent_after_s = config.queue.heartbeat.as_secs_f64() * 3.0;
    let workers = store.workers().await?;
    let agent = config.agent(&standing.session.agent).ok();
    let limits = agent.as_ref().map(|agent| agent.limits);
    let model = agent.as_ref().map_or(standing.session.model_id.as_str(), |agent| agent.model.as_str());
    let provider = match model.split_once('/') {
        Some(("anthropic", _)) => Some(&config.providers.anthropic),
        Some(("openai", _)) => Some(&config.providers.openai),
        _ => None,
    };
    let around = Surroundings {
        workers_alive: workers.iter().filter(|worker| worker.is_fresh(silent_after_s)).count(),
        workers_with_agent: workers
            .iter()
            .filter(|worker| worker.is_fresh(silent_after_s))
            .filter(|worker| worker.has_agent(&standing.session.agent, &standing.session.space_id))
            .count(),
        silent_after_s,
        attempts: limits.map(|limits| limits.attempts),
        outage_s: limits.map(|limits| limits.outage_ms as f64 / 1000.0),
        tool_s: limits.map(|limits| limits.tool_s),
        call_s: provider.map(|provider| (provider.idle_s, provider.total_s)),
        model,
    };
    let mut findings = explain(&standing, around);
    if standing.session.status == SessionStatus::Cancelled.as_str() {
        let who = cancelled_by(store, &standing.session.session_id).await?;
        findings[0].why = format!("Its run was cancelled{who}. It is not retried.");
    }
    let (id, space) = (&standing.session.session_id, &standing.session.space_id);
    findings.extend(store.loop_suspicion(id).await?.into_iter().map(|reason| loop_finding(reason, space)));
    output
        .one(&json!({"findings": findings, "standing": standing}), || text(&standing, &findings, output))?;
    Ok(Exit::Ok)
}

/// Says who cancelled the newest run and why, as the end of the journal has it.
async fn cancelled_by(store: &Store, session_id: &str) -> anyhow::Result<String> {
    const ENTRIES: i64 = 50;
    let newest = store.newest(&[session_id.to_owned()]).await?;
    let after = newest.iter().map(|(_, newest)| newest.seq - ENTRIES).max().unwrap_or(0).max(0);
    let entries = store.journal(session_id, after, ENTRIES).await?;
    let steered =
        |entry: &&JournalEntry| entry.kind == "SESSION_STEERED" && entry.payload["verb"] == "cancel";
    let Some(cancel) = entries.iter().rev().find(steered) else { return Ok(String::new()) };
    let said = |key: &str| cancel.payload[key].as_str().map(|text| text.trim_end_matches('.'));
    let by = said("by").map(|by| format!(" by {by}")).unwrap_or_default();
    Ok(by + &said("reason").map(|why| format!(": {why}")).unwrap_or_default())
}

fn text(standing: &Standing, findings: &[Finding], output: &Output) -> String {
    let mut text = header(&standing.session, output);
    let _ = writeln!(text, "\n{}", output.paint(Tone::Head, "Why"));
    for finding in findings {
        text.push_str(&output.block(&finding.why, 2));
        if let Some(remedy) = &finding.remedy {
            let _ = writeln!(text, "    {}", output.paint(Tone::Busy, "Remedy:"));
            text.push_str(&output.block(remedy, 6));
        }
    }
    let facts = facts(standing);
    if !facts.is_empty() {
        let _ = writeln!(text, "\n{}", output.paint(Tone::Head, "Rows"));
        text.push_str(&output.aligned(&facts, 2));
    }
    text
}

/// Explains the session's state: the main reason first, then everything else that is open.
pub(super) fn explain(standing: &Standing, around: Surroundings<'_>) -> Vec<Finding> {
    let session = &standing.session;
    let id = &session.session_id;
    let status = SessionStatus::parse(&session.status);
    // An unsent reply or question is the main reason if the run is over or waits for its user.
    let said = matches!(status, Some(SessionStatus::Completed | SessionStatus::WaitingInput));
    let unheard = said && standing.unsent.iter().any(|delivery| !delivery.imported);
    let deliveries = of_deliveries(standing, around);
    let (mut findings, after) = if unheard { (deliveries, Vec::new()) } else { (Vec::new(), deliveries) };
    let mut find = |why: String, remedy: Option<String>| findings.push(Finding { why, remedy });
    match status {
        Some(SessionStatus::Queued | SessionStatus::Running) => {
            if let Some(behind) = &standing.behind {
                let holder = &behind.session_id;
                find(
                    format!(
                        "It waits for session {holder}: a conversation has one open run at a time, and {} is not over.",
                        behind.run_id
                    ),
                    Some(format!("Look at that one:\nwakeful session why {holder}")),
                );
            } else {
                let job = standing.jobs.iter().find(|job| job.kind == "step");
                let finding = job.map_or_else(|| no_job(id), |job| of_job(job, standing, around));
                find(finding.why, finding.remedy);
            }
        }
        Some(SessionStatus::WaitingInput) => {
            let question = session.question.as_deref().unwrap_or("(its text could not be read)");
            find(
                format!("It has asked its user a question and waits for the answer: {question}"),
                Some(format!(
                    "Answer it:\nwakeful session send {id} 'TEXT'\nOr end the run:\nwakeful session cancel {id}"
                )),
            );
        }
        // Each of these calls has a finding below.
        Some(SessionStatus::NeedsAttention) if awaits_approval(standing) => {}
        Some(SessionStatus::NeedsAttention) if error_of(standing).1.is_some() => {
            let (error, remedy) = error_of(standing);
            find(
                format!("It waits for an operator: {error}."),
                remedy.map(|remedy| {
                    format!(
                        "{remedy}:\nwakeful session retry {id}\nOr end the run:\nwakeful session cancel {id}"
                    )
                }),
            );
        }
        Some(SessionStatus::NeedsAttention) => find(
            format!("It waits for an operator: {}.", error_of(standing).0),
            Some(format!(
                "{}:\nwakeful session retry {id}\nOr end the run:\nwakeful session cancel {id}",
                attention(standing)
            )),
        ),
        // A replay continues only through its own command; `session retry` is refused.
        Some(SessionStatus::Failed) if session.trigger_type == "replay" => {
            let (error, remedy) = error_of(standing);
            let mend = remedy.map(|remedy| format!("{remedy}. ")).unwrap_or_default();
            find(
                format!("It is a replay, and its run failed: {error}."),
                Some(format!(
                    "{mend}Run the replay command again, which starts another one; or archive this one:\n\
                     wakeful session archive {id}"
                )),
            );
        }
        Some(SessionStatus::Cancelled) => find(
            "Its run was cancelled, and is not retried.".to_owned(),
            Some(format!("To go on after all, say so:\nwakeful session send {id} 'TEXT'")),
        ),
        Some(SessionStatus::Failed) => {
            let (error, remedy) = error_of(standing);
            let remedy = remedy.unwrap_or_else(|| "Mend the cause, then".to_owned());
            let retry = format!("wakeful session retry {id}");
            // Another way than a retry gets a command of its own.
            let remedy = match remedy.split_once(ANEW) {
                Some((remedy, _)) => {
                    format!(
                        "{remedy}:\n{retry}\nOr begin anew:\nwakeful session new {}",
                        conversation_of(session)
                    )
                }
                None => format!("{remedy}:\n{retry}"),
            };
            find(format!("Its run failed: {error}."), Some(remedy));
        }
        Some(SessionStatus::Completed) if unheard => find("Its run is complete.".to_owned(), None),
        Some(SessionStatus::Completed) => find("Nothing holds it up: its run is complete.".to_owned(), None),
        Some(SessionStatus::Created) => find(
            "It has never run: it has no message yet.".to_owned(),
            Some(format!("wakeful session send {id} 'TEXT'")),
        ),
        Some(SessionStatus::Archived | SessionStatus::Terminated) => {
            find(format!("It is {}: it takes no messages and never runs again.", session.status), None);
        }
        None => find(
            format!("Its status {:?} is not one that this binary knows.", session.status),
            Some("Use the newer binary.".to_owned()),
        ),
    }
    if session.cancel_requested {
        find(
            "A cancel is asked for: the next worker that takes its step ends the run, without another model call."
                .to_owned(),
            None,
        );
    }
    let open = status.is_some_and(SessionStatus::is_open);
    let pending = standing.pending_messages;
    if pending > 0 {
        let wait = if pending == 1 { "waits" } else { "wait" };
        let until = if open { "for the next step boundary" } else { "in its inbox until the run goes on" };
        find(format!("{} {wait} {until}.", count(pending, "message")), None);
    }
    findings.extend(of_calls(standing));
    findings.extend(of_failed_calls(standing));
    findings.extend(after);
    findings
}

/// What a remedy says of another way than a retry.
const ANEW: &str = ". Or begin anew: ";

/// The session's conversation as an argument of a command.
fn conversation_of(session: &SessionSummary) -> String {
    let conversation = quoted(&printable(&session.conversation_id));
    match session.space_id.as_str() {
        "default" => conversation,
        space => format!("{conversation} --space {}", printable(space)),
    }
}

/// Splits the session's error into its text without the full stop, and the remedy in it.
fn error_of(standing: &Standing) -> (String, Option<String>) {
    let error = standing.session.error.as_deref().unwrap_or("no reason was recorded");
    match error.split_once(". Remedy: ") {
        Some((error, remedy)) => (error.to_owned(), Some(capital(remedy.trim_end_matches('.')))),
        None => (error.trim_end_matches('.').to_owned(), None),
    }
}

fn no_job(session_id: &str) -> Finding {
    Finding {
        why: "Its run is open and has no job, so nothing will continue it.".to_owned(),
        remedy: Some(
            "A worker heals it within half a minute, or at once:\nwakeful session wake {id}\nThe output of that command says what was wrong. Unless someone deleted a row by hand, this is a defect of Wakeful; please report it."
                .replace("{id}", session_id),
        ),
    }
}

fn of_job(job: &JobView, standing: &Standing, around: Surroundings<'_>) -> Finding {
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
    let step = job.step_number.unwrap_or(0);
    let calls: Vec<String> = standing
        .open_calls
        .iter()
        .filter(|call| !call.told && !matches!(call.status.as_str(), "uncertain" | "unapproved"))
        .map(|call| format!("{} ({})", call.name, call.call_id))
        .collect();
    let tried = match around.attempts {
        _ if job.died > 0 => format!(
            " {} at this step, most likely while it {}; at 5 deaths the run fails.",
            if job.died == 1 { "A worker died".to_owned() } else { format!("{} workers died", job.died) },
            if calls.is_empty() {
                "called its model".to_owned()
            } else {
                format!("ran {}", calls.join(", "))
            }
        ),
        Some(limit) if job.stuck > 1 => {
            format!(" Attempts without progress: {}; at {limit} the run fails.", job.stuck)
        }
        Some(_) | None if job.stuck > 1 => format!(" Attempts without progress: {}.", job.stuck),
        Some(_) | None => String::new(),
    };
    let last = job
        .last_error
        .as_deref()
        .map(|error| format!(" The last attempt failed: {}.", error.trim_end_matches('.')));
    let last = match job.fault_s.filter(|_| job.faults > 0) {
        Some(lasted) => format!(
            "{} The database has failed it {} within {}.",
            last.unwrap_or_default(),
            count(job.faults.into(), "time"),
            span(lasted)
        ),
        None => last.unwrap_or_default(),
    };
    let none_alive = || {
        "No worker is alive. Start one:\nwakeful serve --roles worker\nThen look:\nwakeful queue status"
            .to_owned()
    };
    let worker = job.worker_id.as_deref().unwrap_or("an unknown worker");
    let (why, remedy) = match (job.leased, job.due_in_s > 0.0) {
        (true, true) => match job.worker_beat_age_s {
            Some(beat) if beat < around.silent_after_s => {
                // A pure call stays `invoked` while it runs. While a call has no result, the model is not asked.
                let running: Vec<String> = standing
                    .open_calls
                    .iter()
                    .filter(|call| {
                        call.status == "started"
                            || call.status == "invoked" && call.effect == "pure" && !call.told
                    })
                    .map(|call| format!("{} ({})", call.name, call.call_id))
                    .collect();
                let doing = if job.faults > 0 {
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
                    format!(
                        "most likely it waits for the model {}{}",
                        printable(around.model),
                        limit.unwrap_or_default()
                    )
                } else {
                    let limit =
                        around.tool_s.map(|limit| format!("; the call fails after {}", span(limit as f64)));
                    format!("it runs {}{}", running.join(", "), limit.unwrap_or_default())
                };
                let quiet = standing.quiet_s.unwrap_or(0.0);
                let odd = (quiet > QUIET_S).then(|| {
                    format!(
                        "Nothing was written for {}. If that is too long:\nwakeful session cancel {}",
                        span(quiet),
                        standing.session.session_id
                    )
                });
                (
                    format!(
                        "Worker {worker} is at step {step} and alive (heartbeat {} ago); {doing}.{last}{tried}",
                        span(beat)
                    ),
                    odd,
                )
            }
            beat => {
                let silent = beat.map_or_else(
                    || "has no heartbeat".to_owned(),
                    |beat| format!("is silent for {}", span(beat)),
                );
                let remedy = (around.workers_alive == 0).then(none_alive);
                (
                    format!(
                        "Worker {worker} took step {step} and {silent}: it is dead or stopped. Its lease ends in {}; then \
                         another worker goes on from the last commit.{last}{tried}",
                        span(job.due_in_s)
                    ),
                    remedy,
                )
            }
        },
        (false, true) => (
            format!("Step {step} failed and is tried again in {}.{last}{tried}", span(job.due_in_s)),
            Some("Wait if the cause is temporary; otherwise fix it.".to_owned()),
        ),
        (_, false) => {
            let waited = -job.due_in_s;
            let dropped = if job.leased {
                format!(" Worker {worker} had it and never gave it back: it died, or lost its connection.")
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
            (
                format!(
                    "Step {step} is ready for {} and no worker has taken it.{dropped}{suspect}{last}{tried}",
                    span(waited)
                ),
                remedy,
            )
        }
    };
    Finding { why, remedy }
}

fn of_deliveries(standing: &Standing, around: Surroundings<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for delivery in &standing.unsent {
        findings.extend(missed(delivery));
        if delivery.status == "sent" {
            continue;
        }
        let (id, channel) = (&delivery.delivery_id, &delivery.channel);
        let error = delivery.last_error.as_deref().map(|error| format!(": {}", error.trim_end_matches('.')));
        let error = error.unwrap_or_default();
        let mut remedy = remedy(delivery);
        let why = match delivery.status.as_str() {
            "failed" => format!("A message by {channel} was not sent ({id}){error}."),
            "expired" => {
                format!("A message by {channel} was too late and will not be sent by itself ({id}){error}.")
            }
            "uncertain" => format!("It is not known whether a message by {channel} was sent ({id}){error}."),
            _ => {
                if around.workers_alive == 0 {
                    let start = "No worker is alive. Start one:\nwakeful serve --roles worker";
                    remedy.get_or_insert_with(|| start.to_owned());
                }
                let tried = delivery.tried_since.map(|since| {
                    format!(", tried for {} ({})", age(since), count(delivery.attempt.into(), "attempt"))
                });
                let tried = tried.unwrap_or_default();
                format!(
                    "A message by {channel} is not sent yet ({id}){tried}: {}{error}.",
                    waits_for(delivery)
                )
            }
        };
        findings.push(Finding { why, remedy });
    }
    findings
}

/// Formats the rows that the explanation is based on.
fn facts(standing: &Standing) -> Table {
    let mut table = Table::new(&[Column::fixed(""), Column::fixed(""), Column::flexible("")]).wrapped();
    let mut fact = |kind: &str, status: Cell, about: String| {
        table.row([Cell::new(kind, Tone::Faint), status, about.into()]);
    };
    if let Some(run) = &standing.run {
        let steps = format!("{}, {}", run.run_id, count(run.steps, "step"));
        fact("run", Cell::status(&run.status), steps);
    }
    for job in &standing.jobs {
        // A held job's next look is not the end of its pause. The reason above has that.
        let held = job.held.is_some() || job.lacks_agent.is_some();
        let status = match (job.leased, job.due_in_s > 0.0) {
            (true, true) => "leased",
            (false, true) if held => "held",
            (false, true) => "delayed",
            (_, false) => "ready",
        };
        let what = match (&job.channel, job.step_number) {
            (Some(channel), _) => format!("by {channel}"),
            (None, Some(step)) => format!("step {step}"),
            (None, None) => String::new(),
        };
        let due = match status {
            "leased" => {
                format!("by {} for another {}", job.worker_id.as_deref().unwrap_or("?"), span(job.due_in_s))
            }
            "delayed" => format!("for another {}", span(job.due_in_s)),
            "held" if job.held.is_some() => "by the pause".to_owned(),
            "held" => "until a worker has its agent".to_owned(),
            _ => format!("for {}", span(job.due_in_s)),
        };
        let about = format!("{what}, {due}, attempt {}, stuck {}", job.attempt, job.stuck);
        fact(&format!("{} job", printable(&job.kind)), status.into(), about);
    }
    for call in &standing.open_calls {
        let about = format!("{} ({}), {}", call.name, call.call_id, call.effect);
        fact("call", Cell::status(&call.status), about);
    }
    for delivery in &standing.unsent {
        let about = format!("{} by {}, tried {}×", delivery.delivery_id, delivery.channel, delivery.attempt);
        fact("delivery", Cell::status(&delivery.status), about);
    }
    if let Some(quiet) = standing.quiet_s {
        fact("journal", "".into(), format!("last entry {} ago", span(quiet)));
    }
    table
}

#[cfg(test)]
#[path = "why_tests.rs"]
mod tests;
