//! `wakeful blobs`: collects what no row names, and checks the rest. Works on the database and needs no server.

use super::Exit;
use super::output::{Column, Output, Table, count, printable, until_reader_goes};
use std::time::Duration;
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::erase::collect::{Checked, Collected};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Delete files of sessions that were stored for a commit that was never made. Run it now and then.
    Gc {
        /// Only what was stored longer ago than this, in seconds.
        #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u64).range(3600..))]
        grace: u64,
        /// Only say how much it is.
        #[arg(long)]
        dry_run: bool,
    },
    /// Move the files of sessions to where `[blobs] store` says, while workers run. If it is interrupted, the next call goes
    /// on. Exit status 7 if some cannot be read.
    Move,
    /// Count the blobs of each store.
    Status,
    /// Read every blob and compare it with its name. Exit status 8 if one is wrong or missing.
    Verify,
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful blobs").await?;
    let output = Output::new(&args.output);
    let space = args.space.named();
    let ran = match args.verb {
        Verb::Gc { grace, dry_run } => gc(&store, &output, space, Duration::from_secs(grace), dry_run).await,
        Verb::Move => move_all(&store, &output, space).await,
        Verb::Status => status(&store, &output, space).await,
        Verb::Verify => verify(&store, &output, space).await,
    };
    store.close().await;
    until_reader_goes(ran)
}

async fn gc(
    store: &Store,
    output: &Output,
    space: Option<&str>,
    grace: Duration,
    dry_run: bool,
) -> anyhow::Result<Exit> {
    let collected @ Collected { blobs, bytes } = store.collect_blobs(space, grace, dry_run).await?;
    let did = if dry_run { "Would delete" } else { "Deleted" };
    output.one(&collected, || format!("{did} {} with {bytes} bytes\n", count(blobs, "blob")))?;
    Ok(Exit::Ok)
}

async fn move_all(store: &Store, output: &Output, space: Option<&str>) -> anyhow::Result<Exit> {
    let moved = store.move_blobs(space, |_| {}).await?;
    output.one(&moved, || format!("Moved {} with {} bytes\n", count(moved.blobs, "blob"), moved.bytes))?;
    if moved.unreadable == 0 {
        return Ok(Exit::Ok);
    }
    eprintln!(
        "wakeful: {} cannot be read and stay where they are: `wakeful blobs verify` names them",
        count(moved.unreadable, "blob")
    );
    Ok(Exit::Partial)
}

async fn status(store: &Store, output: &Output, space: Option<&str>) -> anyhow::Result<Exit> {
    let stores = store.blobs_by_store(space).await?;
    output.items(&stores, || {
        let mut table =
            Table::new(&[Column::number("BLOBS"), Column::number("BYTES"), Column::flexible("STORE")]);
        for of in &stores {
            let name = of.store.as_deref().unwrap_or("postgres");
            table.row([of.blobs.to_string().into(), of.bytes.to_string().into(), name.into()]);
        }
        table
    })?;
    Ok(Exit::Ok)
}

async fn verify(store: &Store, output: &Output, space: Option<&str>) -> anyhow::Result<Exit> {
    let checked = store.check_blobs(space).await?;
    output.one(&checked, || text(&checked))?;
    let sound = checked.wrong.is_empty() && checked.missing.is_empty();
    Ok(if sound { Exit::Ok } else { Exit::Divergence })
}

fn text(Checked { blobs, sealed, wrong, missing }: &Checked) -> String {
    let mut text = format!("Read {}\n", count(*blobs, "blob"));
    if *sealed > 0 {
        text += &format!("Not read: {} of encrypted conversations\n", count(*sealed, "blob"));
    }
    for (what, names) in [("wrong", wrong), ("missing", missing)] {
        for name in names {
            text += &format!("{what}: {}\n", printable(name));
        }
    }
    text
}
