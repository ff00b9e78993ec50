//! Compaction: the model writes a summary, which replaces older messages in the context.
//!
//! The summary is one record, stored once. The rebase that is committed with it points at three things: the
//! summary, the newest turns, and the user's newest messages before those turns. Turns and messages are shown
//! verbatim. The transcript keeps all originals.

use super::input::{Context, Message};
use super::select::{self, newest_user_before, select, shown, starts_unit};
use super::weight::{self, Rate, Weight};
use crate::agent::{ToolDefinition, Tools};
use crate::record::{Block, Record, Role};
use crate::session::Session;
use crate::state::State;
use crate::strategy::{ContextPolicy, Rebase, Strategy};

/// After this many failures a run goes on without a summary. From then on only tool results are trimmed.
pub const FAILURES: i64 = 3;

/// Percent of the window that the newest turns may take after a compaction. The user's messages before those
/// turns may take the same share again, but no more than [`USER_TOKENS`].
const KEPT_PERCENT: i64 = 10;
/// Percent of the window that the newest turns may take if the model has not seen their results yet.
const UNSEEN_PERCENT: i64 = 30;
/// Limit for the user's kept messages, however large the window is.
const USER_TOKENS: i64 = 20_000;
/// A larger state is left out of the summary, because only the tools that record it need it.
const STATE_BYTES: usize = 4096;

const INSTRUCTION: &str = "Write a summary of the conversation so far, for yourself: it will stand in the place of the \
messages above. Keep what the user wants, in the user's words where they matter; what was decided, and why; facts with \
their names, numbers, ids and paths exactly as they are; what was done with which tool and what came of it; what went \
wrong and how it was mended; and what is unfinished, with the next step. Call no tools and do not answer the user. \
Write only the summary.";

const HEADING: &str =
    "[Summary of the conversation so far. The messages that it stands for are kept, and not shown.]";

/// Returns whether `tokens` reach the share of the window at which a summary is due.
pub(super) fn is_full(tokens: i64, policy: &ContextPolicy, window_tokens: i64) -> bool {
    i128::from(tokens) * 100 >= i128::from(window_tokens) * i128::from(policy.compact_at_percent)
}

/// Returns whether the context of the session's newest rebase is not full, as far as that can be told without building it.
pub(super) fn has_room(session: &Session, policy: &ContextPolicy, window_tokens: i64) -> bool {
    weight::at_most(session).is_some_and(|tokens| !is_full(tokens, policy, window_tokens))
}

/// Returns whether the next model call must write a summary.
pub fn is_due(
    session: &Session,
    tools: &[ToolDefinition],
    policy: &ContextPolicy,
    window_tokens: i64,
) -> bool {
    if !is_possible(session, policy) {
        return false;
    }
    // Each model call asks this first. Nearly always there is room, and no message has to be weighed.
    let rebase = select::decide(session, tools, policy, window_tokens);
    if rebase.is_none() && has_room(session, policy, window_tokens) {
        return false;
    }
    let weight = weight::weigh(session, tools, rebase.as_ref());
    is_full(weight.tokens, policy, window_tokens)
}

/// Returns whether a summary may be written: the strategy writes summaries, fewer than [`FAILURES`] failed,
/// and the model has replied since the newest summary. The last condition stops a loop when a context stays
/// too large after its summary.
pub fn is_possible(session: &Session, policy: &ContextPolicy) -> bool {
    let newest = session.records.iter().rev().find(|record| record.role == Role::Assistant);
    policy.strategy == Strategy::Compaction
        && session.compaction_failures < FAILURES
        && newest.is_some_and(|record| !record.is_summary())
}

/// Builds the request for a summary: the context that the model saw last, so that the provider's prompt cache
/// hits, then the instruction. Leaves out the `without` oldest turns, for a context that is too long as a
/// whole. Returns `None` if that leaves nothing.
pub fn request(session: &Session, tools: impl Into<Tools>, without: usize) -> Option<Context> {
    let tools = tools.into();
    let current = session.rebase.as_ref();
    let records: Vec<&Record> = shown(session, current).collect();
    let mut context = if without == 0 {
        // Messages in the inbox are not in the transcript yet. The model replies to them after the summary.
        select(&Session { inbox: Vec::new(), ..session.clone() }, tools, current)
    } else {
        let from = (0..records.len()).filter(|index| starts_unit(&records, *index)).nth(without)?;
        let rebase = Rebase {
            keep_from_message_number: records[from].message_number,
            user_messages_from: None,
            ..current.cloned().unwrap_or_else(|| Rebase::nothing(Strategy::Compaction, 0))
        };
        select(&Session { inbox: Vec::new(), ..session.clone() }, tools, Some(&rebase))
    };
    context.messages.push(Message {
        role: Role::User,
        content: vec![Block::Text { text: INSTRUCTION.to_owned() }].into(),
    });
    Some(context)
}

