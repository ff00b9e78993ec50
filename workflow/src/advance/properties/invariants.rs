//! Invariants after every commit of a session.

use super::World;
use crate::derive::{self, StateUpdate};
use crate::event::Event;
use crate::record::Record;
use crate::recover::{Checkpoint, Entry, Recovered, recover};
use crate::state::State;
use serde_json::Value;
use std::collections::HashSet;

impl World {
    pub(super) fn check(&self) {
        let session = &self.session;
        let numbers: Vec<i64> = session.records.iter().map(|record| record.message_number).collect();
        assert_eq!(numbers, (2..=session.last_message_number).collect::<Vec<_>>(), "numbers are dense");

        let drained = session.records.iter().filter_map(|record| record.details.inbox_id);
        let mut messages: Vec<i64> = drained.chain(session.inbox.iter().map(|one| one.inbox_id)).collect();
        messages.sort_unstable();
        assert_eq!(messages, (1..=self.accepted).collect::<Vec<_>>(), "each message is kept, and once");

        let mut to = 1;
        let mut totals = crate::session::Totals::default();
        for step in &self.steps {
            assert_eq!(step.from_message_number, to, "a step begins where the last one ended");
            assert!(step.to_message_number > to);
            to = step.to_message_number;
            totals.add(&step.usage);
        }
        assert_eq!((session.to_message_number, session.last_step_number), (to, self.steps.len() as i64));
        assert_eq!(session.totals, totals, "totals are the sum of the steps");

        self.check_state();
        let recovered = self.recovered();
        assert_eq!(session.state, recovered.context_state, "the journal gives the state back");
        assert_eq!(session.status.as_str(), recovered.lifecycle_state);
        let asked: Vec<_> = session.records.iter().flat_map(Record::tool_calls).map(|c| &c.call_id).collect();
        assert_eq!(asked.iter().collect::<HashSet<_>>().len(), asked.len(), "call ids are unique");
        assert!(self.ran.values().all(|times| *times <= 1), "a guarded effect happens at most once");
    }

    /// Checks that the commits' state updates equal those that the transcript alone gives, at every place
    /// where a fork may cut it.
    fn check_state(&self) {
        // Read the records back from JSON, as the database returns them.
        let stored = serde_json::to_string(&self.session.records).expect("records serialise");
        let records: Vec<Record> = serde_json::from_str(&stored).expect("and read back");
        let derived: Vec<StateUpdate> = derive::derive(&records).collect();
        assert_eq!(derived, self.drained, "derived equals drained");
        assert_eq!(self.session.state, derive::fold(State::new(), &records));
        for (number, drained, state) in &self.cuts {
            let (kept, rest): (Vec<&Record>, Vec<&Record>) =
                records.iter().partition(|record| record.message_number <= *number);
            let derived: Vec<StateUpdate> = derive::derive(kept.iter().copied()).collect();
            assert_eq!(derived, self.drained[..*drained], "a fork at {number} has what was drained by then");
            assert_eq!(&derive::fold(State::new(), kept.iter().copied()), state, "and its state");
            assert_eq!(
                derive::fold(state.clone(), rest.iter().copied()),
                self.session.state,
                "a replay of the rest"
            );
        }
    }

    /// Recovers the session from the journal alone.
    fn recovered(&self) -> Recovered {
        let rows: Vec<(String, Value)> = self.journal.iter().map(Event::to_row).collect();
        let newest = rows.iter().rposition(|(kind, _)| kind == "checkpoint");
        let checkpoint = newest.map(|at| {
            let mut payload = rows[at].1.clone();
            let state = &self.blobs[payload["state_sha256"].as_str().expect("a hash")];
            payload["context_state"] = serde_json::from_slice(state).expect("a state");
            Checkpoint::read(at as i64, &payload).expect("a checkpoint")
        });
        let after = &rows[newest.map_or(0, |at| at + 1)..];
        recover(checkpoint, after.iter().map(|(kind, payload)| Entry::read(kind, payload).expect("an entry")))
    }
}
