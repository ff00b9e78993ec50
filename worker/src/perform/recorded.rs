//! What a replay is answered out of its source's log, in place of a model call or of a tool.

use super::Interrupted;
use crate::Ctx;
use tracing::{info, warn};
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{Ending, Generated, Outcome};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::context::Context;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::id::{CallId, GenerationId};
use wakeful_workflow::record::{FinishReason, Reply};
use wakeful_workflow::replay::{self, RecordedResult};
use wakeful_workflow::session::{CallOutcome, Session};

/// The source's answer in the place of the one that is owed. The request is made all the same, as the source's model would
/// be sent it, and its hash is journalled: it tells whether the context is the same, byte for byte.
pub(super) async fn answer(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
) -> Result<Outcome, Interrupted> {
    let source = ctx.recordings.of(ctx, session).await?.ok_or_else(no_source)?;
    let (rules, recording) = (&source.rules, &*source.recording);
    let answer = replay::answer(session, rules, recording)?;
    let model_name = answer.call.map_or(&agent.model, |call| &call.model);
    let model = ctx.models.get(model_name)?;
    let (context, effects) = super::generate::told(ctx, session, agent)?;
    let base = model.request(&context);
    let base_sha256 = base.sha256();
    let request = match replay::prefill(&answer) {
        Some(prefill) => model.request(&Context { prefill: Some(prefill), ..context }),
        None => base,
    };
    let request_sha256 = request.sha256();
    if let Some(call) = answer.call
        && call.request_sha256 != request_sha256
    {
        let number = answer.record.message_number;
        warn!(session.id = %session.session_id, message_number = number, "The request is not the one that message {number} of the source answers");
    }
    let generation_id = GenerationId::from(wakeful_store::new_id("gen"));
    let attempt = session.interrupted.last().map_or(0, |last| last.attempt) + 1;
    let repairs = request.repairs.total() as i64;
    let new = NewGeneration {
        session_id: &session.session_id,
        generation_id: &generation_id,
        step_number: session.last_step_number + 1,
        attempt,
        model: model_name,
        request_sha256: &request_sha256,
        base_sha256: &base_sha256,
        repairs,
        resumes: None,
    };
    let Some(started_at) = ctx.store.begin_generation(lease, &new).await? else {
        return Err(Interrupted::Moved);
    };
    crate::failpoint("K6");
    let details = &answer.record.details;
    Ok(Outcome::Replied(Generated {
        generation_id,
        attempt,
        model: model_name.clone(),
        request_sha256,
        started_at,
        repairs,
        resumes: None,
        prefill_bytes: request.prefill.as_ref().map(|prefill| prefill.len() as i64),
        reply: Reply {
            content: answer.record.content.clone(),
            finish_reason: details.finish_reason.unwrap_or(FinishReason::Stop),
            // What it cost then: nothing is paid now.
            usage: details.usage.unwrap_or_default(),
        },
        effects,
    }))
}

/// What came of the call in the source.
pub(super) enum Recorded {
    /// And the source's number of the message that says so.
    Ending(Ending, i64),
    /// A person answered it: it is asked again.
    Asked,
    Never,
}

/// Looks the call up in the source's log.
pub(super) async fn result(ctx: &Ctx, session: &Session, call_id: &CallId) -> Result<Recorded, Interrupted> {
    let source = ctx.recordings.of(ctx, session).await?.ok_or_else(no_source)?;
    Ok(match replay::result(session, &source.rules, &source.recording, call_id) {
        Some(RecordedResult::Settled { status, result, message_number }) => {
            let outcome = CallOutcome {
                content: result.content.clone(),
                is_error: result.is_error,
                details: result.details.clone(),
            };
            Recorded::Ending(Ending::Settled(status, outcome), message_number)
        }
        Some(RecordedResult::Asked) => Recorded::Asked,
        None => {
            info!(session.id = %session.session_id, call.id = %call_id, "The source has no result of this call: it is a dry run");
            Recorded::Never
        }
    })
}

fn no_source() -> Fault {
    Fault::RecordingOver { message: "the session's policy names no source".to_owned() }
}
