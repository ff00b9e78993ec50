//! The tokens of a model call that a cancel cut off. The provider bills them, so they count in the session's totals.
//!
//! A provider counts an answer's tokens at its end, and some count the request's at the beginning. What was not counted is
//! estimated: the request by the rate of the session's earlier requests, and the answer by the text that has come.

use super::cut::Cut;
use super::generate::build;
use crate::ctx::Ctx;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::context;
use wakeful_workflow::record::Usage;
use wakeful_workflow::session::Session;

/// Bytes of a text that are one token.
const BYTES_PER_TOKEN: usize = 4;

/// Returns what the session's newest model call has used, if a cancel cut it off. `None`: it never ran, or it had failed before,
/// or its worker died and nothing is known to have come of it.
pub(super) async fn used(
    ctx: &Ctx,
    session: &Session,
    agent: &Agent,
) -> wakeful_store::Result<Option<Usage>> {
    let Some(call) = session.interrupted.last() else { return Ok(None) };
    let cut = match ctx.cut.take(&call.generation_id) {
        Some(cut) => cut,
        None if call.last_chunk >= 0 => {
            let text = ctx.store.generation_text(&session.session_id, &call.generation_id).await?;
            Cut { bytes: text.len(), counted: Usage::default() }
        }
        None => return Ok(None),
    };
    let mut usage = cut.counted;
    if usage.input_tokens == 0 {
        // Without the agent's tools the context cannot be built, and then nothing is known.
        let Ok(built) = build(ctx, session, agent) else { return Ok(None) };
        usage.input_tokens = context::weigh(session, &built.context.tools, built.rebase.as_ref()).tokens;
    }
    let said = i64::try_from(cut.bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(i64::MAX);
    usage.output_tokens = usage.output_tokens.max(said);
    // What a step's row can hold.
    usage = Usage::default().plus(&usage);
    usage.cost_micros = ctx.config.price(&call.model).cost_micros(&usage);
    Ok(Some(usage))
}