/// Text of the summary's record: a heading, the model's text, and the session's state.
pub fn text(written: &str, state: &State) -> String {
    let mut text = format!("{HEADING}\n\n{}", written.trim());
    if !state.is_empty() {
        let json = serde_json::to_string(state).expect("a map of JSON values serialises");
        if json.len() <= STATE_BYTES {
            text.push_str("\n\nRecorded in this conversation: ");
            text.push_str(&json);
        }
    }
    text
}

/// Returns the rebase to commit with a summary that becomes the session's next message.
pub fn rebase(session: &Session, tools: &[ToolDefinition], window_tokens: i64) -> Rebase {
    let number = session.last_message_number + 1;
    let rate = Rate::of(session, tools);
    let percent = |percent| window_tokens.saturating_mul(percent) / 100;
    let budget = percent(KEPT_PERCENT);
    let keep_from_message_number = newest_turns(session, rate.bytes(budget))
        .or_else(|| {
            newest_turns(session, rate.bytes(percent(UNSEEN_PERCENT)))
                .filter(|from| is_unseen(session, *from))
        })
        .unwrap_or(number);
    let user_messages_from =
        users_from(session, keep_from_message_number, rate.bytes(budget.min(USER_TOKENS)));
    Rebase {
        strategy: Strategy::Compaction,
        at_message_number: number,
        keep_from_message_number,
        user_messages_from,
        summary_message_number: Some(number),
        trim_results_before: session.rebase.as_ref().and_then(|rebase| rebase.trim_results_before),
    }
}

/// Returns the number of the oldest message such that all turns from there on fit into `bytes`.
fn newest_turns(session: &Session, bytes: usize) -> Option<i64> {
    let records: Vec<&Record> = shown(session, session.rebase.as_ref()).collect();
    let keep_from = session.rebase.as_ref().map_or(0, |rebase| rebase.keep_from_message_number);
    let (mut weight, mut from) = (0, None);
    for (index, record) in records.iter().enumerate().rev() {
        weight += record.content.bytes();
        if weight > bytes || record.message_number < keep_from {
            break;
        }
        if starts_unit(&records, index) {
            from = Some(record.message_number);
        }
    }
    from
}

/// Returns whether the model has not replied since the message `from`, which begins a turn.
fn is_unseen(session: &Session, from: i64) -> bool {
    !session.records.iter().any(|record| record.is_reply() && record.message_number > from)
}

/// Returns the number of the oldest message such that all user messages from there up to `keep_from` fit into
/// `bytes`. The newest user message is always included: it is the task that the later messages work on. What an earlier rebase
/// left out does not come back.
fn users_from(session: &Session, keep_from: i64, bytes: usize) -> Option<i64> {
    let mut from = newest_user_before(session, keep_from)?;
    let mut weight = 0;
    let users = shown(session, session.rebase.as_ref()).rev().filter(|record| record.role == Role::User);
    for record in users.filter(|record| record.message_number < keep_from) {
        weight += record.content.bytes();
        if weight > bytes {
            break;
        }
        from = record.message_number;
    }
    Some(from)
}

/// Estimates the context's weight after a compaction, with a summary of the usual length. `wakeful session
/// context` shows it.
pub fn estimate(session: &Session, tools: &[ToolDefinition], window_tokens: i64) -> Weight {
    let rate = Rate::of(session, tools);
    let rebase = Rebase { summary_message_number: None, ..rebase(session, tools, window_tokens) };
    let context = select::size(session, tools, Some(&rebase));
    let bytes = context.bytes + SUMMARY_BYTES;
    Weight { messages: context.messages + 1, bytes, tokens: rate.tokens(bytes) }
}

/// Usual length of a summary: about a thousand tokens.
const SUMMARY_BYTES: usize = 4096;
