//! `wakeful session wake`: runs the healer on one session.

use super::super::output::{Output, printable};
use super::Exit;
use serde_json::json;
use wakeful_store::Store;

pub(super) async fn wake(store: &Store, output: &Output, id: &str) -> anyhow::Result<Exit> {
    let healed = store.wake_session(id).await?;
    if !healed.is_empty() {
        store.announce(id).await?;
    }
    output.one(&json!({"session_id": id, "healed": healed}), || {
        if healed.is_empty() {
            return format!("{}: nothing was wrong\n", printable(id));
        }
        let lines: Vec<String> = healed
            .iter()
            .map(|one| format!("{}: {}\n", printable(id), printable(&one.to_string())))
            .collect();
        lines.concat()
    })?;
    Ok(Exit::Ok)
}
