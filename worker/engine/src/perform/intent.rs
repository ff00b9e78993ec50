//! The intent of a summary call.

use super::Unperformed;
use crate::ctx::Ctx;
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::Lease;
use wakeful_workflow::generation::Purpose;
use wakeful_workflow::id::GenerationId;
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::Strategy;

/// A model call that is about to be made.
pub(super) struct Intent<'a> {
    pub attempt: i64,
    /// `provider/name`.
    pub model: &'a str,
    /// How many violations of the provider's protocol were repaired in the request.
    pub repairs: i64,
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

/// Commits `intent` as a row of `generations`, before the model is called. If this process dies during the call,
/// the row tells the next claim that a call had begun. The commit is asynchronous, so a crash of Postgres may
/// lose the row; the next claim then makes a first attempt.
///
/// # Errors
/// [`Unperformed::Reread`] when the lease is lost: the caller must not call the model. [`Unperformed::Store`].
pub(super) async fn begin_call(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    intent: &Intent<'_>,
) -> Result<RecordedIntent, Unperformed> {
    let generation_id = GenerationId::from(wakeful_store::new_id("gen"));
    let repairs = intent.repairs;
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
        None => Err(Unperformed::Reread),
    }
}
