//! `wakeful absurd scan`: says which tasks can come, which cannot, and why. Writes nothing.

use super::super::output::{Cell, Column, Table, Tone, count};
use super::progress::Progress;
use super::{Desk, Exit, Reasons, Shapes};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use wakeful_store::absurd::{Count, May, Queue, Source, Wanted};
use wakeful_workflow::absurd::TaskState;

/// Tasks that are listed at a time.
const PAGE: i64 = 200;
/// An import also writes what a scan only reads.
const WRITES: f64 = 3.0;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Read at most this many tasks of each name. Default: all of them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    sample: Option<i64>,
}

/// What a scan found.
#[derive(Debug, Serialize)]
struct Scan {
    schema: &'static str,
    version: String,
    queues: Vec<ScannedQueue>,
    /// Tasks that were read, and how long that took.
    read: i64,
    read_seconds: f64,
    /// About how long an import takes.
    import_seconds: f64,
}

#[derive(Debug, Serialize)]
struct ScannedQueue {
    #[serde(flatten)]
    queue: Queue,
    names: Vec<Name>,
}

/// The tasks of one name.
#[derive(Debug, Default, Serialize)]
struct Name {
    name: String,
    tasks: i64,
    states: BTreeMap<&'static str, i64>,
    parked: i64,
    /// How its checkpoints are read; `null`: nothing fits.
    shape: Option<&'static str>,
    read: i64,
    can_come: i64,
    messages: i64,
    cannot_come: Reasons,
    /// Fields of the steps' results that do not come along.
    left_out: BTreeSet<String>,
}

pub(super) async fn scan(desk: &Desk<'_>, args: &Args) -> anyhow::Result<Exit> {
    let mut source = desk.source(May::Read).await?;
    let wanted = desk.queues(&mut source).await?;
    let queues: Vec<Queue> =
        source.queues().await?.into_iter().filter(|queue| wanted.contains(&queue.name)).collect();
    let mut counted = Vec::new();
    for queue in &queues {
        counted.push(source.counts(&queue.name).await?);
    }
    let total: i64 = counted.iter().flatten().map(|count| count.tasks).sum();
    let progress = Progress::new("scanning", total.unsigned_abs());
    let mut scanned = Vec::new();
    for (queue, counts) in queues.into_iter().zip(&counted) {
        let names = names(desk, &mut source, &queue.name, counts, args.sample, &progress).await?;
        scanned.push(ScannedQueue { queue, names });
    }
    let took = progress.end().as_secs_f64();
    let read: i64 = scanned.iter().flat_map(|queue| &queue.names).map(|name| name.read).sum();
    let scan = Scan {
        schema: source.schema(),
        version: source.version().to_owned(),
        queues: scanned,
        read,
        read_seconds: took,
        import_seconds: took * WRITES * total as f64 / read.max(1) as f64,
    };
    desk.output.one(&scan, || text(desk, &scan))?;
    Ok(Exit::Ok)
}

async fn names(
    desk: &Desk<'_>,
    source: &mut Source,
    queue: &str,
    counts: &[Count],
    sample: Option<i64>,
    progress: &Progress,
) -> anyhow::Result<Vec<Name>> {
    let mut names: BTreeMap<String, Name> = BTreeMap::new();
    for count in counts {
        let name = names.entry(count.name.clone()).or_default();
        name.name.clone_from(&count.name);
        name.tasks += count.tasks;
        name.parked += count.parked;
        *name.states.entry(count.state.as_str()).or_default() += count.tasks;
    }
    let mut shapes = Shapes::new(desk, queue);
    for name in names.values_mut() {
        shapes.tell(source, &name.name).await?;
        let Some(told) = shapes.of(&name.name) else { continue };
        name.shape = told.shape.as_ref().map(|shape| shape.as_str());
        let only = [name.name.clone()];
        let (mut after, most) = (None::<String>, sample.unwrap_or(i64::MAX));
        while name.read < most {
            let wanted = Wanted {
                names: &only,
                after: after.as_deref(),
                limit: PAGE.min(most - name.read),
                parked: false,
            };
            let page = source.tasks(queue, &wanted).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.task_id.clone());
            for found in &page {
                let sql = &told.settings.records_sql;
                let looked =
                    source.look(queue, &found.task_id, told.shape.as_ref(), sql, |_, _, _| {}).await?;
                progress.step();
                name.read += 1;
                let Some(looked) = looked else { continue };
                name.messages += looked.messages;
                name.left_out.extend(looked.left_out);
                match looked.why {
                    Some(why) => name.cannot_come.add(&why, &found.task_id),
                    None => name.can_come += 1,
                }
            }
        }
    }
    Ok(names.into_values().collect())
}

