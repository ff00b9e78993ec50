//! Model calls and tool calls that were dropped while they ran.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use wakeful_store::queue::Lease;
use wakeful_workflow::id::{CallId, GenerationId, SessionId};
use wakeful_workflow::record::Usage;

/// How many calls are remembered. A call is dropped for other reasons than a cancel too, and then nothing asks for it.
const REMEMBERED: usize = 256;

/// The calls of this process that were dropped while they ran.
#[derive(Debug, Default)]
pub struct CutCalls {
    models: Mutex<VecDeque<(GenerationId, Cut)>>,
    tools: Mutex<VecDeque<(SessionId, CallId)>>,
}

/// What a call had said, and what its provider had counted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cut {
    pub(super) bytes: usize,
    pub(super) counted: Usage,
}

impl CutCalls {
    pub(super) fn remember(&self, generation_id: &GenerationId, cut: Cut) {
        let mut calls = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push_back((generation_id.clone(), cut));
        if calls.len() > REMEMBERED {
            calls.pop_front();
        }
    }

    pub(super) fn take(&self, generation_id: &GenerationId) -> Option<Cut> {
        let mut calls = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let at = calls.iter().position(|(id, _)| id == generation_id)?;
        calls.remove(at).map(|(_, cut)| cut)
    }

    fn remember_tool(&self, session_id: &SessionId, call_id: &CallId) {
        let mut calls = self.tools.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push_back((session_id.clone(), call_id.clone()));
        if calls.len() > REMEMBERED {
            calls.pop_front();
        }
    }

    /// The tool calls of the session that were dropped. It keeps them, because the commit that needs them may be repeated.
    pub(super) fn tools_of(&self, session_id: &SessionId) -> Vec<CallId> {
        let calls = self.tools.lock().unwrap_or_else(PoisonError::into_inner);
        calls.iter().filter(|(of, _)| of == session_id).map(|(_, call_id)| call_id.clone()).collect()
    }
}

/// A tool call that runs. Dropped before `is_over`, it is remembered as cut off, unless its lease was lost: then another worker may
/// have the session.
pub(super) struct RunningTool<'a> {
    pub(super) cut: &'a CutCalls,
    pub(super) lease: &'a Lease,
    pub(super) session_id: &'a SessionId,
    pub(super) call_id: &'a CallId,
    pub(super) is_over: bool,
}

impl Drop for RunningTool<'_> {
    fn drop(&mut self) {
        if !self.is_over && self.lease.is_live() {
            self.cut.remember_tool(self.session_id, self.call_id);
        }
    }
}
