//! A model call: its intent is written down, its text is shown as it streams, and its answer is the outcome.

use super::Interrupted;
use crate::Ctx;
use crate::model::Deltas;
use crate::telemetry::{self, names};
use crate::watchdog::UNYIELDING;
use opentelemetry::{Array, StringValue, Value};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::{Instrument, Span, info, info_span, warn};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{Generated, Outcome};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::id::{GenerationId, SessionId};
use wakeful_workflow::record::Usage;
use wakeful_workflow::session::Session;

/// Chunks are written at least this often while text arrives …
const CHUNK_EVERY: Duration = Duration::from_millis(250);
/// … and as soon as so much has gathered.
const CHUNK_BYTES: usize = 1024;

pub(super) async fn call_model(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
) -> Result<Outcome, Interrupted> {
    let model = ctx.models.get(&agent.model)?;
    let tools = ctx.tools_of(agent)?;
    let effects: BTreeMap<_, _> = tools.iter().map(|tool| (tool.name.clone(), tool.effect)).collect();
    let request = model.request(&session.context(tools));
    if request.repairs.total() > 0 {
        info!(session.id = %session.session_id, repairs = ?request.repairs, "Repaired the request's copy of the transcript");
    }
    let generation_id = GenerationId::from(wakeful_store::new_id("gen"));
    let attempt = session.interrupted.last().map_or(0, |last| last.attempt) + 1;
    let request_sha256 = request.sha256();
    let new = NewGeneration {
        session_id: &session.session_id,
        generation_id: &generation_id,
        step_number: session.last_step_number + 1,
        attempt,
        model: &agent.model,
        request_sha256: &request_sha256,
    };
    if !ctx.store.begin_generation(lease, &new).await? {
        return Err(Interrupted::Moved);
    }
    ctx.notifier.session(session.session_id.as_str());
    crate::failpoint("K6");

    let (provider, name) = agent.model.split_once('/').unwrap_or(("", &agent.model));
    let span = info_span!(
        "chat",
        "otel.name" = names::chat(name),
        "otel.kind" = names::KIND_CLIENT,
        { names::OPERATION_NAME } = names::OPERATION_CHAT,
        { names::PROVIDER_NAME } = provider,
        { names::REQUEST_MODEL } = name,
        { names::REQUEST_STREAM } = true,
        { names::CONVERSATION_ID } = %session.conversation_id,
        { names::SESSION_ID } = %session.session_id,
    );
    let (pieces, inbox) = mpsc::unbounded_channel();
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
    // Side by side and in this future: whoever drops the call stops its writer too, and the commit, which deletes
    // the chunks, finds none written after it.
    let writing = write_chunks(ctx, &session.session_id, &generation_id, inbox);
    let (answered, ()) = tokio::join!(call.instrument(span.clone()), writing);
    let mut reply = answered?;
    crate::failpoint("K10");
    reply.usage.cost_micros = ctx.config.price(&agent.model).cost_micros(&reply.usage);
    let Usage { input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros } = reply.usage;
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
        reply,
        effects,
    }))
}

/// Unbounded, for a model must not wait for our database; the size of one answer is the bound.
struct ToWriter {
    pieces: mpsc::UnboundedSender<String>,
    began: Instant,
    /// When the first text came, after the beginning.
    first: Option<Duration>,
}

impl Deltas for ToWriter {
    fn text(&mut self, delta: &str) {
        if self.first.is_none() {
            self.first = Some(self.began.elapsed());
            crate::failpoint("K7");
        }
        // A writer that is gone only means that nobody is shown the text before it is committed.
        let _ = self.pieces.send(delta.to_owned());
    }
}

/// Coalesces deltas into chunks until the call ends; what is shown has been committed before. Losing a chunk loses nothing but
/// the sight of it, so a database that is away does not stop the call.
async fn write_chunks(
    ctx: &Ctx,
    session_id: &SessionId,
    generation_id: &GenerationId,
    mut inbox: mpsc::UnboundedReceiver<String>,
) {
    let mut chunk_no = 0;
    let mut open = true;
    while open {
        let Some(mut text) = inbox.recv().await else { return };
        let due = tokio::time::sleep(CHUNK_EVERY);
        tokio::pin!(due);
        while text.len() < CHUNK_BYTES {
            tokio::select! {
                () = &mut due => break,
                piece = inbox.recv() => match piece {
                    Some(piece) => text.push_str(&piece),
                    None => { open = false; break; }
                }
            }
        }
        chunk_no += 1;
        let chunk = wakeful_workflow::record::without_nul(text);
        match ctx.store.append_chunk(session_id, generation_id, chunk_no, &chunk).await {
            Ok(()) => {
                crate::failpoint("K9");
                ctx.notifier.session(session_id.as_str());
                crate::failpoint("K8");
            }
            Err(error) => warn!(%error, "A chunk was not written; readers see the text when it is committed"),
        }
    }
}
