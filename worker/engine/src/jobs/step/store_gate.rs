//! What a step does while a store of blobs is away: its job waits at a gate, as at that of a provider, and its run never fails
//! for it. One job at a time finds out whether the store is back.

use super::provider::{Back, Troubles};
use super::{ClaimEnd, provider};
use crate::ctx::Ctx;
use crate::gates::{Admission, STORE};
use crate::tool::FileUse;
use tracing::warn;
use wakeful_store::queue::Job;
use wakeful_store::{Error, Result};
use wakeful_workflow::plan::PlannedCall;
use wakeful_workflow::session::Session;

fn gate_of(store: &str) -> String {
    format!("{STORE}{store}")
}

/// Looks at the gates of the stores that the calls need. `Some`: the claim ends here, because one is not open. Asks the database
/// only while a gate is not open.
///
/// # Errors
/// Those of [`crate::gates::Gates::admit`].
pub(super) async fn admit(
    ctx: &Ctx,
    job: &Job,
    session: &Session,
    calls: &[PlannedCall],
    troubles: &mut Troubles,
) -> Result<Option<ClaimEnd>> {
    let uses_files = |call: &PlannedCall| {
        let tool = ctx.plugins.tools.get(&call.call.name);
        tool.is_some_and(|tool| tool.file_use() != FileUse::None)
    };
    if ctx.gates.all_open() || !calls.iter().any(uses_files) {
        return Ok(None);
    }
    for name in ctx.store.stores_of(session.session_id.as_str(), session.workspace.as_ref()).await? {
        let gate_id = gate_of(&name);
        match ctx.gates.admit(&ctx.store, &gate_id, &job.lease, troubles.pass()).await? {
            Admission::Free => {}
            Admission::Wait(error) => {
                let error = error.unwrap_or_else(|| format!("the blob store {name} is away"));
                return Ok(Some(waits(error, gate_id)));
            }
            Admission::Probe(_probe) => match ctx.store.blob_stores().ask(&name).await {
                Ok(()) => troubles.let_through(ctx.gates.saw_success(&ctx.store, &gate_id, true).await?),
                Err(error) => {
                    let error = error.to_string();
                    ctx.gates.saw_away(&ctx.store, &gate_id, true, &error).await?;
                    return Ok(Some(waits(error, gate_id)));
                }
            },
        }
    }
    Ok(None)
}

/// A store did not do what the step asked. Its gate is shut at once: the store's client has tried it several times.
pub(super) async fn away(ctx: &Ctx, error: &Error) -> ClaimEnd {
    let store = if let Error::BlobStore { store, .. } = error { store } else { "" };
    let (gate_id, error) = (gate_of(store), error.to_string());
    match ctx.gates.saw_away(&ctx.store, &gate_id, false, &error).await {
        Ok(_) => waits(error, gate_id),
        Err(failed) => {
            warn!(%failed, "The outage of a blob store was not recorded at its gate; the next one is");
            ClaimEnd::Retry { kind: "blob_store", error, at_least: None }
        }
    }
}

fn waits(error: String, gate_id: String) -> ClaimEnd {
    ClaimEnd::SetBack { kind: "blob_store", back: Box::new(Back::at(gate_id, provider::LOOK, error)) }
}
