//! `wakeful encryption`: the data keys of encrypted conversations. Works on the database and the key store, and needs no server.

use super::output::{Output, count, until_reader_goes};
use super::{Exit, Usage};
use serde_json::json;
use wakeful_config::Config;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Show how many conversations are encrypted, and whether the key store has their keys.
    Status,
    /// Wrap every data key by the configured master key. No row of the database changes.
    ///
    /// Before: put the new key into `master_key`, the present one into `old_master_key`, and restart every process. After it
    /// `old_master_key` can go away.
    Rotate,
    /// Delete the data keys that no conversation has: of conversations that were not made after all, or that a restored database does not
    /// have any more.
    ///
    /// Keys younger than a day stay, because their conversation may be about to be written. Without --yes it only says which.
    Prune {
        /// Delete them.
        #[arg(long)]
        yes: bool,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    if config.encryption.is_none() {
        let text = "nothing is encrypted: wakeful.toml has no section [encryption]";
        return Err(Usage(text.to_owned()).into());
    }
    let store = super::open_store(&config, "wakeful encryption").await?;
    let output = Output::new(&args.output);
    let shown = match args.verb {
        Verb::Status => status(&store, &output).await,
        Verb::Rotate => rotate(&store, &output).await,
        Verb::Prune { yes } => prune(&store, &output, yes).await,
    };
    store.close().await;
    until_reader_goes(shown.map(|()| Exit::Ok))
}

async fn status(store: &wakeful_store::Store, output: &Output) -> anyhow::Result<()> {
    let status = store.encryption_status().await?;
    output.one(&status, || {
        let mut text = format!(
            "{} of {} conversations are encrypted; the key store has {}\n",
            status.sealed_conversations,
            status.conversations,
            count(status.keys as i64, "key")
        );
        for (master, keys) in &status.by_master {
            let which = if *master == status.master_id { "the present" } else { "an earlier" };
            text.push_str(&format!(
                "{} wrapped by {which} master key {master}\n",
                count(*keys as i64, "key")
            ));
        }
        if !status.missing.is_empty() {
            let missing = status.missing.join(", ");
            text.push_str(&format!("MISSING, so their texts cannot be read: {missing}\n"));
        }
        if !status.unused.is_empty() {
            text.push_str(&format!("{} of no conversation\n", count(status.unused.len() as i64, "key")));
        }
        text
    })
}

async fn rotate(store: &wakeful_store::Store, output: &Output) -> anyhow::Result<()> {
    let wrapped = store.rotate_master_key().await?;
    output.one(&json!({"wrapped": wrapped}), || format!("{} wrapped anew\n", count(wrapped as i64, "key")))
}

async fn prune(store: &wakeful_store::Store, output: &Output, yes: bool) -> anyhow::Result<()> {
    if !yes {
        wakeful_store::audit::act::only_looks();
    }
    let keys = store.prune_keys(!yes).await?;
    output.one(&json!({"deleted": yes, "keys": keys}), || {
        let keys = count(keys.len() as i64, "key");
        match yes {
            true => format!("{keys} deleted\n"),
            false => format!("{keys} of no conversation, older than a day: --yes deletes them\n"),
        }
    })
}
