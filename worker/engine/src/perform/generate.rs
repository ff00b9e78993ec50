//! Hop 4: the model call. It records its intent in `generations`, streams the text to readers, and returns
//! the reply.

use super::Unperformed;
use super::chunks::{Said, Writer};
use super::cut::Cut;
use crate::ctx::Ctx;
use crate::gates::Unanswered;
use crate::model::{Deltas, Model};
use crate::telemetry::{self, names};
use crate::watchdog::UNYIELDING;
use opentelemetry::{Array, StringValue, Value};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{Instrument, Span, info, info_span, warn};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{Generated, Performed};
use wakeful_workflow::agent::{Agent, ToolDefinition, Tools};
use wakeful_workflow::context::{self, Built};
use wakeful_workflow::effect::Effect;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::generation::{InterruptedCall, Purpose};
use wakeful_workflow::id::GenerationId;
use wakeful_workflow::record::{FinishReason, Reply, Usage};
use wakeful_workflow::resume::{self, NextCall};
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::{Rebase, Strategy};
use wakeful_workflow::wire::Request;

/// A model call that is ready to be made: the request, and everything that its row in `generations` needs.
pub struct PreparedCall {
    pub(crate) generation_id: GenerationId,
    step_number: i64,
    attempt: i64,
    model: Arc<dyn Model>,
    /// `provider/name`.
    model_name: String,
    request: Request,
    request_sha256: String,
    /// Hash of the same request without its prefill.
    base_sha256: String,
    /// The interrupted attempt that this one continues: the prefill is its text.
    resumes: Option<GenerationId>,
    context_strategy: Strategy,
    rebase: Option<Rebase>,
    /// What the model is offered.
    tools: Tools,
}

impl PreparedCall {
    /// Returns whether it is a call of this model.
    pub(crate) fn is_of(&self, model: &str) -> bool {
        self.model_name == model
    }

    /// Returns the row of `generations` that records the intent to make this call.
    pub(crate) fn intent<'a>(&'a self, session: &'a Session) -> NewGeneration<'a> {
        NewGeneration {
            session_id: &session.session_id,
            generation_id: &self.generation_id,
            step_number: self.step_number,
            attempt: self.attempt,
            model: &self.model_name,
            request_sha256: &self.request_sha256,
            base_sha256: &self.base_sha256,
            repairs: self.request.repairs.total() as i64,
            resumes: self.resumes.as_ref(),
            purpose: Purpose::Reply,
            context_strategy: self.context_strategy,
        }
    }
}

/// A prepared call whose intent is committed.
pub struct CommittedCall {
    pub(crate) call: PreparedCall,
    /// By the database's clock.
    pub(crate) started_at: String,
}

/// Prepares the session's next model call. Writes nothing. Reads the database only if an attempt was interrupted.
pub(crate) async fn prepare(
    ctx: &Ctx,
    session: &Session,
    agent: &Agent,
) -> Result<PreparedCall, Unperformed> {
    let model = ctx.plugins.models.get(&agent.model)?;
    let Built { context, rebase } = build(ctx, session, agent)?;
    let draft = ctx.renderings.draft(&session.session_id, &agent.model, model.as_ref(), &context);
    let whole = draft.request(None);
    let base_sha256 = whole.sha256();
    let next =
        NextCall { model: &agent.model, base_sha256: &base_sha256, takes_prefill: model.takes_prefill() };
    let (request, request_sha256, resumes) = match resumable(ctx, session, &next).await? {
        Some((attempt, prefill)) => {
            let request = draft.request(Some(&prefill));
            let request_sha256 = request.sha256();
            info!(session.id = %session.session_id, "The model continues the text of attempt {}", attempt.attempt);
            let resumes = request.prefill.is_some().then(|| attempt.generation_id.clone());
            (request, request_sha256, resumes)
        }
        None => (whole, base_sha256.clone(), None),
    };
    drop(draft);
    let tools = context.tools;
    Ok(PreparedCall {
        generation_id: GenerationId::from(wakeful_store::new_id("gen")),
        step_number: session.last_step_number + 1,
        attempt: next_attempt(session),
        model,
        model_name: agent.model.clone(),
        request,
        request_sha256,
        base_sha256,
        resumes,
        context_strategy: agent.context.strategy,
        rebase,
        tools,
    })
}

