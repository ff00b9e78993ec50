//! Compaction: a separate model call that summarises the context. Readers do not see its text.

use super::Unperformed;
use super::generate;
use super::intent::{self, RecordedIntent};
use crate::ctx::Ctx;
use crate::model::{Deltas as _, Model};
use crate::telemetry;
use crate::watchdog::UNYIELDING;
use std::time::Instant;
use tracing::{Instrument, info, warn};
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{Compaction, CompactionEnd, Performed};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::context::compaction;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{Block, Reply};
use wakeful_workflow::session::Session;
use wakeful_workflow::wire::Request;

/// Asks the model for a summary. If the provider finds the request too long, asks again without the oldest
/// turns, leaving out more each time. A fault becomes a failed summary and is counted: after
/// [`compaction::FAILURES`] of them the run goes on without a summary.
pub(super) async fn compact(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
) -> Result<Performed, Unperformed> {
    let model = ctx.plugins.models.get(&agent.model)?;
    let tools = ctx.configured_tools(session, agent)?;
    let window = ctx.config.context_window(&agent.model);
    let mut attempt = generate::next_attempt(session);
    let mut without = 0;
    let mut context = compaction::request(session, tools.clone(), 0);
    loop {
        // Cannot happen: the request is `None` only when turns are left out, and that case ends below.
        let Some(asked) = context else {
            return Err(Fault::Internal { message: "there is nothing to summarise".to_owned() }.into());
        };
        let request = model.request(&asked);
        let request_sha256 = request.sha256();
        let asked_for = (&request, request_sha256.as_str());
        let RecordedIntent { generation_id, started_at, repairs } =
            intent::begin_compaction(ctx, lease, session, attempt, &agent.model, asked_for).await?;
        wakeful_store::failpoint!("K28");
        let answered = call(ctx, lease, session, agent, model.as_ref(), &request).await;
        let end = match answered.and_then(written) {
            Err(fault @ Fault::ContextOverflow { .. }) => {
                without = (without * 2).max(1);
                context = compaction::request(session, tools.clone(), without);
                if context.is_some() {
                    attempt += 1;
                    info!(session.id = %session.session_id, "The request for the summary is too long: asking again without the oldest {without} turns");
                    continue;
                }
                CompactionEnd::Failed(fault)
            }
            // Nothing is wrong with the request, so the summary is asked for again when the provider is back.
            Err(fault) if fault.is_outage() => return Err(fault.into()),
            Err(fault) => CompactionEnd::Failed(fault),
            Ok((text, mut reply)) => {
                reply.usage.cost_micros = ctx.config.price(&agent.model).cost_micros(&reply.usage);
                ctx.metrics.model_used(&agent.model, &reply.usage);
                info!(session.id = %session.session_id, "Summarised the context: it was close to the context window of {}", agent.model);
                CompactionEnd::Written {
                    text: compaction::text(&text, &session.state),
                    finish_reason: reply.finish_reason,
                    usage: reply.usage,
                    rebase: compaction::rebase(session, &tools, window),
                }
            }
        };
        if let CompactionEnd::Failed(fault) = &end {
            let fault = fault.in_log();
            let fault = ctx.store.in_log(Some(session.session_id.as_str()), &fault);
            warn!(session.id = %session.session_id, fault, model = %agent.model, "The context was not summarised");
        }
        return Ok(Performed::Compacted(Compaction {
            generation_id,
            attempt,
            model: agent.model.clone(),
            request_sha256,
            started_at,
            repairs,
            end,
        }));
    }
}

async fn call(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    model: &dyn Model,
    request: &Request,
) -> Result<Reply, Fault> {
    let span = generate::span_of_call(session, &agent.model);
    let what = format!("the call of model {} for a summary of session {}", agent.model, session.session_id);
    let mut unanswered = ctx.gates.begin_call(ctx.plugins.models.gate_of(&agent.model), lease);
    let began = Instant::now();
    let calling = super::called(&agent.model, model.call(request, &mut unanswered));
    let answered = ctx.watchdog.watch(lease.job_id, what, UNYIELDING, calling).instrument(span.clone()).await;
    if answered.as_ref().map_or_else(Fault::is_answer, |_| true) {
        unanswered.began();
    }
    let outcome = answered.as_ref().map_or_else(Fault::kind, |_| "ok");
    ctx.metrics.model_called(&agent.model, outcome, began.elapsed(), None);
    answered.inspect_err(|fault| telemetry::failed(&span, fault.kind()))
}

/// Returns the text of the summary. Ignores tool calls: the instruction forbids them, but a model may ask
/// anyway.
fn written(reply: Reply) -> Result<(String, Reply), Fault> {
    let texts: Vec<&str> = reply
        .content
        .iter()
        .filter_map(|block| match block {
            Block::Text { text } => Some(text.trim()),
            Block::ToolCall(_) | Block::ToolResult(_) | Block::Provider { .. } => None,
        })
        .filter(|text| !text.is_empty())
        .collect();
    if texts.is_empty() {
        return Err(Fault::EmptyReply);
    }
    Ok((texts.join("\n\n"), reply))
}
