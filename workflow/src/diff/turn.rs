//! Splits a transcript into turns: the input of the model, its answer, and the results of its calls.

use crate::id::CallId;
use crate::record::{Record, Role, ToolCall};
use std::collections::HashMap;

/// One turn.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn<'a> {
    pub inputs: Vec<&'a Record>,
    pub answer: Option<&'a Record>,
    /// Results of the answer's calls, in the order in which they came.
    pub results: Vec<Returned<'a>>,
}

/// The message with the result of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Returned<'a> {
    pub record: &'a Record,
    /// Whether the result came after a later turn had begun.
    pub late: bool,
}

impl<'a> Turn<'a> {
    /// The turns of `records`. Every record is in one of them.
    pub fn of(records: &'a [Record]) -> Vec<Turn<'a>> {
        let mut turns: Vec<Turn<'a>> = Vec::new();
        let mut asked_in: HashMap<&CallId, usize> = HashMap::new();
        for record in records {
            let answered = turns.last().is_none_or(|turn| turn.answer.is_some());
            match record.role {
                Role::Tool => {
                    let own = record.tool_results().find_map(|result| asked_in.get(&result.call_id));
                    // A result that answers no call stays in the turn in which it came.
                    let last = turns.len().saturating_sub(1);
                    if turns.is_empty() {
                        turns.push(Turn::default());
                    }
                    let at = own.copied().unwrap_or(last);
                    turns[at].results.push(Returned { record, late: at != last });
                }
                Role::Assistant if !record.is_summary() => {
                    if answered {
                        turns.push(Turn::default());
                    }
                    let at = turns.len() - 1;
                    asked_in.extend(record.tool_calls().map(|call| (&call.call_id, at)));
                    turns[at].answer = Some(record);
                }
                // A summary is input of the next answer and not an answer.
                Role::User | Role::System | Role::Assistant => {
                    if answered {
                        turns.push(Turn::default());
                    }
                    let at = turns.len() - 1;
                    turns[at].inputs.push(record);
                }
            }
        }
        turns
    }

    /// The turn's messages: inputs, answer, results.
    pub fn records(&self) -> impl Iterator<Item = &'a Record> {
        self.inputs.iter().copied().chain(self.answer).chain(self.results.iter().map(|result| result.record))
    }

    /// The calls that the answer asks for.
    pub fn calls(&self) -> impl Iterator<Item = &'a ToolCall> {
        self.answer.into_iter().flat_map(Record::tool_calls)
    }
}
