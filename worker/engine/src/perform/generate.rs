//! Hop 4: the model call. It records its intent in `generations`, streams the text to readers, and returns
//! the answer as the outcome.

use super::Abandoned;
use super::chunks::{Piece, Writer};
use super::intent::{self, Intent, RecordedIntent};
use crate::ctx::Ctx;
use crate::model::Deltas;
use crate::telemetry::{self, names};
use crate::watchdog::UNYIELDING;
use opentelemetry::{Array, StringValue, Value};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::{Instrument, Span, info, warn};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{Generated, Outcome};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::context::{self, Built, Context};
use wakeful_workflow::effect::Effect;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::generation::{CutOffCall, Purpose};
use wakeful_workflow::record::Usage;
use wakeful_workflow::resume::{self, NextCall};
use wakeful_workflow::session::Session;

/// Makes one model call. If this process crashes during the call, its row in `generations` and its chunks
/// stay, and the next claim makes another attempt.
pub(super) async fn call_model(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
) -> Result<Outcome, Abandoned> {
    let model = ctx.plugins.models.get(&agent.model)?;
    let (Built { context, rebase }, effects) = context_and_effects(ctx, session, agent)?;
    let base = model.request(&context);
    let base_sha256 = base.sha256();
    let next =
        NextCall { model: &agent.model, base_sha256: &base_sha256, takes_prefill: model.takes_prefill() };
    let cut_off = cut_off(ctx, session, &next).await?;
    let (request, request_sha256, resumes) = match cut_off {
        Some((attempt, prefill)) => {
            let request = model.request(&Context { prefill: Some(prefill), ..context });
            let request_sha256 = request.sha256();
            info!(session.id = %session.session_id, "The model continues the text of attempt {}", attempt.attempt);
            let resumes = request.prefill.is_some().then_some(&attempt.generation_id);
            (request, request_sha256, resumes)
        }
        // Hash the request only once; it can be megabytes.
        None => (base, base_sha256.clone(), None),
    };
    let kinds = &request.repairs;
    let repairs = kinds.total();
    if repairs > 0 {
        info!(session.id = %session.session_id, repairs, ?kinds, "Repaired {repairs} violations on the request's copy of the transcript");
    }
    let attempt = intent::next_attempt(session);
    let intent = Intent {
        attempt,
        model: &agent.model,
        request: &request,
        request_sha256: &request_sha256,
        base_sha256: &base_sha256,
        resumes,
        purpose: Purpose::Reply,
        context_strategy: agent.context.strategy,
    };
    let RecordedIntent { generation_id, started_at, repairs } =
        intent::begin(ctx, lease, session, &intent).await?;
    ctx.bus.notifier.session(session.session_id.as_str());
    wakeful_store::failpoint!("K6");

    let span = intent::span(session, &agent.model);
    let (pieces, deltas) = mpsc::unbounded_channel();
    if let Some(prefill) = &request.prefill {
        // The earlier attempt's text becomes the first chunk, so readers keep what they have seen.
        let _ = pieces.send(Piece::Text(prefill.clone()));
        let _ = pieces.send(Piece::Flush);
    }
    let call = async {
        let mut deltas = ToWriter { pieces, began: Instant::now(), first: None };
        let what = format!("the call of model {} for session {}", agent.model, session.session_id);
        let calling = model.call(&request, &mut deltas);
        let answered = ctx.watchdog.watch(lease.token, what, UNYIELDING, calling).await;
        let span = Span::current();
        if let Some(after) = deltas.first {
            span.set_attribute(names::RESPONSE_TIME_TO_FIRST_CHUNK, after.as_secs_f64());
        }
        answered.inspect_err(|fault| telemetry::failed(&span, fault.kind()))
    };
    // Both run in this one future, so dropping the call stops the writer too. No chunk can then be written
    // after the commit, which deletes the chunks.
    let writing = Writer::new(ctx, &session.session_id, &generation_id).write(deltas);
    let (answered, ()) = tokio::join!(call.instrument(span.clone()), writing);
    if let (Err(Fault::Refused { message, .. }), Some(_)) = (&answered, &request.prefill) {
        warn!(
            session.id = %session.session_id,
            message,
            "{} does not go on from a text, so it is asked from the start. Remove `prefill` from its settings",
            agent.model
        );
        // The mark is in the database, so the next plan starts over, here or on another worker if this one
        // dies now.
        ctx.store.never_resume(&session.session_id, &generation_id).await?;
        return Err(Abandoned::Moved);
    }
    let mut reply = answered?;
    wakeful_store::failpoint!("K10");
    reply.usage.cost_micros = ctx.config.price(&agent.model).cost_micros(&reply.usage);
    let Usage { input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros } = reply.usage;
    if cached_tokens == 0 && rebase.is_none() && lately_cached(session) {
        warn!(
            session.id = %session.session_id,
            input_tokens,
            "The provider read nothing from its prompt cache, though the request only grew: did the beginning of the request change?"
        );
    }
    span.set_attribute(names::USAGE_INPUT_TOKENS, input_tokens);
    span.set_attribute(names::USAGE_OUTPUT_TOKENS, output_tokens);
    span.set_attribute(names::USAGE_CACHE_READ_INPUT_TOKENS, cached_tokens);
    span.set_attribute(names::USAGE_CACHE_WRITE_INPUT_TOKENS, cache_write_tokens);
    span.set_attribute(names::COST_MICROS, cost_micros);
    let reasons = vec![StringValue::from(reply.finish_reason.as_str())];
    span.set_attribute(names::RESPONSE_FINISH_REASONS, Value::Array(Array::String(reasons)));
    Ok(Outcome::Replied(Generated {
        generation_id,
        attempt,
        model: agent.model.clone(),
        request_sha256,
        started_at,
        repairs,
        resumes: resumes.cloned(),
        prefill_bytes: request.prefill.as_ref().map(|prefill| prefill.len() as i64),
        reply,
        context_strategy: agent.context.strategy,
        rebase,
        effects,
    }))
}

