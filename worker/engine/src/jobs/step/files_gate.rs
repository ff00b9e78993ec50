//! What a step does while the files of its session cannot be had, because a blob store is away or the URL that the files begin
//! with does not answer. The step's job waits at a gate, as it does for a provider, and its run never fails for that. One job
//! at a time finds out whether the store or the URL is back: it asks the store, or its step fetches from the URL.

use super::ClaimEnd;
use super::provider::{Back, Troubles};
use crate::ctx::Ctx;
use crate::gates::{Admission, Probe};
use crate::tool::FileUse;
use tracing::warn;
use wakeful_config::CloneFrom;
use wakeful_store::queue::Job;
use wakeful_store::{Error, Result};
use wakeful_workflow::gate::{CLONE, STORE};
use wakeful_workflow::plan::Action;
use wakeful_workflow::session::Session;

/// The name of a gate has at most so many characters of its URL.
const URL_CHARS: usize = 300;

/// Whether the step may make its calls.
pub(super) enum Admitted<'a> {
    /// It may. With a right to probe it is the one that finds out whether the URL answers.
    Go(Option<CloneProbe<'a>>),
    /// The claim ends here, because a gate is not open.
    Wait(ClaimEnd),
}

/// The right to fetch from a URL whose gate is shut.
pub(super) struct CloneProbe<'a> {
    gate_id: String,
    _probe: Probe<'a>,
}

fn gate_of_store(store: &str) -> String {
    format!("{STORE}{store}")
}

/// The gate of what the session's files begin with, if that is behind a URL and they have not begun. Its query may hold a
/// secret.
fn gate_of_clone(ctx: &Ctx, session: &Session) -> Option<String> {
    let CloneFrom::Url(url) = ctx.seed_of(session)? else { return None };
    let place: String = url.split(['?', '#']).next()?.chars().take(URL_CHARS).collect();
    Some(format!("{CLONE}{place}"))
}

fn uses_files(ctx: &Ctx, tool: &str) -> bool {
    ctx.plugins.tools.get(tool).is_some_and(|tool| tool.file_use() != FileUse::None)
}

/// Returns whether these tools may run before [`admit`] is asked: their files need no URL, and no gate is shut.
pub(super) fn may_run_ahead<'c>(
    ctx: &Ctx,
    session: &Session,
    mut tools: impl Iterator<Item = &'c str>,
) -> bool {
    !tools.any(|tool| uses_files(ctx, tool))
        || (ctx.gates.all_open() && gate_of_clone(ctx, session).is_none())
}

/// Looks at the gates of what the calls need. Asks the database only while a gate is not open.
///
/// # Errors
/// Those of [`crate::gates::Gates::admit`].
pub(super) async fn admit<'a>(
    ctx: &'a Ctx,
    job: &Job,
    session: &Session,
    action: &Action,
    troubles: &mut Troubles,
) -> Result<Admitted<'a>> {
    let Action::CallTools { calls } = action else { return Ok(Admitted::Go(None)) };
    if ctx.gates.all_open() || !calls.iter().any(|one| uses_files(ctx, &one.call.name)) {
        return Ok(Admitted::Go(None));
    }
    for name in ctx.store.stores_of(session.session_id.as_str(), session.workspace.as_ref()).await? {
        let gate_id = gate_of_store(&name);
        match ctx.gates.admit(&ctx.store, &gate_id, &job.lease, troubles.pass()).await? {
            Admission::Free => {}
            Admission::Wait(error) => {
                let error = error.unwrap_or_else(|| format!("the blob store {name} is away"));
                return Ok(Admitted::Wait(waits(STORE_KIND, error, gate_id)));
            }
            Admission::Probe(_probe) => match ctx.store.blob_stores().ask(&name).await {
                Ok(()) => troubles.let_through(ctx.gates.saw_success(&ctx.store, &gate_id, true).await?),
                Err(error) => {
                    let error = error.to_string();
                    ctx.gates.saw_away(&ctx.store, &gate_id, true, &error).await?;
                    return Ok(Admitted::Wait(waits(STORE_KIND, error, gate_id)));
                }
            },
        }
    }
    let Some(gate_id) = gate_of_clone(ctx, session) else { return Ok(Admitted::Go(None)) };
    Ok(match ctx.gates.admit(&ctx.store, &gate_id, &job.lease, troubles.pass()).await? {
        Admission::Free => Admitted::Go(None),
        Admission::Probe(probe) => Admitted::Go(Some(CloneProbe { gate_id, _probe: probe })),
        Admission::Wait(error) => {
            let error = error.unwrap_or_else(|| "the URL that its files begin with is away".to_owned());
            Admitted::Wait(waits(CLONE_KIND, error, gate_id))
        }
    })
}

/// A store did not do what the step asked. Its gate is shut at once: the store's client has tried it several times.
pub(super) async fn store_away(ctx: &Ctx, error: &Error) -> ClaimEnd {
    let store = if let Error::BlobStore { store, .. } = error { store } else { "" };
    shut(ctx, STORE_KIND, gate_of_store(store), false, error.to_string()).await
}

/// The URL that the session's files begin with did not answer. Its gate is shut at once: each try may take long.
pub(super) async fn clone_away(
    ctx: &Ctx,
    session: &Session,
    probe: Option<CloneProbe<'_>>,
    why: &str,
) -> ClaimEnd {
    let error = format!("the files that this agent's sessions begin with cannot be fetched now: {why}");
    match gate_of_clone(ctx, session) {
        Some(gate_id) => shut(ctx, CLONE_KIND, gate_id, probe.is_some(), error).await,
        None => ClaimEnd::Retry { kind: CLONE_KIND, error, at_least: None },
    }
}

/// The calls were made, so what was probed answers: with the files, or with a refusal that the model has read.
pub(super) async fn performed(ctx: &Ctx, probe: Option<CloneProbe<'_>>, troubles: &mut Troubles) {
    let Some(CloneProbe { gate_id, _probe }) = probe else { return };
    match ctx.gates.saw_success(&ctx.store, &gate_id, true).await {
        Ok(opening) => troubles.let_through(opening),
        Err(error) => warn!(%error, "An answer was not recorded at its gate; the next one is"),
    }
}

const STORE_KIND: &str = "blob_store";
const CLONE_KIND: &str = "clone_away";

async fn shut(ctx: &Ctx, kind: &'static str, gate_id: String, probe: bool, error: String) -> ClaimEnd {
    match ctx.gates.saw_away(&ctx.store, &gate_id, probe, &error).await {
        Ok(_) => waits(kind, error, gate_id),
        Err(failed) => {
            warn!(%failed, "An outage was not recorded at its gate; the next one is");
            ClaimEnd::Retry { kind, error, at_least: None }
        }
    }
}

fn waits(kind: &'static str, error: String, gate_id: String) -> ClaimEnd {
    ClaimEnd::SetBack { kind, back: Box::new(Back::at(gate_id, crate::jobs::LOOK, error)) }
}
