//! What the calls of one turn write to the ledger outside of a step's commit.

use super::{ToolRun, UnrecordedOutcome};
use crate::outcome;
use crate::perform::Unperformed;
use std::sync::PoisonError;
use wakeful_store::ledger::{Started, new_nonce};
use wakeful_workflow::record::ToolCall;
use wakeful_workflow::session::{CallOutcome, CallStatus};

impl ToolRun<'_> {
    /// Writes `started` to the call's ledger row. If the answer is lost, the row may say so, and the call does not run: the start is
    /// withdrawn, because only this process knows that. Otherwise a guarded call would count as one that may have run.
    pub(super) async fn start(
        &self,
        call: &ToolCall,
        from: CallStatus,
    ) -> Result<Option<Started>, Unperformed> {
        let (store, session_id, nonce) = (&self.ctx.store, &self.session.session_id, new_nonce());
        let timeout_s = self.agent.limits.tool_s;
        let error =
            match store.start_call(self.lease, session_id, &call.call_id, &nonce, from, timeout_s).await {
                Err(error) => error,
                started => return Ok(started?),
            };
        if from == CallStatus::Invoked && error.is_transient() {
            self.withdraw(call, Started::of(nonce)).await?;
        }
        Err(error.into())
    }

    /// Says in the ledger that a start did not run its call.
    pub(super) async fn withdraw(&self, call: &ToolCall, start: Started) -> wakeful_store::Result<()> {
        let (store, session_id, starts) = (&self.ctx.store, &self.session.session_id, [start]);
        let withdraw = || store.withdraw_starts(self.lease, session_id, &starts);
        outcome::record(self.lease, &format!("the start of call {}", call.call_id), withdraw).await
    }

    /// Records the outcome that was left to the turn's commit. Without the lease this writes nothing.
    pub(super) async fn settle_left(&self) -> wakeful_store::Result<()> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(UnrecordedOutcome { call, started, status, outcome }) = left {
            self.settle(&call, &started, status, &outcome).await?;
        }
        Ok(())
    }

    /// Records the outcome ([`outcome::record`]). Returns `false`, and writes nothing, if another worker has the job or another claim
    /// has started the call since.
    pub(super) async fn settle(
        &self,
        call: &ToolCall,
        started: &Started,
        status: CallStatus,
        outcome: &CallOutcome,
    ) -> wakeful_store::Result<bool> {
        let (store, session_id) = (&self.ctx.store, &self.session.session_id);
        outcome::record(self.lease, &format!("call {}", call.call_id), || {
            store.settle_call(self.lease, session_id, &call.call_id, started, status, outcome)
        })
        .await
    }
}
