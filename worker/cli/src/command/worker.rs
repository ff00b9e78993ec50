//! `wakeful worker`.

use super::output::{Output, until_reader_goes};
use super::{Exit, queue};
use wakeful_config::Config;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List the worker processes that sent a heartbeat within the last day, the latest first.
    List,
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful worker").await?;
    let output = Output::new(&args.output);
    let Verb::List = args.verb;
    let workers = store.workers().await;
    store.close().await;
    let workers = workers?;
    let silent_after_s = queue::silent_after_s(&config);
    until_reader_goes(
        output.items(&workers, || queue::worker_table(&workers, silent_after_s)).map(|()| Exit::Ok),
    )
}