/// Makes one model call. `committed` is the call if the commit before it recorded its intent. If this process
/// crashes during the call, its row in `generations` and its chunks stay, and the next claim makes another
/// attempt.
pub(super) async fn call_model(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    committed: Option<CommittedCall>,
) -> Result<Performed, Unperformed> {
    let CommittedCall { call, started_at } = match committed {
        Some(committed) => committed,
        None => begin(ctx, lease, session, agent).await?,
    };
    let kinds = &call.request.repairs;
    let repairs = kinds.total();
    if repairs > 0 {
        info!(session.id = %session.session_id, repairs, ?kinds, "Repaired {repairs} violations on the request's copy of the transcript");
    }
    wakeful_store::failpoint!("K6");

    let span = span_of_call(session, &agent.model);
    let replied = stream(ctx, lease, session, agent, &call, &span).await;
    if let (Err(Fault::Refused { message, .. }), Some(_)) = (&replied, &call.request.prefill) {
        warn!(
            session.id = %session.session_id,
            message,
            "{} does not go on from a text, so it is asked from the start. Remove `prefill` from its settings",
            agent.model
        );
        // The mark is in the database, so the next plan starts over, here or on another worker if this one
        // dies now.
        ctx.store.never_resume(&session.session_id, &call.generation_id).await?;
        return Err(Unperformed::Reread);
    }
    let mut reply = match replied {
        // A program's own model may report an empty reply as a fault. The agent's settings say what follows it.
        Err(Fault::EmptyReply) => Reply::new(Vec::new(), FinishReason::Stop, Usage::default()),
        replied => replied?,
    };
    wakeful_store::failpoint!("K10");
    reply.usage.cost_micros = ctx.config.price(&agent.model).cost_micros(&reply.usage);
    ctx.metrics.model_used(&agent.model, &reply.usage);
    if reply.usage.cached_tokens == 0 && call.rebase.is_none() && lately_cached(session) {
        warn!(
            session.id = %session.session_id,
            input_tokens = reply.usage.input_tokens,
            "The provider read nothing from its prompt cache, though the request only grew: did the beginning of the request change?"
        );
    }
    note_reply(&span, &reply);
    let PreparedCall { generation_id, attempt, request, request_sha256, resumes, rebase, tools, .. } = call;
    let effects = effects(ctx, tools.iter().filter(|tool| reply.calls(&tool.name)));
    Ok(Performed::Replied(Generated {
        generation_id,
        attempt,
        model: agent.model.clone(),
        request_sha256,
        started_at: Some(started_at),
        repairs: repairs as i64,
        resumes,
        prefill_bytes: request.prefill.as_ref().map(|prefill| prefill.len() as i64),
        reply,
        context_strategy: agent.context.strategy,
        rebase,
        effects,
    }))
}

/// Prepares a call whose intent no commit has recorded, and records it.
async fn begin(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
) -> Result<CommittedCall, Unperformed> {
    let call = prepare(ctx, session, agent).await?;
    let started_at = ctx.store.begin_generation(lease, &call.intent(session)).await?;
    let started_at = started_at.ok_or(Unperformed::Reread)?;
    ctx.bus.notifier.session(session.session_id.as_str());
    Ok(CommittedCall { call, started_at })
}

/// Makes the call. Its text goes to those who read it while it streams.
async fn stream(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    call: &PreparedCall,
    span: &Span,
) -> Result<Reply, Fault> {
    let PreparedCall { generation_id, model, request, .. } = call;
    // The model adds text; `Writer` writes it as rows of `generation_chunks` for those who need it.
    let said = Said::starting_with(request.prefill.as_deref());
    let watched = Watched { ctx, generation_id, said: &said };
    let calling = ask(ctx, lease, session, agent, call, &said);
    // Both run in this one future, so dropping the call stops the writer too. No chunk can then be written
    // after the commit, which deletes the chunks.
    let writer = Writer::new(ctx, &session.session_id, generation_id, &said, model.takes_prefill());
    let writing = writer.write(request.prefill.is_some());
    let (replied, ()) = tokio::join!(calling.instrument(span.clone()), writing);
    drop(watched);
    replied
}

/// Asks the model, whose text goes to `said`, and measures how it answered.
async fn ask(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    call: &PreparedCall,
    said: &Said,
) -> Result<Reply, Fault> {
    let unanswered = ctx.gates.begin_call(ctx.plugins.models.gate_of(&agent.model), lease);
    let mut to_writer = ToWriter { said, unanswered, began: Instant::now(), first: None };
    let what = format!("the call of model {} for session {}", agent.model, session.session_id);
    let replying = super::called(&agent.model, call.model.call(&call.request, &mut to_writer));
    let replied = ctx.watchdog.watch(lease.job_id, what, UNYIELDING, replying).await;
    said.end(replied.is_ok());
    let span = Span::current();
    // A program's own model may give no other sign.
    if replied.as_ref().map_or_else(Fault::is_answer, |_| true) {
        to_writer.began();
    }
    let outcome = replied.as_ref().map_or_else(Fault::kind, |_| "ok");
    ctx.metrics.model_called(&agent.model, outcome, to_writer.began.elapsed(), to_writer.first);
    if let Some(after) = to_writer.first {
        span.set_attribute(names::RESPONSE_TIME_TO_FIRST_CHUNK, after.as_secs_f64());
    }
    replied.inspect_err(|fault| telemetry::failed(&span, fault.kind()))
}

