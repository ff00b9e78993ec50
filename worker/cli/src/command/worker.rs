//! `wakeful worker`: lists the worker processes, and drains them. Works on the database and needs no server.

use super::output::{Output, count, printable, until_reader_goes};
use super::{Exit, Usage, queue};
use serde_json::json;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_store::Store;

pub(super) type Args = super::Noun<Verb>;

/// How often `drain --wait` looks.
const LOOK: Duration = Duration::from_millis(300);

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List the worker processes that sent a heartbeat within the last day, the latest first.
    List,
    /// Ask workers to take no more jobs, to finish the steps that they run, and to end. Their supervisor may start new ones.
    Drain {
        /// The worker, as `worker list` shows it, or the beginning of its name.
        #[arg(value_name = "NAME", required_unless_present = "all")]
        worker: Option<String>,
        /// All workers that there are now.
        #[arg(long, conflicts_with = "worker")]
        all: bool,
        /// Return when they have ended.
        #[arg(long)]
        wait: bool,
        /// Why, for the audit.
        #[arg(long)]
        reason: Option<String>,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful worker").await?;
    let output = Output::new(&args.output);
    let silent_after_s = config.queue.silent_after_s();
    let ran = match args.verb {
        Verb::List => list(&store, &output, silent_after_s).await,
        Verb::Drain { worker, wait, .. } => {
            drain(&store, &output, worker.as_deref(), wait, silent_after_s).await
        }
    };
    store.close().await;
    until_reader_goes(ran.map(|()| Exit::Ok))
}

async fn list(store: &Store, output: &Output, silent_after_s: f64) -> anyhow::Result<()> {
    let workers = store.workers().await?;
    output.items(&workers, || queue::worker_table(&workers, silent_after_s))
}

async fn drain(
    store: &Store,
    output: &Output,
    name: Option<&str>,
    wait: bool,
    silent_after_s: f64,
) -> anyhow::Result<()> {
    let worker = match name {
        Some(name) => Some(one(store, name).await?),
        None => None,
    };
    let asked = store.drain_workers(worker.as_deref()).await?;
    let workers = store.workers().await?;
    // A worker of a release that knows no drain does not hear of it.
    let deaf: Vec<String> = workers
        .iter()
        .filter(|worker| asked.contains(&worker.worker_id) && worker.schema_number.is_none())
        .map(|worker| worker.worker_id.clone())
        .collect();
    for worker in &deaf {
        eprintln!("{} is of a release that knows no drain: stop it with SIGTERM", printable(worker));
    }
    let asked: Vec<String> = asked.into_iter().filter(|id| !deaf.contains(id)).collect();
    // One that was killed hears of nothing either. One that was stopped or cut off hears of it when it comes back.
    let (quiet, asked): (Vec<String>, Vec<String>) = asked.into_iter().partition(|id| {
        workers.iter().any(|worker| worker.worker_id == *id && !worker.is_fresh(silent_after_s))
    });
    for worker in workers.iter().filter(|worker| name.is_some() && quiet.contains(&worker.worker_id)) {
        let of = printable(&worker.worker_id);
        match worker.leases {
            0 => eprintln!("{of} sends no heartbeat any more, and holds nothing"),
            held => eprintln!(
                "{of} sends no heartbeat any more: others take its {} when their leases end; it drains if it comes back",
                count(held, "job")
            ),
        }
    }
    if wait {
        // A worker that ends in order removes its row. One that was killed is silent.
        while store
            .workers()
            .await?
            .iter()
            .any(|worker| asked.contains(&worker.worker_id) && worker.is_fresh(silent_after_s))
        {
            tokio::time::sleep(LOOK).await;
        }
    }
    output.one(&json!({"workers": asked, "ended": wait}), || match (asked.len() as i64, wait) {
        (0, _) => "There is no worker to drain.\n".to_owned(),
        (asked, true) => format!("Drained {}.\n", count(asked, "worker")),
        (asked, false) => format!(
            "Asked {} to drain; `wakeful worker list` shows how far that is.\n",
            count(asked, "worker")
        ),
    })
}

/// The worker whose name is `name` or begins so.
async fn one(store: &Store, name: &str) -> anyhow::Result<String> {
    let workers = store.workers().await?;
    let all = || workers.iter().map(|worker| &worker.worker_id);
    if let Some(exact) = all().find(|id| *id == name) {
        return Ok(exact.clone());
    }
    let begun: Vec<&String> = all().filter(|id| id.starts_with(name)).collect();
    match begun[..] {
        [one] => Ok(one.clone()),
        [] => Err(wakeful_store::Error::NotFound { what: "worker", id: name.to_owned() }.into()),
        [..] => Err(Usage(format!("{} workers begin with {name}: name one of them", begun.len())).into()),
    }
}
