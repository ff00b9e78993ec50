//! The messages of a session that its newest rebase leaves out, and that were not read for its next steps.

use super::Session;
use crate::id::CallId;
use crate::record::{Record, Role};
use crate::strategy::{Rebase, Strategy};
use serde::Deserialize;
use std::collections::HashSet;
use std::sync::Arc;

/// What a session that was read for its next steps does not have. A long conversation that is summarised again and again needs
/// only the messages since its last summary, however many came before.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LeftOut {
    /// Messages with a lower number are not here.
    pub before: i64,
    /// But messages of the user are, from this number on.
    pub user_messages_from: Option<i64>,
    /// The ids of calls that no new call may have. Ids of calls whose messages are here may be among them.
    pub call_ids: HashSet<CallId>,
}

impl LeftOut {
    /// Returns whether the session has `record` nevertheless.
    fn keeps(&self, record: &Record) -> bool {
        let number = record.message_number;
        number >= self.before
            || record.role == Role::User && self.user_messages_from.is_some_and(|from| number >= from)
    }

    /// Returns whether all messages that `rebase` shows are here.
    fn covers(&self, rebase: &Rebase) -> bool {
        let has_users =
            |from: i64| from >= self.before || self.user_messages_from.is_some_and(|first| from >= first);
        rebase.keep_from_message_number >= self.before && rebase.user_messages_from.is_none_or(has_users)
    }
}

impl Session {
    /// Leaves out the messages that the next steps can do without. Returns whether it left out more than before. The store has the
    /// same rule in SQL, where it hydrates.
    ///
    /// The newest reply that readers see always stays, with all that follows it. No decision about what was said last looks further
    /// back: whether a turn is open, whether the model must reply, whether a reply is a remark. A fork and a replay need all
    /// messages, because their files come from them.
    pub fn leave_out(&mut self) -> bool {
        let Some((before, user_messages_from)) = self.needed_from() else { return false };
        let mut call_ids = HashSet::new();
        if let Some(earlier) = &self.left_out {
            // What an earlier copy left out does not come back.
            if before <= earlier.before || !self.rebase.as_ref().is_some_and(|rebase| earlier.covers(rebase))
            {
                return false;
            }
            call_ids.clone_from(&earlier.call_ids);
        }
        let mut left_out = LeftOut { before, user_messages_from, call_ids };
        let gone = self.records.iter().filter(|record| !left_out.keeps(record));
        let gone: Vec<CallId> = gone.flat_map(Record::tool_calls).map(|call| call.call_id.clone()).collect();
        left_out.call_ids.extend(gone);
        self.records.retain(|record| left_out.keeps(record));
        self.left_out = Some(Arc::new(left_out));
        true
    }

    /// Returns the number of the first message that the next steps need, and the number from which they need the user's earlier
    /// messages too. `None`: they may need all messages.
    fn needed_from(&self) -> Option<(i64, Option<i64>)> {
        let rebase = self.rebase.as_ref()?;
        if self.parent_session_id.is_some() || !self.policy.tool_mode.is_live() {
            return None;
        }
        let answers = |record: &&Record| record.role == Role::Assistant && !record.internal;
        let newest = self.records.iter().rev().find(answers)?.message_number;
        let before = rebase.keep_from_message_number.min(newest);
        (before > self.base_message_number + 1).then_some((before, rebase.user_messages_from))
    }

    /// Leaves out what `other`, another copy of this session, has left out.
    pub fn leave_out_like(&mut self, other: &Session) {
        if let Some(left_out) = &other.left_out {
            self.records.retain(|record| left_out.keeps(record));
        }
        self.left_out.clone_from(&other.left_out);
    }