/// Notes in the call's span what the reply used, and why it ended.
fn note_reply(span: &Span, reply: &Reply) {
    let Usage { input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros } = reply.usage;
    span.set_attribute(names::USAGE_INPUT_TOKENS, input_tokens);
    span.set_attribute(names::USAGE_OUTPUT_TOKENS, output_tokens);
    span.set_attribute(names::USAGE_CACHE_READ_INPUT_TOKENS, cached_tokens);
    span.set_attribute(names::USAGE_CACHE_WRITE_INPUT_TOKENS, cache_write_tokens);
    span.set_attribute(names::COST_MICROS, cost_micros);
    let reasons = vec![StringValue::from(reply.finish_reason.as_str())];
    span.set_attribute(names::RESPONSE_FINISH_REASONS, Value::Array(Array::String(reasons)));
}

/// Returns the context that the model sees.
pub(super) fn build(ctx: &Ctx, session: &Session, agent: &Agent) -> Result<Built, Fault> {
    // The configuration decides the tools only in a session without a pinned prefix.
    let configured = ctx.configured_tools(session, agent)?;
    let window = ctx.config.context_window(&agent.model);
    // The rebase is journalled with the reply. If this call is interrupted first, the next attempt computes the
    // same one.
    Ok(context::build(session, configured, &agent.context, window))
}

/// Returns the effect class of each of these tools.
pub(super) fn effects<'t>(
    ctx: &Ctx,
    tools: impl IntoIterator<Item = &'t ToolDefinition>,
) -> BTreeMap<String, Effect> {
    tools.into_iter().map(|tool| (tool.name.clone(), ctx.effect_of(tool))).collect()
}

/// Returns whether the provider used its prompt cache for this run's previous reply, and the context has not
/// been rebased since.
fn lately_cached(session: &Session) -> bool {
    let before = session.records.iter().rev().find(|record| record.is_reply());
    before.is_some_and(|record| {
        session.run.as_ref().is_some_and(|run| run.run_id == record.run_id)
            && record.details.usage.is_some_and(|usage| usage.cached_tokens > 0)
            && session.rebase.as_ref().is_none_or(|rebase| rebase.at_message_number < record.message_number)
    })
}

/// Returns the interrupted attempt that this call may resume, and its streamed text, which becomes the
/// prefill.
async fn resumable<'a>(
    ctx: &Ctx,
    session: &'a Session,
    next: &NextCall<'_>,
) -> Result<Option<(&'a InterruptedCall, String)>, Unperformed> {
    let Some(attempt) = resume::candidate(&session.interrupted, next) else {
        return Ok(None);
    };
    let text = ctx.store.generation_text(&session.session_id, &attempt.generation_id).await?;
    Ok(resume::prefill(&text).map(|prefill| (attempt, prefill)))
}

/// A call that runs. If it is dropped before it ends, this remembers how much text and how many tokens had come.
struct Watched<'a> {
    ctx: &'a Ctx,
    generation_id: &'a GenerationId,
    said: &'a Said,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if let Some((bytes, counted)) = self.said.unfinished() {
            self.ctx.cut.remember(self.generation_id, Cut { bytes, counted });
        }
    }
}

/// Hands the model's text to the chunk writer, and notes when the first sign of an answer came.
struct ToWriter<'a> {
    said: &'a Said,
    unanswered: Unanswered<'a>,
    began: Instant,
    /// Time from `began` to the first text.
    first: Option<Duration>,
}

impl Deltas for ToWriter<'_> {
    fn began(&mut self) {
        self.unanswered.began();
    }

    fn text(&mut self, delta: &str) {
        self.unanswered.began();
        if self.first.is_none() {
            self.first = Some(self.began.elapsed());
            wakeful_store::failpoint!("K7");
        }
        self.said.text(delta);
    }

    fn not_text(&mut self) {
        self.unanswered.began();
        self.said.not_text();
    }

    fn usage(&mut self, so_far: Usage) {
        self.unanswered.began();
        self.said.counted(so_far);
    }
}

/// Returns the number of the next attempt at the session's model call: one more than the last interrupted
/// attempt.
pub(super) fn next_attempt(session: &Session) -> i64 {
    session.interrupted.last().map_or(0, |last| last.attempt) + 1
}

/// The span of a call to `model`, named by OpenTelemetry's conventions for generative AI.
pub(super) fn span_of_call(session: &Session, model: &str) -> Span {
    let (provider, name) = model.split_once('/').unwrap_or(("", model));
    info_span!(
        "chat",
        "otel.name" = names::chat(name),
        "otel.kind" = names::KIND_CLIENT,
        { names::OPERATION_NAME } = names::OPERATION_CHAT,
        { names::PROVIDER_NAME } = provider,
        { names::REQUEST_MODEL } = name,
        { names::REQUEST_STREAM } = true,
        { names::CONVERSATION_ID } = %session.conversation_id,
        { names::SESSION_ID } = %session.session_id,
    )
}
