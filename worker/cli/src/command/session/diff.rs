//! `wakeful session diff`: compares two sessions and their files.

use super::super::output::{Output, printable};
use super::super::report::{self, ReportArgs};
use super::Exit;
use serde::Serialize;
use wakeful_config::Config;
use wakeful_engine::workspace::Changed;
use wakeful_store::Store;
use wakeful_workflow::diff::Report;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// The session on the left, usually the original.
    #[arg(value_name = "LEFT")]
    pub(super) left: String,
    /// The session to compare with it.
    #[arg(value_name = "RIGHT")]
    pub(super) right: String,
    #[command(flatten)]
    report: ReportArgs,
}

pub(super) async fn diff(
    store: &Store,
    config: &Config,
    output: &Output,
    args: Args,
) -> anyhow::Result<Exit> {
    let (left, right) = (store.side(&args.left).await?, store.side(&args.right).await?);
    let report = wakeful_workflow::diff::diff(&left, &right);
    // The files may be in a store that is away. The rest of the comparison is shown all the same.
    let files = match super::files::changed(store, config, &report).await {
        Ok(files) => Some(files),
        Err(error) => {
            eprintln!("wakeful: the files were not compared: {}", printable(&error.to_string()));
            None
        }
    };
    let json = WithFiles { report: &report, files: files.as_deref() };
    let exit = report::tell(output, &json, &report, &args.report)?;
    if output.for_people() {
        super::files::tell_changes(files.as_deref().unwrap_or_default());
    }
    Ok(exit)
}

/// A report, and the files that differ between the two sessions. Files never count for its verdict.
#[derive(Serialize)]
struct WithFiles<'a> {
    #[serde(flatten)]
    report: &'a Report,
    files: Option<&'a [Changed]>,
}
