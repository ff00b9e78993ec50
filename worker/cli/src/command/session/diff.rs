//! `wakeful session diff`.

use super::super::output::Output;
use super::super::report::{self, ReportArgs};
use super::Exit;
use wakeful_config::Config;
use wakeful_store::Store;

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
    let exit = report::tell(output, &report, &args.report)?;
    if output.for_people() {
        super::files::tell_changes(store, config, &report).await?;
    }
    Ok(exit)
}
