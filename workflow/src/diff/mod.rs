//! Compares two sessions. Tool calls matter more than state, and state matters more than prose.
//!
//! [`diff`] pairs the turns of two sessions. For each pair it reports what differs and how much that matters
//! ([`Level`]). It is pure and symmetric, and its work is bounded whatever the transcripts hold.
//!
//! Values that Wakeful assigns never count: the ids of sessions, runs and messages, the numbers of messages
//! and steps, and the ids of paired calls. Tokens, money, time, models and request hashes are shown but do
//! not count. To check for equal bytes, read [`Report::requests`].
//!
//! A report is JSON with the format name [`FORMAT`]. Later versions may add fields. They never remove a field
//! or change its meaning. In a report, and in this module, a reply of the model is called an answer.
#![doc = include_str!("README.md")]

mod align;
mod compare;
mod ids;
mod report;
mod side;
mod sides;
mod turn;
mod value;
mod words;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use report::{
    Difference, Divergence, Level, Part, Report, RequestMatch, Requests, SetupDifference, Subject, Totals,
    TurnDiff, TurnView,
};
pub use side::{Answer, Side, Step};
pub use sides::Sides;
pub use value::ValueDifference;
pub use words::{Piece, WhichSide};

use compare::Comparison;
use turn::Turn;

/// Format name of a report.
pub const FORMAT: &str = "wakeful-diff/1";

/// Compares two sessions.
pub fn diff(left: &Side, right: &Side) -> Report {
    let turns = Sides { left: Turn::of(&left.records), right: Turn::of(&right.records) };
    let rows = align::turns(left, &turns.left, right, &turns.right);
    let mut comparison = Comparison::new(left, right, &turns.left, &turns.right, &rows);
    let setup = comparison.setup();
    let rows: Vec<TurnDiff> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| {
            comparison.turn(
                index + 1,
                row.left.map(|at| &turns.left[at]),
                row.right.map(|at| &turns.right[at]),
            )
        })
        .collect();
    let state = comparison.state();
    let in_state = if state.is_empty() { Level::Equal } else { Level::State };
    let verdict = rows.iter().map(|row| row.level).max().unwrap_or(Level::Equal).max(in_state);
    let (mut totals, mut compared) = (Sides::default(), Sides::default());
    let mut requests = Requests::default();
    for row in &rows {
        add(&mut totals, row.left.as_ref(), row.right.as_ref());
        match (&row.left, &row.right) {
            (Some(one), Some(other)) if one.answer.is_some() && other.answer.is_some() => {
                add(&mut compared, Some(one), Some(other));
            }
            (_, _) => {}
        }
        match row.request {
            RequestMatch::Equal => requests.equal += 1,
            RequestMatch::Differs => {
                requests.differ += 1;
                requests.first_that_differs.get_or_insert(row.turn);
            }
            RequestMatch::Unknown => requests.unknown += 1,
        }
    }
    let first = |least: Level| rows.iter().find(|row| row.level >= least).map(divergence);
    Report {
        format: FORMAT,
        verdict,
        left: subject(left, turns.left.len()),
        right: subject(right, turns.right.len()),
        setup,
        first_divergence: first(Level::Prose),
        first_tool_divergence: first(Level::Tools),
        state,
        requests,
        totals,
        compared,
        turns: rows,
    }
}

fn add(totals: &mut Sides<Totals>, left: Option<&TurnView>, right: Option<&TurnView>) {
    if let Some(turn) = left {
        totals.left.add(turn);
    }
    if let Some(turn) = right {
        totals.right.add(turn);
    }
}

fn subject(side: &Side, turns: usize) -> Subject {
    Subject {
        session_id: side.session_id.to_string(),
        agent: side.agent.clone(),
        model: side.model.clone(),
        status: side.status.clone(),
        messages: side.records.len(),
        turns,
    }
}

fn divergence(row: &TurnDiff) -> Divergence {
    let first = |turn: &Option<TurnView>| turn.as_ref().map(|turn| turn.first_message);
    Divergence {
        turn: row.turn,
        level: row.level,
        left_message: first(&row.left),
        right_message: first(&row.right),
        what: row.differences.first().map_or_else(String::new, |difference| difference.part.sentence()),
    }
}
