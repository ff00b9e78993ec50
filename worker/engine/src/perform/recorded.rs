//! Recorded answers: a replay takes answers, summaries and tool results from its source's log instead of
//! calling a model or a tool.

use super::Unperformed;
use super::generate;
use super::intent::{self, RecordedIntent};
use crate::ctx::Ctx;
use crate::model::renderings::Outline;
use tracing::{info, warn};
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{CallEnd, Compaction, CompactionEnd, Generated, Performed};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::context::{self, Built, compaction};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::id::{CallId, GenerationId};
use wakeful_workflow::record::{FinishReason, Reply};
use wakeful_workflow::replay::{self, RecordedCall, RecordedReply, RecordedResult};
use wakeful_workflow::session::{CallOutcome, Session};

/// Returns the source's reply instead of calling the model. It still builds the request as the source's
/// model would get it, and journals its hash. Equal hashes prove that both contexts are the same, byte for
/// byte.
pub(super) async fn reply(ctx: &Ctx, session: &Session, agent: &Agent) -> Result<Performed, Unperformed> {
    let source = ctx.recordings.of(&ctx.store, session).await?.ok_or_else(no_source)?;
    let (rules, recording) = (&source.rules, &*source.recording);
    let answer = source.follower().follow(session, rules, recording).answer()?;
    let model_name = answer.call.map_or(&agent.model, |call| &call.model);
    let model = ctx.plugins.models.get(model_name)?;
    let agent = with_recorded_strategy(agent, answer.call);
    // A rebase names messages by number. If this answer has the same number as in the source, reuse the
    // source's rebase, so that the context begins at the same message.
    let number = session.last_message_number + session.inbox.len() as i64 + 1;
    let Built { context, rebase } = if answer.call.is_some() && answer.record.message_number == number {
        let tools = ctx.configured_tools(session, &agent)?;
        context::build_again(session, tools, recording.rebase_of(number))
    } else {
        generate::build(ctx, session, &agent)?
    };
    let effects = generate::effects(ctx, &context.tools);
    let draft = ctx.renderings.draft(&session.session_id, model_name, model.as_ref(), &context);
    let Outline { sha256: request_sha256, repairs, prefill } =
        draft.outline(replay::prefill(&answer).as_deref());
    drop(draft);
    compare(session, &answer, &request_sha256);
    wakeful_store::failpoint!("K6");
    let details = &answer.record.details;
    Ok(Performed::Replied(Generated {
        generation_id: GenerationId::from(wakeful_store::new_id("gen")),
        attempt: generate::next_attempt(session),
        model: model_name.clone(),
        request_sha256,
        // No call begins, so no intent is written.
        started_at: None,
        repairs: repairs.total() as i64,
        resumes: None,
        prefill_bytes: prefill.as_ref().map(|prefill| prefill.len() as i64),
        context_strategy: agent.context.strategy,
        rebase,
        reply: Reply::new(
            answer.record.content.to_vec(),
            details.finish_reason.unwrap_or(FinishReason::Stop),
            // The usage of the recorded call. The replay itself pays nothing.
            details.usage.unwrap_or_default(),
        ),
        effects,
    }))
}

/// Returns the summary that the source wrote at this point, instead of calling the model for one. `None` if
/// the source wrote no summary here.
pub(super) async fn summary(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
) -> Result<Option<Performed>, Unperformed> {
    let source = ctx.recordings.of(&ctx.store, session).await?.ok_or_else(no_source)?;
    let summary = source.follower().follow(session, &source.rules, &source.recording).summary();
    let Some(answer) = summary else {
        return Ok(None);
    };
    let model_name = answer.call.map_or(&agent.model, |call| &call.model);
    let model = ctx.plugins.models.get(model_name)?;
    let tools = ctx.configured_tools(session, agent)?;
    let nothing = || Fault::RecordingOver { message: "there is nothing to summarise here".to_owned() };
    let asked = compaction::request(session, tools.clone(), 0).ok_or_else(nothing)?;
    let request = model.request(&asked);
    let request_sha256 = request.sha256();
    compare(session, &answer, &request_sha256);
    let attempt = generate::next_attempt(session);
    let asked_for = (&request, request_sha256.as_str());
    let RecordedIntent { generation_id, started_at, repairs } =
        intent::begin_compaction(ctx, lease, session, attempt, model_name, asked_for).await?;
    wakeful_store::failpoint!("K28");
    let details = &answer.record.details;
    // A rebase names messages by number, so the source's rebase fits only if the summary has the same number
    // here.
    let recorded = answer.call.and_then(|call| call.rebase.clone());
    let rebase = recorded
        .filter(|_| answer.record.message_number == session.last_message_number + 1)
        .unwrap_or_else(|| compaction::rebase(session, &tools, ctx.config.context_window(&agent.model)));
    Ok(Some(Performed::Compacted(Compaction {
        generation_id,
        attempt,
        model: model_name.clone(),
        request_sha256,
        started_at,
        repairs,
        end: CompactionEnd::Written {
            text: answer.record.text(),
            finish_reason: details.finish_reason.unwrap_or(FinishReason::Stop),
            usage: details.usage.unwrap_or_default(),
            rebase,
        },
    })))
}

/// Logs a warning if the request differs from the source's. Both journals have the hashes.
fn compare(session: &Session, answer: &RecordedReply<'_>, request_sha256: &str) {
    let number = answer.record.message_number;
    if answer.call.is_some_and(|call| call.request_sha256 != request_sha256) {
        warn!(session.id = %session.session_id, message_number = number, "The request differs from the one that message {number} of the source answers");
    }
}

/// Returns the agent with the context strategy of the recorded call. The configuration of this process may
/// name another strategy.
fn with_recorded_strategy(agent: &Agent, call: Option<&RecordedCall>) -> Agent {
    let mut agent = agent.clone();
    if let Some(call) = call {
        agent.context.strategy = call.context_strategy;
    }
    agent
}

/// How a tool call ended in the source.
pub(super) enum Recorded {
    /// It settled. The number is that of the result's message in the source.
    Settled(CallEnd, i64),
    /// It asked the user a question, and a person answered: the replay asks again.
    Asked,
    Never,
}

/// Looks up how the call `call_id` ended in the source's log.
pub(super) async fn result(ctx: &Ctx, session: &Session, call_id: &CallId) -> Result<Recorded, Unperformed> {
    let source = ctx.recordings.of(&ctx.store, session).await?.ok_or_else(no_source)?;
    let recorded = source.follower().follow(session, &source.rules, &source.recording).result(call_id);
    Ok(match recorded {
        Some(RecordedResult::Settled { status, result, message_number }) => {
            let content = match &result.output {
                None => result.content.clone(),
                // The message holds only an excerpt of a large output. Return the whole output; the commit
                // cuts the same excerpt from it again.
                Some(output) => {
                    let of = &source.recording.session.session_id;
                    let whole = ctx.store.tool_output(of, &result.call_id, 0, output.bytes).await?;
                    whole.map_or_else(|| result.content.clone(), |whole| whole.text)
                }
            };
            let outcome = CallOutcome { content, is_error: result.is_error, details: result.details.clone() };
            Recorded::Settled(CallEnd::Settled(status, outcome), message_number)
        }
        Some(RecordedResult::Asked) => Recorded::Asked,
        None => {
            info!(session.id = %session.session_id, call.id = %call_id, "The source has no result of this call: running it dry");
            Recorded::Never
        }
    })
}

fn no_source() -> Fault {
    Fault::RecordingOver { message: "the session's policy names no source".to_owned() }
}
