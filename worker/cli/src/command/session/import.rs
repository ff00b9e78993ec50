//! `wakeful session import`: makes a session of a bundle. Starts no run.

use super::progress::Progress;
use super::{Exit, Output, count, printable};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;
use wakeful_store::Store;
use wakeful_store::import::{self, Imported};
use wakeful_workflow::bundle::Limits;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// A bundle, plain or gzip; `-` is stdin.
    file: PathBuf,
    /// Check the whole bundle and write nothing. Needs no database.
    #[arg(long)]
    pub verify_only: bool,
}

pub(super) async fn into_database(
    store: &Store,
    output: &Output,
    space: &str,
    args: &Args,
    limits: Limits,
) -> anyhow::Result<Exit> {
    let (file, _spooled) = source(&args.file, limits)?;
    let progress = progress("importing", &file);
    let shown = progress.clone();
    let imported = store.import(&file, space, limits, move |bytes| shown.at(bytes)).await;
    progress.end();
    print(output, &imported?)
}

pub(super) async fn verify(output: &Output, args: &Args, limits: Limits) -> anyhow::Result<Exit> {
    let (file, _spooled) = source(&args.file, limits)?;
    let progress = progress("checking", &file);
    let shown = progress.clone();
    let checked = import::check(&file, limits, move |bytes| shown.at(bytes)).await;
    progress.end();
    print(output, &checked?)
}

/// Returns the bundle's file. A bundle is read twice, so stdin is first copied into a temporary file.
fn source(file: &Path, limits: Limits) -> anyhow::Result<(PathBuf, Option<NamedTempFile>)> {
    if file != Path::new("-") {
        super::super::check_regular(file)?;
        return Ok((file.to_owned(), None));
    }
    let mut spooled = tempfile::Builder::new().prefix("wakeful-import-").tempfile()?;
    // Copy up to one byte more than the limit, so that the check notices a bundle that is too large.
    let most = limits.bytes.saturating_add(1);
    io::copy(&mut io::Read::take(io::stdin().lock(), most), spooled.as_file_mut())?;
    Ok((spooled.path().to_owned(), Some(spooled)))
}

fn progress(what: &'static str, file: &Path) -> Progress {
    Progress::of_bytes(what, std::fs::metadata(file).ok().map(|of| of.len()))
}

fn print(output: &Output, imported: &Imported) -> anyhow::Result<Exit> {
    output.one(imported, || text(imported))?;
    Ok(Exit::Ok)
}

fn text(imported: &Imported) -> String {
    let from = printable(&imported.exported_session_id);
    let mut text = match (&imported.session_id, &imported.conversation_id) {
        (Some(session_id), Some(conversation_id)) => {
            format!("{session_id} in the conversation {conversation_id}, from {from}\n")
        }
        (_, _) => format!("a whole bundle of {from}, whose status is {}\n", imported.exported_status),
    };
    let rows: Vec<String> = imported.counts.iter().map(|(name, number)| format!("{number} {name}")).collect();
    let _ = writeln!(text, "  {}, {}", rows.join(", "), count(imported.bytes as i64, "byte"));
    if imported.redacted {
        text.push_str("  redacted: it can be read but not replayed\n");
    }
    text
}
