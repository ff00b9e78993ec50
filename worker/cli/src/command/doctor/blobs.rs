//! Checks of the blob stores outside of Postgres.

use super::super::output::{count, printable};
use super::Report;
use std::time::Duration;
use wakeful_store::{Result, Store};

/// How long each store has to answer.
const ANSWER: Duration = Duration::from_secs(3);

/// Asks each blob store, and names the stores that have blobs and are not in this configuration.
pub(super) async fn check(store: &Store, report: &mut Report) -> Result<()> {
    let known: Vec<String> = store.blob_stores().names().map(str::to_owned).collect();
    for name in &known {
        let asked = tokio::time::timeout(ANSWER, store.blob_stores().ask(name)).await;
        let said = match asked {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => {
                Err(format!("the blob store {name} does not answer within {} seconds", ANSWER.as_secs()))
            }
        };
        match said {
            Ok(()) => report.ok("blobs", format!("the blob store {} answers", printable(name))),
            Err(error) => report.problem(
                "blobs",
                printable(&error).to_string(),
                "sessions that need files of it wait, and go on when it answers. Look at its address, its credentials in \
                 this environment, and the way to it",
            ),
        }
    }
    for of in store.blobs_by_store(None).await? {
        let Some(name) = of.store.filter(|name| !known.contains(name)) else { continue };
        report.problem(
            "blobs",
            format!("{} are in {}, which [blobs] does not name", count(of.blobs, "blob"), printable(&name)),
            "name it in [blobs] also; `wakeful blobs move` then brings them to [blobs] store",
        );
    }
    for due in store.removals_due().await? {
        report.warning(
            "blobs",
            format!(
                "{} are still in {}, although nothing names them any more",
                count(due.blobs, "blob"),
                printable(due.store.as_deref().unwrap_or_default())
            ),
            "wakeful blobs gc",
        );
    }
    Ok(())
}
