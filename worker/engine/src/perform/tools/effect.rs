//! A call that may have effects: what its ledger row says before it runs, and after.

use super::{Running, ToolEnd, ToolRun, UnrecordedOutcome, end_of_output, failed};
use crate::perform::Unperformed;
use crate::tool::FileUse;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use tracing::warn;
use wakeful_store::ledger::Started;
use wakeful_workflow::advance::CallEnd;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::record::ToolCall;
use wakeful_workflow::session::CallStatus;

impl ToolRun<'_> {
    /// Runs a call that may have effects: writes `started` to its ledger row unless a commit did, runs the tool, and
    /// settles the row with the outcome unless the turn's commit does. After a crash in between, the row says that the
    /// call may have run.
    pub(super) async fn run_effect(
        &self,
        call: &ToolCall,
        effect: Effect,
        status: CallStatus,
        running: Running<'_>,
    ) -> Result<CallEnd, Unperformed> {
        let (mut started, is_first) = self.begin(call, status).await?;
        let (ended, is_repeated) = self.invoke_until_known(call, effect, &mut started).await?;
        let ending = match ended {
            ToolEnd::Output(output) => end_of_output(output),
            ToolEnd::Host(why) => {
                // It had no effect, so the row may say that it did not run, unless an earlier start did run it.
                if is_first && !is_repeated {
                    self.withdraw(call, started).await?;
                }
                return Err(Unperformed::Host(why));
            }
            ToolEnd::Error(error) if is_repeated => failed(format!(
                "{} An earlier attempt, with the same idempotency key, was not answered and may have taken effect.",
                error.text
            )),
            ToolEnd::Error(error) => failed(error.text),
            ToolEnd::Lost(reason) if is_repeated => failed(format!(
                "{reason} The call was made twice with one idempotency key, and nobody knows whether it took effect."
            )),
            ToolEnd::Lost(reason) if effect == Effect::Idempotent => failed(reason),
            ToolEnd::Lost(reason) => {
                let session_id = &self.session.session_id;
                let said = self.ctx.store.in_log(Some(session_id.as_str()), &reason);
                warn!(session.id = %session_id, call.id = %call.call_id, reason = said, "Nobody knows what a guarded call did");
                return Ok(CallEnd::Uncertain { known: false, why: Some(reason) });
            }
        };
        wakeful_store::failpoint!("K19");
        self.record(call, started, &ending).await?;
        drop(running);
        Ok(ending)
    }

    /// Takes the right to run the call, which a commit has given or which this writes into the ledger. Returns it, and whether no
    /// earlier start can have run the call.
    async fn begin(&self, call: &ToolCall, status: CallStatus) -> Result<(Started, bool), Unperformed> {
        // Check before writing `started`. Every later worker takes a started call for one that may have run.
        if !self.lease.is_live() {
            return Err(Unperformed::Reread);
        }
        // Remember the lease's end before `start_call` stores it. A heartbeat can only move it later, so checking
        // this value is on the safe side.
        let now = self.lease.term();
        wakeful_store::failpoint!("K17");
        let by_commit = self.started.take(&call.call_id);
        // An earlier start may have run the call.
        let is_first = by_commit.is_some() || status == CallStatus::Invoked;
        let (started, term) = match by_commit {
            Some(by_commit) => by_commit,
            None => match self.start(call, status).await? {
                Some(started) => (started, now),
                None => return Err(Unperformed::Reread),
            },
        };
        wakeful_store::failpoint!("K18");
        // The commit may have been slow. Start the effect only while the recorded lease certainly lasts:
        // after it, another worker may take over the session.
        if !self.lease.is_live() || !term.is_ahead() {
            // This start did not run the call. If it was the first one, the row may say again that the call has not run.
            if is_first {
                self.withdraw(call, started).await?;
            }
            return Err(Unperformed::Reread);
        }
        Ok((started, is_first))
    }

    /// Runs the tool, and once more if it was lost and a repetition does no harm. Returns how it ended, and whether it was repeated.
    /// A repetition has a start of its own.
    async fn invoke_until_known(
        &self,
        call: &ToolCall,
        effect: Effect,
        started: &mut Started,
    ) -> Result<(ToolEnd, bool), Unperformed> {
        let ended = self.invoke(call).await;
        // Repeat a lost idempotent call here, under its own key: if the model called the tool again, that call would have another
        // key. A call that writes files is not repeated, because the lost one may still be writing them.
        if let ToolEnd::Lost(reason) = &ended
            && effect == Effect::Idempotent
            && self.file_use(call) != FileUse::Writes
            && !self.ctx.shutdown.draining.is_cancelled()
        {
            let session_id = &self.session.session_id;
            let reason = self.ctx.store.in_log(Some(session_id.as_str()), reason);
            warn!(session.id = %session_id, call.id = %call.call_id, reason, "An idempotent call is made again, with its key");
            let now = self.lease.term();
            *started = self.start(call, CallStatus::Started).await?.ok_or(Unperformed::Reread)?;
            if !self.lease.is_live() || !now.is_ahead() {
                return Err(Unperformed::Reread);
            }
            return Ok((self.invoke(call).await, true));
        }
        Ok((ended, false))
    }

    /// Writes the outcome of a settled call into the ledger, or leaves it to the turn's commit.
    async fn record(&self, call: &ToolCall, started: Started, ending: &CallEnd) -> Result<(), Unperformed> {
        let CallEnd::Settled(status, outcome) = ending else { return Ok(()) };
        // What a call wrote into the files counts once the turn's snapshot is committed. If that does not happen, the call
        // runs again on the files as they were before the turn, so its outcome must not be in the ledger.
        if self.file_use(call) == FileUse::Writes {
            return Ok(());
        }
        // `running` counts a call until its outcome is recorded: while one still waits for the database, the turn cannot
        // be committed.
        if self.running.load(Ordering::Relaxed) == 1 {
            // The commit of a lone call follows at once and needs nothing here. But if its turn may have changed files (it
            // made them from their seed), they are stored first.
            if self.calls > 1 || self.may_have_changed.load(Ordering::Relaxed) {
                let (call, status, outcome) = (call.clone(), *status, outcome.clone());
                *self.left.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(UnrecordedOutcome { call, started, status, outcome });
            }
        } else if !self.settle(call, &started, *status, outcome).await? {
            return Err(Unperformed::Reread);
        }
        Ok(())
    }
}
