//! The intent of a summary call.

use super::Unperformed;
use crate::ctx::Ctx;
use wakeful_store::generation::NewGeneration;
use wakeful_store::queue::Lease;
use wakeful_workflow::generation::Purpose;
use wakeful_workflow::id::GenerationId;
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::Strategy;
use wakeful_workflow::wire::Request;

/// A call whose intent is recorded.
pub(super) struct RecordedIntent {
    pub generation_id: GenerationId,
    /// By the database's clock.
    pub started_at: String,
    /// How many violations of the provider's protocol were repaired in the request.
    pub repairs: i64,
}

/// Commits the intent of a summary call as a row of `generations`, before the model is called. If this process dies during the call,
/// the row tells the next claim that a call had begun. The commit is asynchronous, so a crash of Postgres may
/// lose the row; the next claim then makes a first attempt.
///
/// # Errors
/// [`Unperformed::Reread`] when the lease is lost: the caller must not call the model. [`Unperformed::Store`].
pub(super) async fn begin_compaction(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    attempt: i64,
    model: &str,
    (request, request_sha256): (&Request, &str),
) -> Result<RecordedIntent, Unperformed> {
    let generation_id = GenerationId::from(wakeful_store::new_id("gen"));
    let repairs = request.repairs.total() as i64;
    let new = NewGeneration {
        session_id: &session.session_id,
        generation_id: &generation_id,
        step_number: session.last_step_number + 1,
        attempt,
        model,
        request_sha256,
        // A summary has no prefill.
        base_sha256: request_sha256,
        repairs,
        resumes: None,
        purpose: Purpose::Compaction,
        context_strategy: Strategy::Compaction,
    };
    match ctx.store.begin_generation(lease, &new).await? {
        Some(started_at) => Ok(RecordedIntent { generation_id, started_at, repairs }),
        None => Err(Unperformed::Reread),
    }
}