    /// Returns whether a context under `strategy` may show messages that were left out. Then the whole session must be read: the
    /// strategy of its agent is another one now, or somebody has restored an earlier rebase.
    pub fn lacks_messages(&self, strategy: Strategy) -> bool {
        let Some(left_out) = &self.left_out else { return false };
        strategy == Strategy::Full || !self.rebase.as_ref().is_some_and(|rebase| left_out.covers(rebase))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{self, RUN, assistant, result, tool_call, user};
    use crate::record::Block;

    /// A question, a turn with a tool, an answer, another question.
    fn session() -> Session {
        let text = |text: &str| Block::Text { text: text.to_owned() };
        let mut session = example::session();
        session.records = vec![
            user(2, "one"),
            assistant(3, RUN, vec![Block::ToolCall(tool_call("call_1"))]),
            result(4, "call_1"),
            assistant(5, RUN, vec![text("done")]),
            user(6, "two"),
        ];
        session.last_message_number = 6;
        session
    }

    fn rebase(keep_from_message_number: i64) -> Rebase {
        Rebase { keep_from_message_number, ..Rebase::nothing(Strategy::SlidingWindow, 6) }
    }

    fn numbers(session: &Session) -> Vec<i64> {
        session.records.iter().map(|record| record.message_number).collect()
    }

    #[test]
    fn the_ids_of_calls_stay_taken_though_their_messages_go() {
        let mut session = Session { rebase: Some(rebase(5)), ..session() };
        assert!(session.leave_out());
        assert_eq!(numbers(&session), [5, 6]);
        let left_out = session.left_out.clone().expect("some are left out");
        assert_eq!(left_out.call_ids, HashSet::from(["call_1".into()]));
        assert!(!session.leave_out(), "there is nothing more");
        session.records.push(assistant(7, RUN, vec![Block::ToolCall(tool_call("call_2"))]));
        session.rebase = Some(rebase(7));
        assert!(session.leave_out());
        let left_out = session.left_out.expect("more are left out");
        assert_eq!((left_out.before, &left_out.call_ids), (7, &HashSet::from(["call_1".into()])));
    }

    #[test]
    fn nothing_is_left_out_for_a_rebase_that_shows_what_is_gone_already() {
        let mut session = Session { rebase: Some(rebase(5)), ..session() };
        assert!(session.leave_out());
        session.records.push(assistant(7, RUN, vec![Block::Text { text: "more".to_owned() }]));
        session.rebase = Some(Rebase { user_messages_from: Some(2), ..rebase(7) });
        assert!(!session.leave_out());
        assert!(session.lacks_messages(Strategy::SlidingWindow), "and the copy does not claim to have it");
    }

    #[test]
    fn the_newest_answer_is_kept_although_the_context_begins_later() {
        let later = Rebase { user_messages_from: Some(2), ..rebase(6) };
        let mut session = Session { rebase: Some(later), ..session() };
        assert!(session.leave_out());
        assert_eq!(numbers(&session), [2, 5, 6]);
    }

    #[test]
    fn a_fork_a_rehearsal_and_a_context_that_shows_everything_need_all_messages() {
        let whole = Session { rebase: Some(rebase(0)), ..session() };
        let fork = Session { rebase: Some(rebase(5)), parent_session_id: Some("sess_0".into()), ..session() };
        let mut dry = Session { rebase: Some(rebase(5)), ..session() };
        dry.policy.tool_mode = crate::policy::ToolMode::Dry;
        for mut session in [session(), whole, fork, dry] {
            assert!(!session.leave_out());
            assert_eq!(numbers(&session), [2, 3, 4, 5, 6]);
            assert!(!session.lacks_messages(Strategy::Full));
        }
    }

    #[test]
    fn another_strategy_and_an_earlier_rebase_need_what_was_left_out() {
        let mut tail = Session { rebase: Some(rebase(5)), ..session() };
        assert!(tail.leave_out());
        assert!(!tail.lacks_messages(Strategy::SlidingWindow) && !tail.lacks_messages(Strategy::Compaction));
        assert!(tail.lacks_messages(Strategy::Full));
        for (other, lacks) in [
            (Some(rebase(6)), false),
            (Some(rebase(3)), true),
            (Some(Rebase { user_messages_from: Some(2), ..rebase(6) }), true),
            (Some(Rebase { user_messages_from: Some(5), ..rebase(6) }), false),
            (None, true),
        ] {
            tail.rebase = other.clone();
            assert_eq!(tail.lacks_messages(Strategy::SlidingWindow), lacks, "{other:?}");
        }
    }

    #[test]
    fn two_copies_of_a_session_are_equal_once_they_leave_out_the_same() {
        let whole = Session { rebase: Some(rebase(5)), ..session() };
        let mut tail = whole.clone();
        tail.leave_out();
        let mut read = whole;
        assert_ne!(read, tail);
        read.leave_out_like(&tail);
        assert_eq!(read, tail);
    }
}
