//! `wakeful replay --suite DIR`: runs every bundle of a folder, several at a time, and prints a line for
//! each.

mod junit;

use super::progress::Silent;
use super::{Compared, SharedOptions, replayed};
use crate::command::output::{Cell, Column, Format, Output, Table, Tone, count, dollars, printable, span};
use crate::command::{Exit, Usage};
use futures::StreamExt;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_workflow::diff::Level;

/// The result of one bundle.
#[derive(Debug, Serialize)]
struct Line {
    bundle: String,
    source_session_id: Option<String>,
    session_id: Option<String>,
    turns: i64,
    /// `equal`, `prose`, `state`, `tools`, or `failed`.
    verdict: &'static str,
    /// The difference counts under `--fail-on`.
    diverged: bool,
    first_divergence: Option<String>,
    requests_equal: usize,
    requests_differ: usize,
    unrecorded: usize,
    /// Input and output tokens of the replay.
    tokens: i64,
    cost_micros: i64,
    time_ms: i64,
    /// Why the bundle failed.
    error: Option<String>,
}

pub(super) async fn run(
    ctx: &Arc<Ctx>,
    options: &SharedOptions,
    dir: &Path,
    output: &Output,
) -> anyhow::Result<Exit> {
    let bundles = bundles(dir)?;
    let all = bundles.len();
    let mut lines = Vec::new();
    let mut running = futures::stream::iter(bundles)
        .map(|path| async move { line(ctx, options, &path).await })
        .buffer_unordered(options.args.jobs);
    while let Some(line) = running.next().await {
        lines.extend(line);
        if let Some(line) = lines.last() {
            eprintln!("{}/{all} {} {}", lines.len(), printable(&line.bundle), line.verdict);
        }
    }
    lines.sort_by(|a: &Line, b| a.bundle.cmp(&b.bundle));
    output.items(&lines, || table(&lines))?;
    let tally = Tally::of(&lines);
    if let Some(file) = &options.args.junit {
        std::fs::write(file, junit::report(&lines))
            .map_err(|error| Usage(format!("--junit: {}: {error}", file.display())))?;
    }
    if std::env::var("GITHUB_ACTIONS").is_ok_and(|set| set == "true") {
        eprint!("{}", junit::annotations(&lines));
    }
    if !matches!(output.format(), Some(Format::Json | Format::Jsonl)) {
        eprintln!("{}: {tally}", count(lines.len() as i64, "bundle"));
    }
    if lines.len() < all {
        eprintln!("interrupted: the same command goes on where this one stopped");
        return Ok(Exit::Failed);
    }
    Ok(match (tally.failed, tally.diverged) {
        (0, 0) => Exit::Ok,
        (0, _) => Exit::Divergence,
        (_, _) => Exit::Failed,
    })
}

/// How many bundles ended in each way. Each is counted once.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    equal: usize,
    /// They differ, and not in what `--fail-on` asks about.
    differ: usize,
    diverged: usize,
    failed: usize,
}

impl Tally {
    fn of(lines: &[Line]) -> Tally {
        let mut tally = Tally::default();
        for line in lines {
            let ending = match line {
                _ if line.error.is_some() => &mut tally.failed,
                _ if line.diverged => &mut tally.diverged,
                _ if line.verdict == Level::Equal.as_str() => &mut tally.equal,
                _ => &mut tally.differ,
            };
            *ending += 1;
        }
        tally
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tally { equal, differ, diverged, failed } = self;
        write!(f, "{equal} equal, {differ} differ within --fail-on, {diverged} diverged, {failed} failed")
    }
}

/// Returns the bundles of a folder, sorted by name: the files that `session export` writes, compressed or
/// not.
fn bundles(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let unreadable =
        |error: std::io::Error| Usage(format!("--suite: {} cannot be read: {error}", dir.display()));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_bundle = [".jsonl", ".jsonl.gz", ".json", ".json.gz"].iter().any(|end| name.ends_with(end));
        if is_bundle && !name.starts_with('.') && path.is_file() {
            found.push(path);
        }
    }
    if found.is_empty() {
        let text =
            format!("--suite: no bundle in {} (*.jsonl, *.json, and the same with .gz)", dir.display());
        return Err(Usage(text).into());
    }
    found.sort();
    Ok(found)
}

/// Runs one bundle. Returns `None` when it was interrupted.
async fn line(ctx: &Arc<Ctx>, options: &SharedOptions, path: &Path) -> Option<Line> {
    let bundle = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if ctx.shutdown.draining.is_cancelled() {
        return None;
    }
    let source = path.display().to_string();
    let compared = match replayed(ctx, options, &source, &Silent).await {
        Ok(Some(compared)) => compared,
        Ok(None) => return None,
        Err(error) => return Some(failed(bundle, format!("{error:#}"))),
    };
    let session_id = &compared.replay.session_id;
    if let Err(error) = ctx.store.end_replay(session_id).await {
        return Some(failed(bundle, error.to_string()));
    }
    Some(of(bundle, &compared, options))
}

fn of(bundle: String, compared: &Compared, options: &SharedOptions) -> Line {
    let (replay, diff) = (&compared.replay, &compared.diff);
    let totals = &diff.totals.right;
    Line {
        bundle,
        source_session_id: Some(replay.source_session_id.clone()),
        session_id: Some(replay.session_id.clone()),
        turns: totals.turns,
        verdict: if replay.failed.is_some() { "failed" } else { diff.verdict.as_str() },
        diverged: replay.failed.is_none() && options.args.fail_on.is_reached(compared),
        first_divergence: diff
            .first_divergence
            .as_ref()
            .map(|first| format!("turn {}: {}", first.turn, first.what)),
        requests_equal: diff.requests.equal,
        requests_differ: diff.requests.differ,
        unrecorded: replay.unrecorded.len(),
        tokens: totals.usage.input_tokens + totals.usage.output_tokens,
        cost_micros: totals.usage.cost_micros,
        time_ms: totals.time_ms,
        error: replay.failed.clone(),
    }
}

fn failed(bundle: String, error: String) -> Line {
    Line {
        bundle,
        source_session_id: None,
        session_id: None,
        turns: 0,
        verdict: "failed",
        diverged: false,
        first_divergence: None,
        requests_equal: 0,
        requests_differ: 0,
        unrecorded: 0,
        tokens: 0,
        cost_micros: 0,
        time_ms: 0,
        error: Some(error),
    }
}

fn table(lines: &[Line]) -> Table {
    let mut table = Table::new(&[
        Column::flexible("BUNDLE"),
        Column::number("TURNS"),
        Column::fixed("VERDICT"),
        Column::number("TOKENS"),
        Column::number("COST"),
        Column::number("TIME"),
        Column::flexible("FIRST DIVERGENCE"),
    ]);
    for line in lines {
        let tone = match (line.error.is_some() || line.diverged, line.verdict) {
            (true, _) => Tone::Bad,
            (false, "equal") => Tone::Good,
            (false, _) => Tone::Plain,
        };
        table.row([
            line.bundle.as_str().into(),
            line.turns.into(),
            Cell::new(line.verdict, tone),
            line.tokens.into(),
            dollars(line.cost_micros).as_str().into(),
            span(line.time_ms as f64 / 1000.0).as_str().into(),
            line.error.as_deref().or(line.first_divergence.as_deref()).unwrap_or("-").into(),
        ]);
    }
    table
}
