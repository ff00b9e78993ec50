//! `wakeful session resolve`: records what a person found out about an uncertain tool call or delivery.

use super::super::Usage;
use super::super::output::{Output, printable};
use super::{Exit, not_now};
use wakeful_store::resolve::{Decision, Effect};
use wakeful_store::{Error, Store};
use wakeful_workflow::resolve::Resolution;

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("outcome").required(true)))]
pub(in crate::command) struct Args {
    /// The session's id.
    pub(super) session: String,
    /// The id of a call or a delivery, as `session why` lists them.
    effect: String,
    /// It took effect; this is what it would have returned.
    #[arg(long, group = "outcome", value_name = "RESULT")]
    happened: Option<String>,
    /// It did not take effect. Refused while the process that started it may still carry it out.
    #[arg(long, group = "outcome")]
    did_not_happen: bool,
    /// The outcome cannot be found out: tell the model so, and go on.
    #[arg(long, group = "outcome")]
    let_model_decide: bool,
    /// The reason, for the journal.
    #[arg(long)]
    reason: Option<String>,
    /// The person who says so, for the journal.
    #[arg(long, value_name = "WHO")]
    by: Option<String>,
    /// Send the session a message with the outcome, if its model was told that it is unknown.
    #[arg(long)]
    tell: bool,
}

pub(super) async fn resolve(store: &Store, output: &Output, args: Args) -> anyhow::Result<Exit> {
    let resolution = match (args.happened, args.did_not_happen) {
        (Some(result), _) if result.len() > wakeful_http::body::BODY_LIMIT_BYTES => {
            let text = format!("the result is larger than {} bytes", wakeful_http::body::BODY_LIMIT_BYTES);
            return Err(Usage(text).into());
        }
        (Some(result), _) => Resolution::Happened { result },
        (None, true) => Resolution::DidNotHappen,
        (None, false) => Resolution::LetModelDecide,
    };
    let mut decision = Decision {
        effect: Effect::Call(args.effect.clone()),
        resolution,
        by: args.by,
        reason: args.reason,
        args_sha256: None,
        tell: args.tell,
        trace_context: wakeful_engine::telemetry::trace_context(),
    };
    let mut resolved = store.resolve(&args.session, &decision).await;
    // Try it as a call first. Call ids come from the providers, but a delivery's id never equals one.
    if let Err(Error::NotFound { what: "call", .. }) = resolved {
        decision.effect = Effect::Delivery(args.effect.clone());
        resolved = store.resolve(&args.session, &decision).await;
    }
    let resolved = match resolved {
        Err(Error::NotFound { what: "delivery", id }) => {
            return Err(Error::NotFound { what: "call or delivery", id }.into());
        }
        Err(Error::Conflict { session_id, status, wanted }) => {
            return not_now(store, &session_id, status, wanted).await;
        }
        resolved => resolved?,
    };
    store.announce(&args.session).await?;
    output.one(&resolved, || {
        let goes_on =
            resolved.run_id.as_ref().map(|run| format!("; {} goes on", printable(run))).unwrap_or_default();
        let before = if resolved.duplicate { " (as it was said before)" } else { "" };
        let told = match &resolved.told_run_id {
            Some(run) => format!("; the session was told, and {} reads it", printable(run)),
            None if resolved.model_believes_unknown => {
                "\nIts model was told that the outcome is unknown. To send it this outcome, say the same again with --tell."
                    .to_owned()
            }
            None => String::new(),
        };
        format!(
            "{}: {} is {}{goes_on}{before}{told}\n",
            printable(&resolved.session_id),
            printable(&resolved.effect),
            resolved.status
        )
    })?;
    Ok(Exit::Ok)
}
