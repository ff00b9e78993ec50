//! What the commit of a reply does with the calls that the reply asks for: it holds those that need approval, and starts the
//! idempotent ones that run right after it.

use crate::ctx::Ctx;
use crate::perform::{StartedCalls, refusal};
use std::collections::HashMap;
use wakeful_store::ledger::{self, Started};
use wakeful_store::queue::Lease;
use wakeful_workflow::advance::{CallStart, Transition};
use wakeful_workflow::agent::Agent;
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
