//! `wakeful session why`: explains why a session does not move, and what to do about it.

mod status;
mod step;

use super::super::delivery::{remedy, waits_for};
use super::super::output::{Cell, Column, Output, Table, Tone, age, count, printable, span};
use super::Exit;
pub(in crate::command) use super::effects::{decide_call, resolve_call, resolve_delivery};
use super::effects::{of_calls, of_failed_calls};
use super::job::{Finding, Surroundings};
use super::show::header;
use super::unheard::{loop_finding, missed};
use serde_json::json;
use status::of_status;
use std::fmt::Write as _;
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::event::JournalEntry;
use wakeful_store::standing::Standing;
use wakeful_workflow::session::SessionStatus;

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
    let status = SessionStatus::parse(&session.status);
    // An unsent reply or question is the main reason if the run is over or waits for its user.
    let said = matches!(status, Some(SessionStatus::Completed | SessionStatus::WaitingInput));
    let unheard = said && standing.unsent.iter().any(|delivery| !delivery.imported);
    let deliveries = of_deliveries(standing, around);
    let (mut findings, after) = if unheard { (deliveries, Vec::new()) } else { (Vec::new(), deliveries) };
    findings.extend(of_status(standing, status, unheard, around));
    if session.cancel_requested {
        findings.push(Finding {
            why: "A cancel is asked for: the next worker that takes its step ends the run, without another model call."
                .to_owned(),
            remedy: None,
        });
    }
    let open = status.is_some_and(SessionStatus::is_open);
    let pending = standing.pending_messages;
    if pending > 0 {
        let wait = if pending == 1 { "waits" } else { "wait" };
        let until = if open { "for the next step boundary" } else { "in its inbox until the run goes on" };
        findings
            .push(Finding { why: format!("{} {wait} {until}.", count(pending, "message")), remedy: None });
    }
    findings.extend(of_calls(standing));
    findings.extend(of_failed_calls(standing));
    findings.extend(after);
    findings
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
