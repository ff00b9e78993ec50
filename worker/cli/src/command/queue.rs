//! `wakeful queue`: shows the jobs, the workers and the gates; pauses the whole queue. Works on the database and needs no server.

use super::output::{
    Cell, Column, Output, Table, Tone, age, capital, count, printable, span, until_reader_goes,
};
use super::{Exit, Usage};
use chrono::Utc;
use serde_json::json;
use std::fmt::Write as _;
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::gate::ClosedGate;
use wakeful_store::queue::{Depth, WaitingSpace, WorkerView};
use wakeful_workflow::gate::whose;
use wakeful_workflow::pause::{Kind, Subject};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Show how many jobs are ready, leased or delayed, and which workers there are.
    Status,
    /// Pause the whole queue, as `wakeful pause begin queue` does: sessions wait, and messages are still accepted.
    Pause(super::pause::How),
    /// Let a paused queue go on, the sessions that waited longest first.
    Resume(super::pause::Pace),
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    if args.space.named().is_some() {
        return Err(Usage("the queue is one for all spaces".to_owned()).into());
    }
    let store = super::open_store(&config, "wakeful queue").await?;
    let output = Output::new(&args.output);
    let whole = Subject { kind: Kind::Queue, name: String::new() };
    let acted = match args.verb {
        Verb::Status => return until_reader_goes(status(&config, store, &output).await),
        Verb::Pause(how) => super::pause::begin(&store, &output, &whole, &how).await.map(|_| ()),
        Verb::Resume(pace) => super::pause::end(&store, &output, std::slice::from_ref(&whole), &pace).await,
    };
    store.close().await;
    until_reader_goes(acted.map(|()| Exit::Ok))
}

async fn status(config: &Config, store: Store, output: &Output) -> anyhow::Result<Exit> {
    let (depth, workers) = (store.queue_depth().await?, store.workers().await?);
    let (spaces, gates) = (store.waiting_spaces().await?, store.closed_gates().await?);
    let pauses = store.pauses().await?;
    store.close().await;
    let silent_after_s = config.queue.silent_after_s();
    let printed = output.one(
        &json!({"queues": depth, "spaces": spaces, "workers": workers, "gates": gates, "pauses": pauses}),
        || {
            if output.for_people() {
                let paused =
                    pauses.iter().map(|one| output.painted_block(Tone::Busy, &super::pause::said(one)));
                let paused: String = paused.collect();
                paused + &failing(output, &gates) + &pretty(output, &depth, &spaces, &workers, silent_after_s)
            } else {
                plain(&depth, &workers, silent_after_s)
                    + &spaces
                        .iter()
                        .map(|one| {
                            let space = printable(&one.space_id);
                            format!("space\t{space}\t{}\t{:.0}\n", one.ready, one.oldest_ready_s)
                        })
                        .collect::<String>()
                    + &gates.iter().map(|gate| format!("gate\t{}\n", said(gate))).collect::<String>()
                    + &pauses
                        .iter()
                        .map(|pause| format!("pause\t{}\n", super::pause::said(pause)))
                        .collect::<String>()
            }
        },
    );
    printed.map(|()| Exit::Ok)
}

/// The providers that fail, and what waits for each.
fn failing(output: &Output, gates: &[ClosedGate]) -> String {
    gates.iter().map(|gate| output.painted_block(Tone::Bad, &said(gate))).collect()
}

/// Says what is wrong with a provider, and what comes next.
pub(super) fn said(gate: &ClosedGate) -> String {
    let next = match gate.next_probe_at {
        Some(at) if at > Utc::now() => format!("next probe in {}", span((at - Utc::now()).as_seconds_f64())),
        Some(_) => "a probe is under way or due".to_owned(),
        None => "it is back, and they go on in their order".to_owned(),
    };
    let error = gate.last_error.as_deref().map(|error| format!(": {}", error.trim_end_matches('.')));
    let waiting = count(gate.waiting, "session");
    let wait = if gate.waiting == 1 { "waits" } else { "wait" };
    printable(&format!(
        "{} has failed for {}{}; {waiting} {wait}, {next}",
        capital(&whose(&gate.provider)),
        age(gate.since),
        error.unwrap_or_default()
    ))
    .to_string()
}

