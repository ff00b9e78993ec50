//! The order in which a model is shown messages: each result directly follows the message that asked for it.
//!
//! The log has messages in the order in which they came. A message of the user may come before the result of a call that waited:
//! for an operator's yes, for a decision on an unknown outcome, or for a new run after one that failed. A provider takes no
//! result after that, and a model that read "not known" first might make the call again.

use crate::record::{Block, Record, Role};

/// Returns the records of one session with each turn's results moved up to its calls.
pub(crate) fn in_turns<'a>(records: impl Iterator<Item = &'a Record>) -> Vec<&'a Record> {
    let mut shown: Vec<&Record> = Vec::with_capacity(records.size_hint().0);
    // The newest reply, and where its next result belongs.
    let mut asked: Option<(&Record, usize)> = None;
    for record in records {
        match (&mut asked, record.role) {
            (Some((answer, place)), Role::Tool) if has_result_of(record, answer) => {
                shown.insert(*place, record);
                *place += 1;
            }
            (_, Role::Assistant) if !record.is_summary() => {
                shown.push(record);
                asked = Some((record, shown.len()));
            }
            (_, Role::Assistant | Role::Tool | Role::User | Role::System) => shown.push(record),
        }
    }
    shown
}

fn has_result_of(record: &Record, answer: &Record) -> bool {
    record.content.iter().any(|block| match block {
        Block::ToolResult(result) => answer.tool_calls().any(|call| call.call_id == result.call_id),
        Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => false,
    })
}

/// Returns whether the record at `index`, which is not the assistant's, stands between a call and its result.
pub(crate) fn is_within_turn(records: &[&Record], index: usize) -> bool {
    records[index..]
        .iter()
        .take_while(|record| record.role != Role::Assistant || record.is_summary())
        .any(|record| record.role == Role::Tool)
}
