//! A session as it will be after a commit that is not made yet.

use super::Session;
use crate::advance::Transition;
use std::mem::take;

impl Session {
    /// Applies `transition`, which is not committed yet. Returns the session as it was, without what a transition does not change or
    /// only appends to: these parts grow with the session and are not copied. [`Session::undo`] takes it back.
    pub fn apply_tentatively(&mut self, transition: &Transition) -> Session {
        let (records, seeds) = (take(&mut self.records), take(&mut self.seeds));
        let (prefix, policy) = (self.prefix.take(), take(&mut self.policy));
        let before = self.clone();
        (self.records, self.seeds, self.prefix, self.policy) = (records, seeds, prefix, policy);
        self.apply(transition);
        before
    }

    /// Takes `transition` back. `before` is what [`Session::apply_tentatively`] returned for it.
    pub fn undo(&mut self, before: Session, transition: &Transition) {
        let mut records = take(&mut self.records);
        records.truncate(records.len() - transition.records.len());
        let (seeds, prefix, policy) = (take(&mut self.seeds), self.prefix.take(), take(&mut self.policy));
        *self = Session { records, seeds, prefix, policy, ..before };
    }
}
