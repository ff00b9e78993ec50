//! `wakeful completions` and `wakeful man`: made from the command line's own definition.

use super::{Cli, Exit};
use anyhow::Context as _;
use clap::CommandFactory as _;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(super) struct CompletionsArgs {
    /// The shell.
    shell: clap_complete::Shell,
}

#[derive(Debug, clap::Args)]
pub(super) struct ManArgs {
    /// Where the pages go, such as /usr/local/share/man/man1. It is made if it is missing.
    dir: PathBuf,
}

pub(super) fn completions(args: &CompletionsArgs) -> anyhow::Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "wakeful", &mut script);
    super::output::until_reader_goes(super::output::print(&String::from_utf8(script)?).map(|()| Exit::Ok))
}

pub(super) fn pages(args: &ManArgs) -> anyhow::Result<Exit> {
    let made =
        std::fs::create_dir_all(&args.dir).and_then(|()| clap_mangen::generate_to(Cli::command(), &args.dir));
    made.with_context(|| format!("the pages cannot be written to {}", args.dir.display()))?;
    eprintln!("wakeful: the pages are in {}; read one with: man -l {0}/wakeful.1", args.dir.display());
    Ok(Exit::Ok)
}
