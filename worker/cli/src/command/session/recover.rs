//! `wakeful session recover`: rebuilds a session's state from its journal alone.

use super::super::output::{Column, Output, Table, Tone};
use super::Exit;
use anyhow::Context as _;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use wakeful_store::journal::{Lines, Postgres, recover};
use wakeful_store::{Error, Store};
use wakeful_workflow::recover::Recovered;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// The session's id.
    #[arg(required_unless_present = "journal", conflicts_with = "journal")]
    pub(super) id: Option<String>,
    /// A journal in a file, one JSON entry per line, as `session tail --after 0 -o jsonl` prints it; `-` is
    /// stdin.
    #[arg(long, value_name = "FILE")]
    pub journal: Option<PathBuf>,
}

pub(super) async fn from_database(store: &Store, output: &Output, args: Args) -> anyhow::Result<Exit> {
    // clap guarantees an id here.
    let id = args.id.unwrap_or_default();
    // An empty journal recovers too, so check first that the session exists.
    store.last_event_seq(&id).await?;
    print(output, &recover(&Postgres(store), &id).await?)
}

pub(super) async fn from_file(output: &Output, file: &Path) -> anyhow::Result<Exit> {
    let name = file.display().to_string();
    let bytes = match read(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Error::NotFound { what: "file", id: name }.into());
        }
        bytes => bytes.with_context(|| name.clone())?,
    };
    let lines = Lines::read(&bytes).with_context(|| name.clone())?;
    for note in &lines.notes {
        eprintln!("wakeful: {}: {}", super::printable(&name), super::printable(note));
    }
    print(output, &recover(&lines, "").await.context(name)?)
}

fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    if file == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().lock().read_to_end(&mut bytes)?;
        return Ok(bytes);
    }
    std::fs::read(file)
}

fn print(output: &Output, recovered: &Recovered) -> anyhow::Result<Exit> {
    output.one(recovered, || text(output, recovered))?;
    Ok(Exit::Ok)
}

fn text(output: &Output, recovered: &Recovered) -> String {
    let mut fields = Table::new(&[Column::fixed(""), Column::flexible("")]);
    fields.row(["lifecycle_state".into(), recovered.lifecycle_state.as_str().into()]);
    let last = recovered.last_entry_type.as_str();
    fields.row(["last_entry_type".into(), if last.is_empty() { "(none was replayed)" } else { last }.into()]);
    fields.row(["entries_replayed".into(), recovered.entries_replayed.into()]);
    let mut text = output.aligned(&fields, 0);
    let empty = if recovered.context_state.is_empty() { "     {}" } else { "" };
    let _ = writeln!(text, "{}{empty}", output.paint(Tone::Plain, "context_state"));
    let mut state = Table::new(&[Column::flexible("KEY"), Column::flexible("VALUE")]);
    for (key, value) in &recovered.context_state {
        state.row([key.as_str().into(), value.to_string().into()]);
    }
    if !state.is_empty() {
        text.push_str(&output.aligned(&state, 2));
    }
    text
}
