//! `wakeful absurd verify`: compares imported sessions with the checkpoints of their tasks.

use super::super::output::{Tone, count, printable};
use super::import::sources;
use super::progress::Progress;
use super::{Desk, Exit};
use futures::future::try_join_all;
use serde::Serialize;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use wakeful_store::absurd::{Compared, Comparison, ImportRow, Source};
use wakeful_store::{Error, Store};
use wakeful_workflow::absurd::compare::Difference;

const PAGE: i64 = 200;
/// Sessions of one round of `--follow` without `--sample`.
const SAMPLE: i64 = 20;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Only these tasks. Default: all that were imported.
    #[arg(value_name = "TASK_ID", conflicts_with_all = ["sample", "follow"])]
    tasks: Vec<String>,
    /// Compare only this many sessions, chosen by chance.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    sample: Option<i64>,
    /// Shadow mode: compare others again and again, until interrupted or until one differs.
    #[arg(long)]
    follow: bool,
    /// Pause between two rounds of --follow.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    every: u64,
    /// End --follow after this many rounds.
    #[arg(long, value_name = "N")]
    rounds: Option<u64>,
    /// How many sessions are compared at the same time.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    parallel: u64,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    compared: i64,
    equal: i64,
    messages: i64,
    /// Absurd has cleaned them up.
    gone: Vec<String>,
    differ: Vec<Differing>,
}

#[derive(Debug, Serialize)]
struct Differing {
    task_id: String,
    session_id: String,
    differences: Vec<Difference>,
}

pub(super) async fn verify(desk: &Desk<'_>, args: &Args) -> anyhow::Result<Exit> {
    let parallel = usize::try_from(args.parallel).unwrap_or(1);
    let store = desk.store(parallel).await?;
    let mut sources = sources(desk, parallel).await?;
    let mut report = Report::default();
    let mut round = 0;
    loop {
        round += 1;
        match (args.sample, args.follow) {
            (None, false) => all(desk, &store, &mut sources, &args.tasks, &mut report).await?,
            (sample, _) => {
                let seed =
                    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
                let rows = store.absurd_sample(desk.space(), &seed, sample.unwrap_or(SAMPLE)).await?;
                let progress = Progress::new("comparing", rows.len() as u64);
                page(desk, &store, &mut sources, rows, &mut report, &progress).await?;
                progress.end();
            }
        }
        if !args.follow || !report.differ.is_empty() || args.rounds.is_some_and(|rounds| round >= rounds) {
            break;
        }
        eprintln!("round {round}: {} of {} equal", report.equal, report.compared);
        tokio::time::sleep(Duration::from_secs(args.every)).await;
    }
    store.close().await;
    desk.output.one(&report, || text(desk, &report))?;
    Ok(if report.differ.is_empty() { Exit::Ok } else { Exit::Divergence })
}

async fn all(
    desk: &Desk<'_>,
    store: &Store,
    sources: &mut [Source],
    tasks: &[String],
    report: &mut Report,
) -> anyhow::Result<()> {
    let progress = Progress::new("comparing", store.absurd_count(desk.space()).await?.unsigned_abs());
    let mut after = None::<(String, String)>;
    loop {
        let from = after.as_ref().map(|(source, task_id)| (source.as_str(), task_id.as_str()));
        let rows = store.absurd_imports(desk.space(), from, PAGE).await?;
        let Some(last) = rows.last() else { break };
        after = Some((last.source.clone(), last.task_id.clone()));
        let wanted = |row: &ImportRow| tasks.is_empty() || tasks.contains(&row.task_id);
        page(desk, store, sources, rows.into_iter().filter(wanted).collect(), report, &progress).await?;
    }
    progress.end();
    Ok(())
}

async fn page(
    desk: &Desk<'_>,
    store: &Store,
    sources: &mut [Source],
    rows: Vec<ImportRow>,
    report: &mut Report,
    progress: &Progress,
) -> anyhow::Result<()> {
    let of_queue = |row: &ImportRow| {
        desk.queue
            .as_ref()
            .is_none_or(|queue| row.source.split_once(':').is_some_and(|(_, own)| own == queue))
    };
    let waiting: Mutex<Vec<ImportRow>> = Mutex::new(rows.into_iter().filter(of_queue).rev().collect());
    let waiting = &waiting;
    let work = sources.iter_mut().map(|source| async move {
        let mut done = Vec::new();
        loop {
            let row = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(row) = row else { return anyhow::Ok(done) };
            done.push(one(desk, store, source, &row).await?);
            progress.step();
        }
    });
    for comparison in try_join_all(work).await?.into_iter().flatten() {
        report.add(comparison);
    }
    Ok(())
}

async fn one(
    desk: &Desk<'_>,
    store: &Store,
    source: &mut Source,
    row: &ImportRow,
) -> anyhow::Result<Comparison> {
    let settings = desk.config.absurd.task(&row.task_name);
    let compared = store.absurd_compare(source, row, settings.shape.as_ref(), &settings.records_sql).await;
    match compared {
        Ok(comparison) => Ok(comparison),
        // What cannot be read is a difference too.
        Err(error @ (Error::Corrupt { .. } | Error::NotFound { .. })) => Ok(Comparison {
            task_id: row.task_id.clone(),
            session_id: row.session_id.clone(),
            result: Compared::Differs {
                differences: vec![Difference { what: error.to_string(), in_absurd: None, here: None }],
            },
        }),
        Err(error) => Err(error.into()),
    }
}

impl Report {
    fn add(&mut self, comparison: Comparison) {
        let Comparison { task_id, session_id, result } = comparison;
        self.compared += 1;
        match result {
            Compared::Equal { messages } => {
                self.equal += 1;
                self.messages += messages as i64;
            }
            Compared::Gone => self.gone.push(task_id),
            Compared::Differs { differences } => {
                self.differ.push(Differing { task_id, session_id, differences })
            }
        }
    }
}

fn text(desk: &Desk<'_>, report: &Report) -> String {
    let output = &desk.output;
    let (tone, n) = match report.differ.is_empty() {
        true => (Tone::Good, report.equal),
        false => (Tone::Bad, report.equal),
    };
    let head = format!("{n} of {} equal", count(report.compared - report.gone.len() as i64, "session"));
    let mut text = format!("{}: {} compared\n", output.paint(tone, &head), count(report.messages, "message"));
    if !report.gone.is_empty() {
        let _ = writeln!(
            text,
            "{} gone from Absurd, so there is nothing to compare with",
            count(report.gone.len() as i64, "task")
        );
    }
    for differing in &report.differ {
        let head = format!("{}  {}", differing.session_id, differing.task_id);
        let _ = writeln!(text, "\n{}", output.paint(Tone::Bad, &head));
        for difference in &differing.differences {
            let _ = writeln!(text, "  {}", printable(&difference.what));
            for (side, shown) in [("absurd", &difference.in_absurd), ("here", &difference.here)] {
                let shown = shown.as_deref().unwrap_or("-");
                text.push_str(&output.block(&format!("{side:>6}  {shown}"), 4));
            }
        }
    }
    text
}
