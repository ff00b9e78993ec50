//! Drafts the commit of a summary: the record and the rebase that points at it, or one more counted failure.

use super::Draft;
use super::journal::After;
use crate::advance::{Compaction, CompactionEnd, Transition};
use crate::event::Event;
use crate::generation::Purpose;
use crate::record::{Block, Details, Role, Usage, without_nul};
use crate::strategy::Strategy;

impl Draft<'_> {
    /// Drafts the commit of a summary call. The step stays open, because a summary answers no message.
    pub(in crate::advance) fn compacted(mut self, compaction: Compaction) -> Transition {
        self.journal_interrupted(&After::Nothing("a summary of the context came first"));
        self.transition.generation_over = true;
        let prompt_tokens = match &compaction.end {
            CompactionEnd::Written { usage, .. } => Some(usage.input_tokens),
            CompactionEnd::Failed(_) => None,
        };
        self.transition.events.push(Event::LlmCalled {
            generation_id: compaction.generation_id.clone(),
            model: compaction.model,
            attempt: compaction.attempt,
            request_sha256: compaction.request_sha256,
            context_strategy: Strategy::Compaction.as_str().to_owned(),
            prompt_tokens,
            repairs: compaction.repairs,
            started_at: Some(compaction.started_at),
            purpose: Purpose::Compaction,
            prefill_bytes: None,
        });
        match compaction.end {
            CompactionEnd::Written { text, finish_reason, usage, rebase } => {
                let details = Details {
                    usage: Some(usage),
                    finish_reason: Some(finish_reason),
                    summary: true,
                    ..Details::default()
                };
                self.push(Role::Assistant, vec![Block::Text { text }], details);
                self.transition.events.push(Event::ContextRebased(rebase.clone()));
                self.transition.rebase = Some(rebase);
                self.transition.compaction_failures = (self.session.compaction_failures > 0).then_some(0);
            }
            CompactionEnd::Failed(fault) => {
                let failures = self.session.compaction_failures + 1;
                self.transition.events.push(Event::CompactionFailed {
                    generation_id: compaction.generation_id,
                    reason: without_nul(fault.to_string()),
                    failures,
                });
                self.transition.compaction_failures = Some(failures);
            }
        }
        self.transition
    }

    /// Returns `usage` plus the usage of the summaries that no step has counted yet. Token counts are capped
    /// at what a step's row can hold (32 bits).
    pub(super) fn with_summaries(&self, usage: Usage) -> Usage {
        let uncounted = |number| number > self.session.to_message_number;
        let summaries = self
            .session
            .records
            .iter()
            .filter(|record| record.is_summary() && uncounted(record.message_number));
        let summaries = summaries.filter_map(|record| record.details.usage);
        summaries.chain([usage]).fold(Usage::default(), |sum, one| sum.plus(&one))
    }
}
