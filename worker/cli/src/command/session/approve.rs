//! `wakeful session approve` and `decline`: says whether a tool call that waits for a person may run.

use super::super::output::{Output, printable};
use super::{Exit, not_now};
use wakeful_store::resolve::{Decision, Effect};
use wakeful_store::{Error, Store};
use wakeful_workflow::resolve::Resolution;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// The session's id.
    pub(super) session: String,
    /// The id of the call, as `session why` lists it. Not needed if only one waits.
    call: Option<String>,
    /// The reason, for the journal. The model reads why a call was declined.
    #[arg(long)]
    reason: Option<String>,
    /// The person who decides, for the journal.
    #[arg(long, value_name = "WHO")]
    by: Option<String>,
    /// The hash of the arguments that you read, as `session show -o json` has it: refused if the call has others.
    #[arg(long, value_name = "SHA256")]
    args_sha256: Option<String>,
}

pub(super) async fn decide(
    store: &Store,
    output: &Output,
    args: Args,
    resolution: Resolution,
) -> anyhow::Result<Exit> {
    let call_id = match args.call {
        Some(call_id) => call_id,
        None => store.unapproved_call(&args.session).await?,
    };
    let about = store.effect_in_words(&args.session, &call_id).await?.unwrap_or_default();
    let decision = Decision {
        effect: Effect::Call(call_id),
        resolution,
        by: args.by,
        reason: args.reason,
        args_sha256: args.args_sha256,
        tell: false,
        trace_context: wakeful_engine::telemetry::trace_context(),
    };
    let decided = match store.resolve(&args.session, &decision).await {
        Err(Error::Conflict { session_id, status, wanted }) => {
            return not_now(store, &session_id, status, wanted).await;
        }
        decided => decided?,
    };
    store.announce(&args.session).await?;
    output.one(&decided, || {
        let goes_on =
            decided.run_id.as_ref().map(|run| format!("; {} goes on", printable(run))).unwrap_or_default();
        let before = if decided.duplicate { " (as it was said before)" } else { "" };
        format!(
            "{}: {} ({}) is {}{goes_on}{before}\n",
            printable(&decided.session_id),
            printable(about.trim_end()),
            printable(&decided.effect),
            decided.resolution
        )
    })?;
    Ok(Exit::Ok)
}
