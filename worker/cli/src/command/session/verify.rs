//! `wakeful session verify`: compares a session's caches with its logs; `--rebuild` writes the caches again.

use super::super::output::{Cell, Column, Format, Output, Table, Tone, count, printable};
use super::{Exit, Space};
use std::fmt::Write as _;
use wakeful_store::verify::{Change, Check, Rebuilt, Verification};
use wakeful_store::{Error, Store};

/// Number of session ids that `--all` reads at a time.
const PAGE: i64 = 500;
/// Number of characters of a value shown in a table; JSON has all of it.
const SHOWN: usize = 60;

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("which").args(["ids", "all"]).required(true)))]
pub(in crate::command) struct Args {
    /// The sessions' ids.
    #[arg(value_name = "ID")]
    pub(super) ids: Vec<String>,
    /// Verify every session of the database, or of the space.
    #[arg(long)]
    all: bool,
    /// Rewrite the caches that differ, from the logs.
    #[arg(long)]
    rebuild: bool,
}

pub(super) async fn verify(
    store: &Store,
    output: &Output,
    space: &Space,
    args: Args,
) -> anyhow::Result<Exit> {
    let mut results = Results { output: *output, brief: args.all, json: Vec::new(), sessions: 0, differ: 0 };
    let mut ids = args.ids;
    loop {
        if args.all {
            ids = store.session_ids(space.named(), ids.last().map_or("", String::as_str), PAGE).await?;
        }
        for id in &ids {
            match look(store, id, args.rebuild).await {
                Ok((verification, rebuilt)) => results.add(&verification, rebuilt.as_ref())?,
                // Report an unreadable log and go on with the other sessions.
                Err(error @ (Error::Corrupt { .. } | Error::Keys { .. })) if args.all => {
                    results.unreadable(id, &error)
                }
                Err(error) => return Err(error.into()),
            }
        }
        if !args.all || ids.is_empty() {
            break;
        }
    }
    results.end()
}

async fn look(
    store: &Store,
    id: &str,
    rebuild: bool,
) -> wakeful_store::Result<(Verification, Option<Rebuilt>)> {
    let before = store.verify(id).await?;
    if !rebuild || before.agrees {
        return Ok((before, None));
    }
    let rebuilt = store.rebuild(id).await?;
    store.announce(id).await?;
    Ok((store.verify(id).await?, Some(rebuilt)))
}

/// The results so far, printed or collected for JSON.
struct Results {
    output: Output,
    /// Show only differing sessions in full.
    brief: bool,
    json: Vec<serde_json::Value>,
    sessions: usize,
    differ: usize,
}

impl Results {
    fn add(&mut self, verification: &Verification, rebuilt: Option<&Rebuilt>) -> anyhow::Result<()> {
        self.sessions += 1;
        self.differ += usize::from(!verification.agrees);
        let mut item = serde_json::to_value(verification)?;
        if let Some(rebuilt) = rebuilt {
            item["rebuilt"] = serde_json::to_value(rebuilt)?;
        }
        if self.output.format() == Some(Format::Json) {
            self.json.push(item);
            return Ok(());
        }
        let text = || self.text(verification, rebuilt);
        self.output.line(&item, text)
    }

    fn unreadable(&mut self, id: &str, error: &Error) {
        self.sessions += 1;
        self.differ += 1;
        eprintln!("wakeful: session {}: {}", printable(id), printable(&error.to_string()));
    }

    fn end(self) -> anyhow::Result<Exit> {
        if self.output.format() == Some(Format::Json) {
            self.output.one(&self.json, String::new)?;
        }
        if self.brief && self.output.for_people() {
            eprintln!("{} verified, {} differ", count(self.sessions as i64, "session"), self.differ);
        }
        Ok(if self.differ == 0 { Exit::Ok } else { Exit::Divergence })
    }

    fn text(&self, verification: &Verification, rebuilt: Option<&Rebuilt>) -> String {
        let id = &verification.session_id;
        let (tone, word) = if verification.agrees { (Tone::Good, "agrees") } else { (Tone::Bad, "differs") };
        let mut text = format!("{}  {}\n", self.output.paint(Tone::Head, id), self.output.paint(tone, word));
        if let Some(rebuilt) = rebuilt {
            text.push_str(&self.rebuilt(rebuilt));
        }
        if !verification.agrees || !self.brief {
            text.push_str(&self.output.aligned(&table(&verification.checks), 2));
        }
        for line in advice(id, verification, rebuilt.is_some()) {
            let _ = writeln!(text, "  {}", self.output.paint(Tone::Plain, &line));
        }
        text
    }

    fn rebuilt(&self, rebuilt: &Rebuilt) -> String {
        let mut text = String::new();
        for Change { name, was, is } in &rebuilt.changes {
            let line = format!("rebuilt {name}: {} → {}", shown(was), shown(is));
            let _ = writeln!(text, "  {}", self.output.paint(Tone::Good, &line));
        }
        if rebuilt.checkpoint_written {
            let line = "appended a checkpoint with the state of the messages";
            let _ = writeln!(text, "  {}", self.output.paint(Tone::Good, line));
        }
        text
    }
}

fn table(checks: &[Check]) -> Table {
    let mut table = Table::new(&[
        Column::fixed(""),
        Column::fixed("WHAT"),
        Column::fixed("AGAINST"),
        Column::flexible("CACHED"),
        Column::flexible("FOLDED"),
    ]);
    for check in checks {
        let tone = if check.agrees { Tone::Plain } else { Tone::Bad };
        let cell = |text: &str| Cell::new(text, tone);
        table.row([
            cell(if check.agrees { "ok" } else { "DIFFERS" }),
            cell(check.name),
            cell(check.against),
            cell(&shown(&check.cached)),
            cell(&shown(&check.folded)),
        ]);
    }
    table
}

/// Returns what to do about each difference.
fn advice(id: &str, verification: &Verification, rebuilt: bool) -> Vec<String> {
    let differing = |cache: bool| {
        let mut names: Vec<&str> = Vec::new();
        for check in verification.checks.iter().filter(|check| !check.agrees && check.cache == cache) {
            if !names.contains(&check.name) {
                names.push(check.name);
            }
        }
        names.join(", ")
    };
    let (caches, logs) = (differing(true), differing(false));
    let mut advice = Vec::new();
    if !caches.is_empty() && rebuilt {
        advice.push(format!("still differs: {caches}. Its run is open: rebuild again when it rests"));
    } else if !caches.is_empty() {
        advice.push(format!(
            "differs: {caches}. Remedy: `wakeful session verify {id} --rebuild` rewrites it from the logs"
        ));
    }
    if !logs.is_empty() {
        advice.push(format!(
            "damaged: {logs}. Nothing here rewrites a log: restore the rows from a backup of the database"
        ));
    }
    advice
}

fn shown(value: &serde_json::Value) -> String {
    let text = match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
