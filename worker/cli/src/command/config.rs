//! `wakeful config`: prints what the file and the environment configure, and where each key was read.

use super::Exit;
use super::output::{Column, Output, Table, until_reader_goes};
use serde_json::{Value, json};
use wakeful_config::Config;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Print each key that the file or the environment gives, and where it was read. A key that is not printed has its
    /// default, which wakeful.example.toml shows. No secret is printed: also not the path and the query of a URL, except the path of a
    /// provider's base_url.
    Print,
}

pub(super) fn run(config: &Config, args: &Args) -> anyhow::Result<Exit> {
    let output = Output::new(&args.output);
    let Verb::Print = args.verb;
    let given: Vec<Value> = config
        .given
        .iter()
        .map(|one| json!({"key": one.key, "value": one.value, "origin": one.origin}))
        .collect();
    let printed = output.items(&given, || {
        let mut table = Table::new(&[
            Column::fixed("KEY"),
            Column::flexible("VALUE"),
            Column::flexible("READ FROM").extra(),
        ]);
        for one in &config.given {
            table.row([one.key.as_str().into(), one.value.as_str().into(), one.origin.as_str().into()]);
        }
        table
    });
    until_reader_goes(printed.map(|()| Exit::Ok))
}
