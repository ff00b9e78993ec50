//! Hop 7: the step commit, its retries while the database is away, and the log line about its result.

use crate::ctx::Ctx;
use crate::outcome;
use crate::telemetry::{self, names};
use std::time::Instant;
use tracing::{Instrument, Span, debug, info, info_span, warn};
use wakeful_store::queue::{self, Job};
use wakeful_store::step::{Commit, Performance};
use wakeful_workflow::advance::{Next, Transition};
use wakeful_workflow::record::Record;
use wakeful_workflow::session::Session;

/// Commits `transition`, and tells the session's readers.
///
/// The model's reply is paid for, and the outcome of a guarded call may be known to this process alone. So the commit is tried again
/// while the database is away, even after the end of the lease, because no worker can claim the job meanwhile. That is safe. If an
/// earlier try went through, the next one finds the session moved, writes nothing and returns [`Commit::Moved`]. If another worker
/// has taken the job since, the fence misses.
///
/// # Errors
/// Those of [`wakeful_store::Store::commit`] which another try cannot mend. The others too, once another worker has the job, or once
/// the database has failed the step for `queue.database_faults_s`.
pub(super) async fn commit(
    ctx: &Ctx,
    job: &Job,
    session: &Session,
    transition: &Transition,
    performance: Performance<'_>,
) -> wakeful_store::Result<Commit> {
    failpoint_before(transition);
    let commit = write(ctx, job, session, transition, performance).await?;
    wakeful_store::failpoint!("K22");
    ctx.bus.notifier.session(session.session_id.as_str());
    Ok(commit)
}

/// `Store::commit`, tried again while the database is away.
async fn write(
    ctx: &Ctx,
    job: &Job,
    session: &Session,
    transition: &Transition,
    performance: Performance<'_>,
) -> wakeful_store::Result<Commit> {
    let span = span_of(session, transition);
    let _commit_under_way = job.lease.begin_commit();
    let (mut faults, began) = (0, Instant::now());
    loop {
        let committing = ctx.store.commit(&job.lease, session, transition, performance);
        match committing.instrument(span.clone()).await {
            Err(error) if error.is_transient() && !job.lease.lost().is_cancelled() => {
                faults += 1;
                warn!(%error, "The commit failed; trying again");
                // The caller lets the session rest then. Earlier faults of the step may be long over, so this commit has its own tries.
                let is_enough = super::tries::note(ctx, job, &error).await.is_some();
                if is_enough && faults >= super::tries::FEWEST_FAULTS {
                    ctx.metrics.committed(None, began.elapsed());
                    return Err(error);
                }
                tokio::time::sleep(queue::delay(faults, None).min(outcome::LONGEST)).await;
            }
            Ok(commit) => {
                if matches!(commit, Commit::Moved | Commit::Stale) {
                    telemetry::failed(&span, "fenced");
                }
                measure(ctx, transition, performance, &commit, (began, faults));
                report(ctx, session, transition, &commit);
                return Ok(commit);
            }
            Err(error) => {
                telemetry::failed(&span, "database");
                ctx.metrics.committed(None, began.elapsed());
                return Err(error);
            }
        }
    }
}

fn span_of(session: &Session, transition: &Transition) -> Span {
    info_span!(
        names::COMMIT_STEP,
        { names::SESSION_ID } = %session.session_id,
        { names::CONVERSATION_ID } = %session.conversation_id,
        { names::RUN_ID } = %transition.run_id,
        { names::STEP_NUMBER } = transition.step_number,
    )
}

fn measure(
    ctx: &Ctx,
    transition: &Transition,
    performance: Performance<'_>,
    commit: &Commit,
    (began, faults): (Instant, i32),
) {
    // If the answer of an earlier try was lost, it may have been written then.
    let is_known = faults == 0 || !matches!(commit, Commit::Stale | Commit::Moved);
    ctx.metrics.committed(is_known.then_some(commit), began.elapsed());
    if matches!(commit, Commit::Continued { .. } | Commit::Closed { .. }) && transition.step.is_some() {
        ctx.metrics.stepped(performance.elapsed_s);
    }
    if let (Commit::Closed { .. }, Some(status)) = (commit, transition.status()) {
        ctx.metrics.run_ended(status.as_str());
    }
}

/// Logs the result of the commit.
fn report(ctx: &Ctx, session: &Session, transition: &Transition, commit: &Commit) {
    let step = transition.step_number;
    match commit {
        Commit::Continued { .. } if transition.step.is_some() => {
            // At a thousand steps a second, a line for each would cost more than the log is worth. The spans have them.
            debug!(session.id = %session.session_id, step, "Committed step {step}");
        }
        Commit::Continued { .. } => {
            debug!(session.id = %session.session_id, step, "Committed part of step {step}")
        }
        Commit::Closed { .. } => {
            let status = transition.status().map_or("", |status| status.as_str());
            let (error, failure) = match &transition.next {
                Next::Close(closing) => {
                    (closing.in_log.as_deref().or(closing.error.as_deref()), closing.failure.as_deref())
                }
                Next::SameStep | Next::NextStep => (None, None),
            };
            match error {
                None => {
                    info!(session.id = %session.session_id, run.id = %transition.run_id, step, "The run is {status}")
                }
                Some(error) => {
                    let error = ctx.store.in_log(Some(session.session_id.as_str()), error);
                    let kind = failure.map(|failure| failure.kind.as_str());
                    let model = failure.and(session.interrupted.last()).map(|call| call.model.as_str());
                    warn!(session.id = %session.session_id, run.id = %transition.run_id, step, error, kind, model, "The run is {status}");
                }
            }
        }
        Commit::Moved => {
            debug!(session.id = %session.session_id, step, "The session moved; reading it again")
        }
        Commit::Stale => {
            warn!(session.id = %session.session_id, step, "Another worker has the session: nothing was written")
        }
    }
}

/// The failpoint before a commit. The name says what the commit writes: a whole step, a summary, tool calls, or less.
fn failpoint_before(transition: &Transition) {
    if transition.step.is_some() {
        wakeful_store::failpoint!("K21");
    } else if transition.records.last().is_some_and(Record::is_summary) {
        wakeful_store::failpoint!("K28_commit");
    } else if transition.calls_opened.is_empty() {
        wakeful_store::failpoint!("K5");
    } else {
        wakeful_store::failpoint!("K10_commit");
    }
}