fn text(desk: &Desk<'_>, scan: &Scan) -> String {
    let mut text = format!("schema {}, version {}\n", scan.schema, scan.version);
    for queue in &scan.queues {
        let partitioned = if queue.queue.partitioned { ", partitioned" } else { "" };
        let (all, checkpoints) = (megabytes(queue.queue.bytes), megabytes(queue.queue.checkpoint_bytes));
        let head = format!("queue {}", queue.queue.name);
        let _ = writeln!(
            text,
            "\n{}{partitioned}: {all} in all, {checkpoints} of checkpoints",
            desk.output.paint(Tone::Head, &head)
        );
        text.push_str(&desk.output.aligned(&table(&queue.names), 2));
        for name in &queue.names {
            text.push_str(&name.cannot_come.text(&desk.output));
            if !name.left_out.is_empty() {
                let fields: Vec<&str> = name.left_out.iter().map(String::as_str).collect();
                let line =
                    format!("{}: other fields of its steps do not come: {}", name.name, fields.join(", "));
                text.push_str(&desk.output.block(&line, 2));
            }
        }
    }
    let open: i64 = open(scan);
    if open > 0 {
        let line = format!(
            "{} still open: `import` leaves them to Absurd, `take` brings them over",
            count(open, "task")
        );
        let _ = writeln!(text, "\n{line}");
    }
    let _ = writeln!(
        text,
        "\n{} read in {:.1} s; an import of all takes about {:.0} s",
        count(scan.read, "task"),
        scan.read_seconds,
        scan.import_seconds.max(1.0)
    );
    text
}

fn open(scan: &Scan) -> i64 {
    let open = [TaskState::Pending, TaskState::Running, TaskState::Sleeping].map(TaskState::as_str);
    let names = scan.queues.iter().flat_map(|queue| &queue.names);
    names
        .flat_map(|name| &name.states)
        .filter(|(state, _)| open.contains(state))
        .map(|(_, tasks)| tasks)
        .sum()
}

fn table(names: &[Name]) -> Table {
    let mut table = Table::new(&[
        Column::flexible("TASK"),
        Column::fixed("READ AS"),
        Column::number("TASKS"),
        Column::number("COME"),
        Column::number("MESSAGES"),
        Column::flexible("STATES"),
    ]);
    for name in names {
        let states: Vec<String> =
            name.states.iter().map(|(state, tasks)| format!("{tasks} {state}")).collect();
        let come = if name.read == name.tasks {
            name.can_come.to_string()
        } else {
            format!("{} of {}", name.can_come, name.read)
        };
        let tone = match (name.shape, name.cannot_come.tasks()) {
            (None, _) => Tone::Bad,
            (Some(_), 0) => Tone::Good,
            (Some(_), _) => Tone::Busy,
        };
        table.row([
            Cell::new(&name.name, Tone::Plain),
            Cell::new(name.shape.unwrap_or("nothing fits"), tone),
            Cell::new(name.tasks.to_string(), Tone::Plain),
            Cell::new(&come, tone),
            Cell::new(name.messages.to_string(), Tone::Plain),
            Cell::new(states.join(", "), Tone::Plain),
        ]);
    }
    table.wrapped()
}

pub(super) fn megabytes(bytes: i64) -> String {
    match bytes {
        ..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}
