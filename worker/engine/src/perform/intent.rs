//! The intent of a model call: a row of `generations` that is committed before the call. A replay writes the
//! same row before a recorded answer.

use super::Abandoned;
use crate::ctx::Ctx;
use crate::telemetry::names;
use tracing::{Span, info_span};
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::Lease;
use wakeful_workflow::generation::Purpose;
use wakeful_workflow::id::GenerationId;
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::Strategy;
use wakeful_workflow::wire::Request;

/// A model call that is about to be made.
pub(super) struct Intent<'a> {
    pub attempt: i64,
    /// `provider/name`.
    pub model: &'a str,
    pub request: &'a Request,
    pub request_sha256: &'a str,
    /// Hash of the same request without its prefill.
    pub base_sha256: &'a str,
    /// The interrupted attempt that this one continues: the prefill is its text.
    pub resumes: Option<&'a GenerationId>,
    pub purpose: Purpose,
    pub context_strategy: Strategy,
}

/// A call whose intent is recorded.
pub(super) struct RecordedIntent {
    pub generation_id: GenerationId,
    /// By the database's clock.
    pub started_at: String,
    /// How many violations of the provider's protocol were repaired in the request.
    pub repairs: i64,
}

/// Returns the number of the next attempt at the session's model call: one more than the last interrupted
/// attempt.
pub(super) fn next_attempt(session: &Session) -> i64 {
    session.cut_off.last().map_or(0, |last| last.attempt) + 1
}

/// Records `intent` for the session's next step. If this process crashes later, the row tells the next claim
/// that a call had begun. Only a crash of Postgres may lose the row, because its commit is asynchronous.
///
/// # Errors
/// [`Abandoned::Moved`] when the lease is lost: the caller must not call the model. [`Abandoned::Store`].
pub(super) async fn begin(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    intent: &Intent<'_>,
) -> Result<RecordedIntent, Abandoned> {
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
        Some(started_at) => Ok(RecordedIntent { generation_id, started_at, repairs }),
        None => Err(Abandoned::Moved),
    }
}

/// The span of a call to `model`, named by OpenTelemetry's conventions for generative AI.
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
