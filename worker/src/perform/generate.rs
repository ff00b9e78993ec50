//! A model call: its intent is written down, its text is shown as it streams, and its answer is the outcome.

use super::Interrupted;
use crate::model::Deltas;
use crate::{Ctx, telemetry};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc;
use tracing::{Instrument, info, info_span, warn};
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
    crate::failpoint("before_model_call");

    let (provider, name) = agent.model.split_once('/').unwrap_or(("", &agent.model));
    let span = info_span!(
        "chat",
        "otel.name" = telemetry::names::chat(name),
        "otel.kind" = "client",
        "gen_ai.operation.name" = "chat",
        "gen_ai.provider.name" = provider,
        "gen_ai.request.model" = name,
        "gen_ai.conversation.id" = %session.conversation_id,
        "session.id" = %session.session_id,
        "gen_ai.usage.input_tokens" = tracing::field::Empty,
        "gen_ai.usage.output_tokens" = tracing::field::Empty,
        "gen_ai.usage.cache_read.input_tokens" = tracing::field::Empty,
        "error.type" = tracing::field::Empty,
    );
    let (pieces, writer) = chunk_writer(ctx, session.session_id.clone(), generation_id.clone());
    let mut deltas = ToWriter(pieces);
    let answered = model.call(&request, &mut deltas).instrument(span.clone()).await;
    drop(deltas);
    // The commit deletes the chunks: none may be written after it.
    if let Err(error) = writer.await {
        warn!(%error, "The chunk writer ended early");
    }
    let mut reply = answered.inspect_err(|fault| telemetry::failed(&span, fault.kind()))?;
    crate::failpoint("after_model_call");
    reply.usage.cost_micros = ctx.config.price(&agent.model).cost_micros(&reply.usage);
    let Usage { input_tokens, output_tokens, cached_tokens, .. } = reply.usage;
    span.record("gen_ai.usage.input_tokens", input_tokens);
    span.record("gen_ai.usage.output_tokens", output_tokens);
    span.record("gen_ai.usage.cache_read.input_tokens", cached_tokens);
    Ok(Outcome::Replied(Generated {
        generation_id,
        attempt,
        model: agent.model.clone(),
        request_sha256,
        reply,
        effects,
    }))
}

struct ToWriter(mpsc::UnboundedSender<String>);

impl Deltas for ToWriter {
    fn text(&mut self, delta: &str) {
        // A writer that is gone only means that nobody is shown the text before it is committed.
        let _ = self.0.send(delta.to_owned());
    }
}

/// Coalesces deltas into chunks; what is shown has been committed before. Losing a chunk loses nothing but the
/// sight of it, so a database that is away does not stop the call.
fn chunk_writer(
    ctx: &Ctx,
    session_id: SessionId,
    generation_id: GenerationId,
) -> (mpsc::UnboundedSender<String>, tokio::task::JoinHandle<()>) {
    let (pieces, mut inbox) = mpsc::unbounded_channel::<String>();
    let (store, notifier) = (ctx.store.clone(), ctx.notifier.clone());
    let writer = tokio::spawn(async move {
        let (mut chunk_no, mut text, mut open) = (0, String::new(), true);
        while open {
            match inbox.recv().await {
                Some(piece) => text.push_str(&piece),
                None => break,
            }
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
            let chunk = wakeful_workflow::record::without_nul(std::mem::take(&mut text));
            match store.append_chunk(&session_id, &generation_id, chunk_no, &chunk).await {
                Ok(()) => notifier.session(session_id.as_str()),
                Err(error) => {
                    warn!(%error, "A chunk was not written; readers see the text when it is committed")
                }
            }
        }
    });
    (pieces, writer)
}
