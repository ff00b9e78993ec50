//! The trace spans of one claim.

use crate::ctx::Ctx;
use crate::telemetry::{self, names};
use tracing::{Span, info_span};
use wakeful_store::queue::Job;
use wakeful_workflow::session::Session;

/// The span of the steps that one claim takes in its session's run.
pub(super) fn of_run(ctx: &Ctx, session: &Session) -> Span {
    let agent = ctx.agent_of(session).ok();
    let (provider, model) = agent
        .as_ref()
        .and_then(|agent| agent.model.split_once('/'))
        .map_or((None, None), |(p, m)| (Some(p), Some(m)));
    info_span!(
        "invoke_agent",
        "otel.name" = names::invoke_agent(&session.agent),
        "otel.kind" = names::KIND_INTERNAL,
        { names::OPERATION_NAME } = names::OPERATION_INVOKE_AGENT,
        { names::AGENT_NAME } = session.agent,
        { names::PROVIDER_NAME } = provider,
        { names::REQUEST_MODEL } = model,
        { names::SESSION_ID } = %session.session_id,
        { names::CONVERSATION_ID } = %session.conversation_id,
        { names::RUN_ID } = session.run.as_ref().map(|run| run.run_id.as_str()),
    )
}

/// The root span of a new trace for one claim. It links to the spans that the job's trace context names: the
/// one that enqueued the job, and that of the claim before.
pub(super) fn of_claim(job: &Job) -> Span {
    let span = info_span!(
        parent: None,
        names::PROCESS_STEP,
        "otel.kind" = names::KIND_CONSUMER,
        { names::SESSION_ID } = job.session_id,
        { names::CONVERSATION_ID } = %job.conversation_id,
        { names::STEP_NUMBER } = job.step_number,
        { names::STEP_ATTEMPT } = job.attempt,
        { names::JOB_ID } = job.lease.job_id,
        { names::MESSAGING_SYSTEM } = names::MESSAGING_SYSTEM_WAKEFUL,
        { names::MESSAGING_OPERATION_NAME } = names::MESSAGING_PROCESS,
        { names::MESSAGING_OPERATION_TYPE } = names::MESSAGING_PROCESS,
        { names::MESSAGING_DESTINATION_NAME } = job.kind.as_str(),
    );
    if let Some(trace_context) = &job.lease.trace_context {
        telemetry::link(&span, trace_context);
    }
    span
}
