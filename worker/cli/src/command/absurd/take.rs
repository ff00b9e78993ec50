//! `wakeful absurd take`: parks the open tasks of one name in Absurd, and goes on with them here.

use super::super::output::count;
use super::import::{Importer, Report, sources};
use super::progress::Progress;
use super::{Desk, Exit, Shapes};
use serde::Serialize;
use std::fmt::Write as _;
use std::time::{Duration, Instant};
use wakeful_store::Store;
use wakeful_store::absurd::{May, Source, Wanted};
use wakeful_store::wake::NewMessage;
use wakeful_workflow::absurd::TRIGGER_PREFIX;

/// Runs that are parked in one transaction.
const BATCH: i64 = 50;
/// Pause between two looks at running tasks.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The name of the tasks.
    name: String,
    /// How long to wait for tasks that a worker of Absurd runs at this moment.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    wait: u64,
}

#[derive(Debug, Default, Serialize)]
struct Taken {
    #[serde(flatten)]
    report: Report,
    /// Still running in Absurd when the time was over.
    left_running: i64,
    /// Events that were emitted in Absurd after their task was taken, and passed on.
    events: i64,
}

pub(super) async fn take(desk: &Desk<'_>, args: &Args) -> anyhow::Result<Exit> {
    let store = desk.store(2).await?;
    let mut parker = desk.source(May::Park).await?;
    let queue = desk.one_queue(&mut parker).await?;
    let mut sources = sources(desk, 2).await?;
    let counts = parker.counts(&queue).await?;
    let total: i64 = counts
        .iter()
        .filter(|count| count.name == args.name && !count.state.is_over())
        .map(|count| count.tasks)
        .sum();
    let progress = Progress::new("taking", total.unsigned_abs());
    let importer = Importer { desk, store: &store, stopped: false, progress: &progress, limit: None };
    let mut shapes = Shapes::new(desk, &queue);
    let mut taken = Taken::default();
    let until = Instant::now() + Duration::from_secs(args.wait);
    loop {
        let parked = parker.park(&queue, &args.name, BATCH).await?;
        wakeful_store::failpoint!("K76");
        // Also those that an interrupted `take` has left parked.
        parked_ones(&importer, &mut sources, &queue, &args.name, &mut shapes, &mut taken.report).await?;
        if parked.task_ids.len() as i64 == BATCH {
            continue;
        }
        taken.left_running = parked.running;
        if parked.running == 0 || Instant::now() >= until {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    taken.events = pass_on(&store, &mut parker, desk.space(), &queue, &args.name).await?;
    taken.report.seconds = progress.end().as_secs_f64();
    store.close().await;
    desk.output.one(&taken, || text(desk, &taken))?;
    let all = taken.left_running == 0 && taken.report.cannot_come.tasks() == 0;
    Ok(if all { Exit::Ok } else { Exit::Failed })
}

async fn parked_ones(
    importer: &Importer<'_>,
    sources: &mut [Source],
    queue: &str,
    name: &str,
    shapes: &mut Shapes<'_>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let names = [name.to_owned()];
    let mut after = None::<String>;
    let before = report.already;
    loop {
        let Some(first) = sources.first_mut() else { return Ok(()) };
        let wanted = Wanted { names: &names, after: after.as_deref(), limit: 200, parked: true };
        let page = first.tasks(queue, &wanted).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.task_id.clone());
        report.cannot_come = super::Reasons::default();
        importer.page(sources, queue, page, shapes, report).await?;
    }
    // Each round meets those of the rounds before.
    report.already = before;
    Ok(())
}

/// An event that Absurd got after its task was taken wakes nothing there. Its payload answers the session's question here.
async fn pass_on(
    store: &Store,
    source: &mut Source,
    space: &str,
    queue: &str,
    name: &str,
) -> anyhow::Result<i64> {
    let trigger = format!("{TRIGGER_PREFIX}{queue}");
    let (mut after, mut passed) = (String::new(), 0);
    loop {
        let rows = store.absurd_taken(space, &trigger, name, &after, 200).await?;
        let Some(last) = rows.last() else { return Ok(passed) };
        after.clone_from(&last.task_id);
        let ids: Vec<String> = rows.iter().map(|row| row.task_id.clone()).collect();
        for (task_id, event, payload) in source.emitted(queue, &ids).await? {
            let Some(row) = rows.iter().find(|row| row.task_id == task_id && row.phase == "here") else {
                continue;
            };
            let text = match serde_json::from_str(&payload) {
                Ok(serde_json::Value::String(text)) => text,
                Ok(_) | Err(_) => payload,
            };
            let message = NewMessage {
                client_key: Some(format!("absurd-event:{event}")),
                text,
                sender: None,
                trace_context: None,
                attachments: Vec::new(),
            };
            let woken = store.send(&row.session_id, &message).await?;
            passed += i64::from(!woken.duplicate);
        }
    }
}

fn text(desk: &Desk<'_>, taken: &Taken) -> String {
    let statuses: Vec<String> =
        taken.report.by_status.iter().map(|(status, tasks)| format!("{tasks} {status}")).collect();
    let of = if statuses.is_empty() { String::new() } else { format!(" ({})", statuses.join(", ")) };
    let mut text = format!("{} taken{of}\n", count(taken.report.imported, "task"));
    if taken.events > 0 {
        let _ = writeln!(
            text,
            "{} passed on that came after their tasks were taken",
            count(taken.events, "event")
        );
    }
    if taken.left_running > 0 {
        let _ = writeln!(
            text,
            "{} still running in Absurd: run the same command again, or wait longer with --wait",
            count(taken.left_running, "task")
        );
    }
    if taken.report.cannot_come.tasks() > 0 {
        text.push_str("parked, and cannot come (`wakeful absurd back` gives them back):\n");
        text.push_str(&taken.report.cannot_come.text(&desk.output));
    }
    text
}