/// Returns the context that the model sees, and the effect class of each tool in it.
pub(super) fn context_and_effects(
    ctx: &Ctx,
    session: &Session,
    agent: &Agent,
) -> Result<(Built, BTreeMap<String, Effect>), Fault> {
    // The configuration decides the tools only in a session without a pinned prefix.
    let configured = ctx.configured_tools(session, agent)?;
    let window = ctx.config.context_window(&agent.model);
    // The rebase is journalled with the answer. If this call is cut off first, the next attempt computes the
    // same one.
    let built = context::build(session, configured, &agent.context, window);
    let effects = effects(ctx, &built);
    Ok((built, effects))
}

pub(super) fn effects(ctx: &Ctx, built: &Built) -> BTreeMap<String, Effect> {
    built.context.tools.iter().map(|told| (told.name.clone(), ctx.effect_of(told))).collect()
}

/// Returns whether the provider used its prompt cache for this run's previous answer, and the context has not
/// been rebased since.
fn lately_cached(session: &Session) -> bool {
    let before = session.records.iter().rev().find(|record| record.is_answer());
    before.is_some_and(|record| {
        session.run.as_ref().is_some_and(|run| run.run_id == record.run_id)
            && record.details.usage.is_some_and(|usage| usage.cached_tokens > 0)
            && session.rebase.as_ref().is_none_or(|rebase| rebase.at_message_number < record.message_number)
    })
}

/// Returns the interrupted attempt that this call may resume, and its streamed text, which becomes the
/// prefill.
async fn cut_off<'a>(
    ctx: &Ctx,
    session: &'a Session,
    next: &NextCall<'_>,
) -> Result<Option<(&'a CutOffCall, String)>, Abandoned> {
    let Some(attempt) = resume::candidate(&session.cut_off, next) else {
        return Ok(None);
    };
    let text = ctx.store.generation_text(&session.session_id, &attempt.generation_id).await?;
    Ok(resume::prefill(&text).map(|prefill| (attempt, prefill)))
}

/// Sends the model's text to the chunk writer. The channel is unbounded because a model must not wait for our
/// database; one answer is all that it can hold.
struct ToWriter {
    pieces: mpsc::UnboundedSender<Piece>,
    began: Instant,
    /// Time from `began` to the first text.
    first: Option<Duration>,
}

impl Deltas for ToWriter {
    fn text(&mut self, delta: &str) {
        if self.first.is_none() {
            self.first = Some(self.began.elapsed());
            wakeful_store::failpoint!("K7");
        }
        // Without a writer, readers see the text only when it is committed.
        let _ = self.pieces.send(Piece::Text(delta.to_owned()));
    }

    fn not_text(&mut self) {
        let _ = self.pieces.send(Piece::NotText);
    }
}
