//! The intent of a model call: written down before the call, whether a model is then asked or a recording answers.

use super::Interrupted;
use crate::ctx::Ctx;
use crate::telemetry::names;
use tracing::{Span, info_span};
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::Lease;
use wakeful_workflow::context::Strategy;
use wakeful_workflow::id::GenerationId;
use wakeful_workflow::session::{Purpose, Session};
use wakeful_workflow::wire::Request;

/// What is about to be asked of a model.
pub(super) struct Intent<'a> {
    pub attempt: i64,
    /// `provider/name`.
    pub model: &'a str,
    pub request: &'a Request,
    pub request_sha256: &'a str,
    /// Hash of the same request without its prefill.
    pub base_sha256: &'a str,
    /// The attempt whose text the prefill is.
    pub resumes: Option<&'a GenerationId>,
    pub purpose: Purpose,
    pub context_strategy: Strategy,
}

/// A call that is written down.
pub(super) struct Begun {
    pub generation_id: GenerationId,
    /// By the database's clock.
    pub started_at: String,
    /// What the projection had to change in the request.
    pub repairs: i64,
}

/// The number of the session's next attempt at a model call.
pub(super) fn next_attempt(session: &Session) -> i64 {
    session.interrupted.last().map_or(0, |last| last.attempt) + 1
}

/// Writes `intent` down, as the next step's.
///
/// # Errors
/// [`Interrupted::Moved`] when the lease is lost: nobody may be asked then. [`Interrupted::Store`].
pub(super) async fn begin(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    intent: &Intent<'_>,
) -> Result<Begun, Interrupted> {
    let generation_id = GenerationId::from(wakeful_store::new_id("gen"));
    let repairs = intent.request.repairs.total() as i64;
    let new = NewGeneration {
        session_id: &session.session_id,
        generation_id: &generation_id,
        step_number: session.last_step_number + 1,
        attempt: intent.attempt,
        model: intent.model,
        request_sha256: intent.request_sha256,
        base_sha256: intent.base_sha256,
        repairs,
        resumes: intent.resumes,
        purpose: intent.purpose,
        context_strategy: intent.context_strategy,
    };
    match ctx.store.begin_generation(lease, &new).await? {
        Some(started_at) => Ok(Begun { generation_id, started_at, repairs }),
        None => Err(Interrupted::Moved),
    }
}

/// The span of a call to `model`, by the conventions for generative AI.
pub(super) fn span(session: &Session, model: &str) -> Span {
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
