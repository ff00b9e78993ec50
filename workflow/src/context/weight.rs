//! The size of a context. Bytes are counted; tokens are estimated from the provider's last count.

use super::select::{self, Size};
use crate::agent::ToolDefinition;
use crate::record::{Record, Usage};
use crate::session::Session;
use crate::strategy::Rebase;
use serde::Serialize;

/// The weight of one context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Weight {
    pub messages: usize,
    /// Bytes of the system prompt, the tools' definitions and the messages.
    pub bytes: usize,
    /// Estimated.
    pub tokens: i64,
}

/// Bytes per token, as a fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    bytes: u128,
    tokens: u128,
}

impl Rate {
    /// Three and a half bytes a token: prose has four, code and JSON have three.
    const USUAL: Rate = Rate { bytes: 7, tokens: 2 };

    /// Returns the bytes per token of the request for the session's newest reply: its bytes, divided by the
    /// tokens that the provider counted. Falls back to [`Rate::USUAL`] if that request cannot be rebuilt,
    /// which is so when the reply came before the newest rebase.
    pub(super) fn of(session: &Session, tools: &[ToolDefinition]) -> Rate {
        let current = session.rebase.as_ref();
        let Some((answer, usage)) = last_answer(session, current) else { return Rate::USUAL };
        let context = select::size(session, tools, current);
        let after: usize = since(session, answer).map(|record| record.content.bytes()).sum();
        let inbox: usize = session.inbox.iter().map(|message| message.text.len()).sum();
        // The context must contain all of these parts. Otherwise the rate would be wrong.
        let rest = [after, inbox, answer.content.bytes()]
            .iter()
            .try_fold(context.bytes, |rest, part| rest.checked_sub(*part));
        let Some(bytes) = rest else { return Rate::USUAL };
        let (bytes, tokens) = (bytes as u128, usage.input_tokens as u128);
        // Outside these bounds the provider counted something other than this context.
        if bytes < tokens || bytes > 8 * tokens { Rate::USUAL } else { Rate { bytes, tokens } }
    }

    pub(super) fn tokens(&self, bytes: usize) -> i64 {
        i64::try_from((bytes as u128 * self.tokens).div_ceil(self.bytes)).unwrap_or(i64::MAX)
    }

    pub(super) fn bytes(&self, tokens: i64) -> usize {
        let tokens = u128::try_from(tokens).unwrap_or(0);
        usize::try_from(tokens * self.bytes / self.tokens).unwrap_or(usize::MAX)
    }
}

/// Weighs the context that [`build`](super::build) makes of `session`, without making it. `rebase` is the rebase decided
/// for it, if any.
pub fn weigh(session: &Session, tools: &[ToolDefinition], rebase: Option<&Rebase>) -> Weight {
    let rate = Rate::of(session, tools);
    let current = rebase.or(session.rebase.as_ref());
    let Size { messages, bytes } = select::size(session, tools, current);
    Weight { messages, bytes, tokens: estimate(session, bytes, current, &rate) }
}

/// Returns an upper bound of what [`estimate`] returns for the context of the session's newest rebase, without building the
/// context. `None`: the provider has not counted it.
pub(super) fn at_most(session: &Session) -> Option<i64> {
    let (answer, usage) = last_answer(session, session.rebase.as_ref())?;
    let after: usize = since(session, answer).map(|record| record.content.bytes()).sum();
    let inbox: usize = session.inbox.iter().map(|message| message.text.len()).sum();
    // No [`Rate`] has more tokens than bytes.
    let since = i64::try_from(after + inbox).unwrap_or(i64::MAX);
    Some(usage.input_tokens.saturating_add(usage.output_tokens).saturating_add(since))
}

/// Estimates the tokens of a context of `bytes`, which `rebase` selects. If the provider's last count was for the same
/// selection, adds an estimate of what came since. Otherwise estimates everything from the bytes.
pub(super) fn estimate(session: &Session, bytes: usize, rebase: Option<&Rebase>, rate: &Rate) -> i64 {
    let by_bytes = rate.tokens(bytes);
    if rebase != session.rebase.as_ref() {
        return by_bytes;
    }
    match last_answer(session, rebase) {
        Some((answer, usage)) => {
            let after: usize = since(session, answer).map(|record| record.content.bytes()).sum();
            let inbox: usize = session.inbox.iter().map(|message| message.text.len()).sum();
            // Output tokens include the model's thinking, which the next request may not contain. So the
            // estimate tends to be too high.
            usage.input_tokens.saturating_add(usage.output_tokens).saturating_add(rate.tokens(after + inbox))
        }
        None => by_bytes,
    }
}

/// The newest reply that was given under `rebase`, and the provider's usage for it.
fn last_answer<'a>(session: &'a Session, rebase: Option<&Rebase>) -> Option<(&'a Record, Usage)> {
    let at = rebase.map_or(0, |rebase| rebase.at_message_number);
    let answer = session.records.iter().rev().find(|record| record.is_reply())?;
    let usage = answer.details.usage.filter(|usage| usage.input_tokens > 0)?;
    (answer.message_number > at).then_some((answer, usage))
}

fn since<'a>(session: &'a Session, answer: &Record) -> impl Iterator<Item = &'a Record> {
    let number = answer.message_number;
    session.records.iter().filter(move |record| record.message_number > number && !record.is_summary())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{assistant, session};
    use crate::record::Block;
    use crate::strategy::Strategy;

    #[test]
    fn a_context_that_does_not_hold_its_newest_answer_is_no_measure() {
        let mut session = session();
        session.seeds.clear();
        let text = "a long answer ".repeat(10);
        session.records.push(assistant(3, "run_2", vec![Block::Text { text }]));
        session.last_message_number = 3;
        session.rebase =
            Some(Rebase { keep_from_message_number: 9, ..Rebase::nothing(Strategy::SlidingWindow, 0) });
        assert_eq!(Rate::of(&session, &[]), Rate::USUAL);
    }
}