/// The spaces that wait, if they are several. They take turns.
fn waiting(spaces: &[WaitingSpace]) -> Option<Table> {
    let mut table =
        Table::new(&[Column::flexible("SPACE"), Column::number("READY"), Column::number("OLDEST READY")]);
    for one in spaces {
        table.row([one.space_id.as_str().into(), one.ready.into(), span(one.oldest_ready_s).into()]);
    }
    (spaces.len() > 1).then_some(table)
}

fn pretty(
    output: &Output,
    depth: &[Depth],
    spaces: &[WaitingSpace],
    workers: &[WorkerView],
    silent_after_s: f64,
) -> String {
    let mut queues = Table::new(&[
        Column::fixed("QUEUE"),
        Column::number("READY"),
        Column::number("LEASED"),
        Column::number("DELAYED"),
        Column::number("OLDEST READY"),
    ]);
    for one in depth {
        let oldest = if one.ready > 0 { span(one.oldest_ready_s) } else { "-".to_owned() };
        let tone = if one.oldest_ready_s > 60.0 { Tone::Bad } else { Tone::Plain };
        queues.row([
            one.kind.as_str().into(),
            one.ready.into(),
            one.leased.into(),
            one.delayed.into(),
            Cell::new(oldest, tone),
        ]);
    }
    let mut text = String::new();
    if queues.is_empty() {
        text.push_str("No jobs: every session rests.\n");
    } else {
        text.push_str(&output.aligned(&queues, 0));
    }
    if let Some(table) = waiting(spaces) {
        text.push('\n');
        text.push_str(&output.aligned(&table, 0));
    }
    text.push('\n');
    if workers.is_empty() {
        let _ = writeln!(text, "{}", output.paint(Tone::Bad, "No worker beat within the last day."));
        return text;
    }
    text.push_str(&output.aligned(&worker_table(workers, silent_after_s), 0));
    text
}

pub(super) fn worker_table(workers: &[WorkerView], silent_after_s: f64) -> Table {
    let mut table = Table::new(&[
        Column::fixed("WORKER"),
        Column::fixed("STATE"),
        Column::number("BEAT"),
        Column::number("HOLDS"),
        Column::number("SLOTS"),
        Column::number("UP"),
        Column::flexible("VERSION"),
        Column::flexible("HOST"),
    ]);
    for worker in workers {
        let state = worker.state(silent_after_s);
        let up = if state == "gone" { "-".to_owned() } else { age(worker.started_at) };
        table.row([
            worker.worker_id.as_str().into(),
            Cell::new(
                state,
                match state {
                    "alive" => Tone::Good,
                    "draining" => Tone::Busy,
                    "gone" => Tone::Faint,
                    _ => Tone::Bad,
                },
            ),
            span(worker.beat_age_s).into(),
            worker.leases.into(),
            worker.concurrency.into(),
            up.into(),
            worker.version.as_str().into(),
            worker.host.as_str().into(),
        ]);
    }
    table
}

/// One line per queue and per worker; the first word tells which.
fn plain(depth: &[Depth], workers: &[WorkerView], silent_after_s: f64) -> String {
    let mut text = String::new();
    for one in depth {
        let _ = writeln!(
            text,
            "queue\t{}\t{}\t{}\t{}\t{:.0}",
            one.kind, one.ready, one.leased, one.delayed, one.oldest_ready_s
        );
    }
    for worker in workers {
        let _ = writeln!(
            text,
            "worker\t{}\t{}\t{:.0}\t{}\t{}\t{}",
            printable(&worker.worker_id),
            worker.state(silent_after_s),
            worker.beat_age_s,
            worker.leases,
            worker.concurrency,
            printable(&worker.host)
        );
    }
    text
}
