//! Runs the pure tools of a reply before the reply is committed.
//!
//! A tool that changes nothing outside often takes less time than a commit. So the reply waits for its tools for a few
//! milliseconds ([`HOLD`]). If they end in time, one commit has the reply and their results. If not, the reply is committed while
//! they go on, and their results have a commit of their own.
//!
//! If the process dies before that commit has ended, the model is asked again. A tool that kills its process could repeat that. So
//! after a death of its worker, a step runs no tool ahead. And a process that has no other job commits each reply at once: it
//! would save too little to risk a paid reply.
//!
//! A recorded reply of a replay costs nothing, so it is always held until its tools have ended.

use super::commit::commit;
use super::{files_gate, held};
use crate::ctx::Ctx;
use crate::perform::{StartedCalls, perform};
use std::pin::pin;
use std::time::Duration;
use tokio::time::timeout;
use wakeful_store::queue::Job;
use wakeful_store::step::{Commit, Performance};
use wakeful_workflow::advance::{CallEnd, EndedCall, OpenedCall, Performed, Transition, advance};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::id::CallId;
use wakeful_workflow::plan::{Action, How, PlannedCall, plan};
use wakeful_workflow::replay::has_recorded_replies;
use wakeful_workflow::session::Session;

/// How long a reply waits for its tools, unless one keeps its thread for longer: about the time of a statement with several commits.
/// Measured with a backlog of sessions that read a file of 2 KB: 2 of 4,000 replies had no result by then.
const HOLD: Duration = Duration::from_millis(5);

/// What became of a reply.
pub(super) struct Ahead {
    /// The reply, joined by its results if they were in time.
    pub(super) transition: Transition,
    /// The answer of its commit. `None`: it is still to be committed.
    pub(super) written: Option<Commit>,
    /// The results that no commit has yet.
    pub(super) results: Option<Performed>,
}

impl Ahead {
    /// `transition` is still to be committed. It may have its results already.
    fn to_commit(transition: Transition) -> Ahead {
        Ahead { transition, written: None, results: None }
    }
}

/// Runs the calls of `reply` ahead of its commit, if they are pure and the process has other jobs too. `session` is as it was
/// before the reply, and stays so.
///
/// # Errors
/// Those of the reply's commit.
pub(super) async fn run_ahead(
    ctx: &Ctx,
    job: &Job,
    session: &mut Session,
    agent: &Agent,
    mut reply: Transition,
    performance: Performance<'_>,
) -> wakeful_store::Result<Ahead> {
    let is_recorded = has_recorded_replies(session);
    let tools = reply.calls_opened.iter().map(|call| call.name.as_str());
    if reply.calls_opened.is_empty()
        || (job.is_alone() && !is_recorded)
        || !are_pure(session, &reply)
        || !files_gate::may_run_ahead(ctx, session, tools)
    {
        return Ok(Ahead::to_commit(reply));
    }
    let before = session.apply_tentatively(&reply);
    let action = plan(session, &agent.limits);
    let is_held = held::by_a_pause(ctx, job, session, agent, &action).is_some();
    let (mut results, written) = match action {
        Action::CallTools { calls } if !is_held && calls.iter().all(|call| call.how == How::Run) => {
            let tools = run_tools(ctx, job, session, agent, calls);
            if is_recorded {
                (tools.await, Ok(None))
            } else {
                run_beside(tools, || commit(ctx, job, &before, &reply, performance)).await
            }
        }
        _ => (None, Ok(None)),
    };
    if matches!(written, Ok(None))
        && let Some(results) = results.take_if(|results| !asks_question(results))
    {
        let results = advance(session, results, agent.policy());
        session.undo(before, &reply);
        // If the results do not fit (they end the run, for example), the reply is committed alone, and its calls come in the next step.
        reply.join(results);
        return Ok(Ahead::to_commit(reply));
    }
    session.undo(before, &reply);
    Ok(Ahead { transition: reply, written: written?, results })
}

/// Returns whether the calls of `reply` may run although no commit has them: they change nothing outside and wait for no person, or
/// run dry.
fn are_pure(session: &Session, reply: &Transition) -> bool {
    let may = |call: &OpenedCall| call.effect == Effect::Pure && !call.unapproved;
    !session.policy.tool_mode.is_live() || reply.calls_opened.iter().all(may)
}

/// A pause needs a commit of its own.
fn asks_question(results: &Performed) -> bool {
    ended(results).iter().any(|one| matches!(one.ending, CallEnd::Asked(_)))
}

/// The calls that have ended, whether they have changed files or not.
fn ended(results: &Performed) -> &[EndedCall] {
    match results {
        Performed::Called(calls) | Performed::CalledAndChanged(calls, _) => calls,
        Performed::Begun
        | Performed::Replied(_)
        | Performed::Compacted(_)
        | Performed::Stopped(_)
        | Performed::Cancelled { .. }
        | Performed::Paused => &[],
    }
}

