//! What the commit of a reply does with the calls that the reply asks for: it holds those that need approval, and starts the
//! idempotent ones that run right after it.

use crate::ctx::Ctx;
use crate::perform::{StartedCalls, refusal};
use std::collections::HashMap;
use tracing::warn;
use wakeful_store::ledger::{self, Started};
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{CallStart, Transition};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::policy::ToolMode;
use wakeful_workflow::replay::has_recorded_replies;
use wakeful_workflow::session::Session;

/// Marks in `transition` the calls to hold and the calls to start. Returns the rights to run the calls that its commit starts. A call
/// that will be refused is neither held nor started.
pub(super) fn start_calls(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    transition: &mut Transition,
) -> StartedCalls {
    // A replay and a dry fork have no effects, so they ask no person.
    if !session.policy.tool_mode.is_live() {
        hold_as_the_source(ctx, session, transition);
        return StartedCalls::default();
    }
    if !agent.approve.is_empty() {
        transition.hold_calls(|call| {
            agent.approve.contains(&call.name) && refusal(ctx, session, agent, call).is_none()
        });
    }
    if !lease.is_live() {
        return StartedCalls::default();
    }
    let mut rights = HashMap::new();
    transition.start_calls(|call| {
        if refusal(ctx, session, agent, call).is_some() {
            return None;
        }
        let start = CallStart { nonce: ledger::new_nonce(), timeout_s: agent.limits.tool_s };
        rights.insert(call.call_id.clone(), Started::by_commit(&start));
        Some(start)
    });
    StartedCalls::new(lease.term(), rights)
}

/// Marks the calls of a recorded reply that wait for approval in the source. The source has no result of them, and no further reply. If
/// the replay ran them dry, it would have a result more, and look for a reply that is not there.
fn hold_as_the_source(ctx: &Ctx, session: &Session, transition: &mut Transition) {
    if transition.calls_opened.is_empty()
        || session.policy.tool_mode != ToolMode::Recorded
        || !has_recorded_replies(session)
    {
        return;
    }
    // The reply was taken from the recording a moment ago.
    let Some(source) = ctx.recordings.known(session) else {
        warn!(
            "The source of this replay is not in memory any more: calls that wait for approval there are run dry in the replay"
        );
        return;
    };
    let held = source.follower().follow(session, &source.rules, &source.recording).unapproved();
    let mut held = held.into_iter();
    transition.hold_calls(|_| held.next().unwrap_or(false));
}
