//! Model calls that were dropped while they ran.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use wakeful_workflow::id::GenerationId;
use wakeful_workflow::record::Usage;

/// How many calls are remembered. A call is dropped for other reasons than a cancel too, and then nothing asks for it.
const REMEMBERED: usize = 256;

/// The calls of this process that were dropped while they ran.
#[derive(Debug, Default)]
pub struct CutCalls(Mutex<VecDeque<(GenerationId, Cut)>>);

/// What a call had said, and what its provider had counted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cut {
    pub(super) bytes: usize,
    pub(super) counted: Usage,
}

impl CutCalls {
    pub(super) fn remember(&self, generation_id: &GenerationId, cut: Cut) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push_back((generation_id.clone(), cut));
        if calls.len() > REMEMBERED {
            calls.pop_front();
        }
    }

    pub(super) fn take(&self, generation_id: &GenerationId) -> Option<Cut> {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = calls.iter().position(|(id, _)| id == generation_id)?;
        calls.remove(at).map(|(_, cut)| cut)
    }
}