/// `None`: the run was cancelled, or a fault ended the calls. The next plan sees to it.
async fn run_tools(
    ctx: &Ctx,
    job: &Job,
    session: &Session,
    agent: &Agent,
    calls: Vec<PlannedCall>,
) -> Option<Performed> {
    let started = StartedCalls::default();
    let tools = perform(ctx, &job.lease, session, agent, Action::CallTools { calls }, None, &started);
    tokio::select! {
        performed = tools => performed.ok(),
        () = ctx.cancelled(session.session_id.as_str()) => None,
    }
}

/// Waits for the tools, and commits the reply if they have not ended in time. The second value is the answer of that commit, if there
/// was one. If by that answer the run does not go on as planned, the tools are dropped.
async fn run_beside<C: Future<Output = wakeful_store::Result<Commit>>>(
    tools: impl Future<Output = Option<Performed>>,
    commit: impl FnOnce() -> C,
) -> (Option<Performed>, wakeful_store::Result<Option<Commit>>) {
    let mut tools = pin!(tools);
    if let Ok(results) = timeout(HOLD, &mut tools).await {
        return (results, Ok(None));
    }
    // Most replies do not get here, so the large future of a commit is not part of this one.
    let mut commit = Box::pin(commit());
    tokio::select! {
        biased;
        written = &mut commit => match written {
            Ok(Commit::Continued { .. }) => (tools.await, written.map(Some)),
            Ok(Commit::Closed { .. } | Commit::Moved | Commit::Stale) | Err(_) => (None, written.map(Some)),
        },
        results = &mut tools => (results, commit.await.map(Some)),
    }
}

/// Returns `results` if they are those of `calls`, all of which are to run.
pub(super) fn results_of(calls: &[PlannedCall], results: Option<Performed>) -> Option<Performed> {
    results.filter(|results| {
        let ended = ended(results);
        let ended_as = |id: &CallId| ended.iter().any(|one| &one.call.call_id == id);
        ended.len() == calls.len()
            && calls.iter().all(|call| call.how == How::Run && ended_as(&call.call.call_id))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use wakeful_workflow::record::ToolCall;
    use wakeful_workflow::session::{CallOutcome, CallStatus};
    use wakeful_workflow::workspace::Snapshot;

    const CONTINUED: Commit = Commit::Continued { wake_seq: 1, started_at: None };

    /// What becomes of a reply whose tools and whose commit take so many milliseconds.
    async fn beside(tools_ms: u64, commit_ms: u64, answer: Commit) -> (Option<Performed>, Option<Commit>) {
        let after = |ms| tokio::time::sleep(Duration::from_millis(ms));
        let tools = async {
            after(tools_ms).await;
            Some(Performed::Begun)
        };
        let commit = || async {
            after(commit_ms).await;
            Ok(answer)
        };
        let (results, written) = run_beside(tools, commit).await;
        (results, written.unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_is_committed_beside_its_tools_when_they_take_longer_than_the_hold() {
        assert_eq!(beside(4, 0, CONTINUED).await, (Some(Performed::Begun), None), "they are in time");
        for (tools_ms, commit_ms) in [(6, 0), (6, 100), (100, 6)] {
            let both = (Some(Performed::Begun), Some(CONTINUED));
            assert_eq!(beside(tools_ms, commit_ms, CONTINUED).await, both, "{tools_ms}, {commit_ms}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tools_do_not_go_on_when_their_reply_was_not_committed() {
        for answer in [Commit::Moved, Commit::Stale] {
            let began = tokio::time::Instant::now();
            assert_eq!(beside(60_000, 1, answer.clone()).await, (None, Some(answer)));
            assert!(began.elapsed() < Duration::from_secs(1));
        }
        let refused = || async { Err(wakeful_store::Error::NotFound { what: "session", id: String::new() }) };
        let (results, written) = run_beside(std::future::pending(), refused).await;
        assert!(results.is_none() && written.is_err());
    }

    #[test]
    fn calls_that_changed_files_are_results_and_may_ask_like_any_others() {
        let snapshot = || Snapshot {
            tree_sha256: String::new(),
            packs: Vec::new(),
            files: 0,
            bytes: 0,
            message_number: 0,
        };
        let call = ToolCall {
            call_id: CallId::from("call_1"),
            name: "draw".to_owned(),
            arguments: json!({}),
            malformed: None,
        };
        let ended = |ending| vec![EndedCall { call: call.clone(), ending }];
        let planned = [PlannedCall { call: call.clone(), how: How::Run }];
        let outcome = CallOutcome { content: "Drawn.".to_owned(), is_error: false, details: None };
        let done = || CallEnd::Settled(CallStatus::Done, outcome.clone());
        for results in
            [Performed::Called(ended(done())), Performed::CalledAndChanged(ended(done()), snapshot())]
        {
            assert!(!asks_question(&results));
            assert_eq!(results_of(&planned, Some(results.clone())), Some(results));
        }
        let asked = ended(CallEnd::Asked("Which?".to_owned()));
        assert!(asks_question(&Performed::CalledAndChanged(asked.clone(), snapshot())));
        assert!(asks_question(&Performed::Called(asked)));
        assert_eq!(results_of(&planned, Some(Performed::Begun)), None);
    }
}
