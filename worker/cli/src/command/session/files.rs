//! `wakeful session files` and `wakeful session checkout`: the files of a session, now or after a message.

use super::super::output::{Column, Output, Table, count, printable};
use super::{Exit, Usage};
use serde_json::json;
use std::path::PathBuf;
use wakeful_config::Config;
use wakeful_engine::workspace::{Changed, Limits, Listed, Unreadable, changes, checkout, list_at};
use wakeful_store::Store;
use wakeful_workflow::diff::Report;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct FilesArgs {
    /// The session's id.
    pub(super) id: String,
    /// As they were after this message.
    #[arg(long, value_name = "N")]
    at: Option<i64>,
}

#[derive(Debug, clap::Args)]
pub(in crate::command) struct CheckoutArgs {
    /// The session's id.
    pub(super) id: String,
    /// A folder that does not exist yet.
    dir: PathBuf,
    /// As they were after this message.
    #[arg(long, value_name = "N")]
    at: Option<i64>,
}

pub(super) async fn files(
    store: &Store,
    config: &Config,
    output: &Output,
    args: FilesArgs,
) -> anyhow::Result<Exit> {
    let (_, files) = list_at(store, &args.id, args.at, &Limits::of(&config.workspace)).await.map_err(of)?;
    output.items(&files, || table(&files))?;
    if output.for_people() && files.is_empty() {
        super::super::output::print("The session has no files.\n")?;
    }
    Ok(Exit::Ok)
}

fn table(files: &[Listed]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("MODE"),
        Column::number("BYTES"),
        Column::flexible("PATH"),
        Column::flexible("POINTS AT").extra(),
    ]);
    for file in files {
        let path = if file.kind == "folder" { format!("{}/", file.path) } else { file.path.clone() };
        let bytes = if file.kind == "file" { file.bytes.to_string() } else { String::new() };
        let target = file.target.as_deref().unwrap_or_default();
        table.row([file.mode.as_str().into(), bytes.into(), path.into(), target.into()]);
    }
    table
}

pub(super) async fn check_out(
    store: &Store,
    config: &Config,
    output: &Output,
    args: CheckoutArgs,
) -> anyhow::Result<Exit> {
    let Some(snapshot) = store.workspace_at(&args.id, args.at).await? else {
        return Err(Usage(format!("session {} has no files there", printable(&args.id))).into());
    };
    checkout(store, &args.id, &snapshot, &args.dir, &Limits::of(&config.workspace)).await.map_err(of)?;
    let dir = args.dir.display().to_string();
    output.one(&json!({"dir": dir, "files": snapshot.files, "bytes": snapshot.bytes}), || {
        format!("{}: {}\n", printable(&dir), count(snapshot.files as i64, "file"))
    })?;
    Ok(Exit::Ok)
}

/// The files that differ between two sessions.
pub(super) async fn changed(store: &Store, config: &Config, report: &Report) -> anyhow::Result<Vec<Changed>> {
    let limits = Limits::of(&config.workspace);
    let (_, left) = list_at(store, &report.left.session_id, None, &limits).await.map_err(of)?;
    let (_, right) = list_at(store, &report.right.session_id, None, &limits).await.map_err(of)?;
    Ok(changes(&left, &right))
}

/// Says so on stderr.
pub(super) fn tell_changes(changed: &[Changed]) {
    if changed.is_empty() {
        return;
    }
    eprintln!("Files: {} differ", changed.len());
    for one in changed.iter().take(100) {
        eprintln!("  {:<8} {}", one.how, printable(&one.path));
    }
    if changed.len() > 100 {
        eprintln!("  and {} more", changed.len() - 100);
    }
}

fn of(unreadable: Unreadable) -> anyhow::Error {
    match unreadable {
        Unreadable::Store(error) => error.into(),
        other => anyhow::Error::new(other),
    }
}
