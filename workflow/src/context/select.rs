//! Selection: which messages a call shows, and when the beginning of the selection moves.

use super::compaction;
use super::input::{Context, Message};
use super::weight::{self, Rate, Weight};
use crate::agent::ToolDefinition;
use crate::prefix::system_of;
use crate::record::{Block, Record, Role, ToolResult};
use crate::seed::Seed;
use crate::session::Session;
use crate::strategy::{ContextPolicy, Rebase, Strategy};

/// A smaller result is not worth its placeholder.
const WORTH_TRIMMING_BYTES: usize = 512;

/// The tool that reads trimmed results, where the model has it.
pub(crate) const READ_OUTPUT: &str = "read_output";

/// A context, and the rebase that was decided for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Built {
    pub context: Context,
    /// Journalled with the answer. `None`: the context begins where the one before began.
    pub rebase: Option<Rebase>,
}

/// Builds the next request's context under `policy`, for a model with a window of `window_tokens`. `tools` are those of the agent's
/// configuration, for a session whose prefix was never pinned.
///
/// Depends on its arguments alone: a worker that repeats a call after a crash builds the same bytes.
pub fn build(
    session: &Session,
    tools: Vec<ToolDefinition>,
    policy: &ContextPolicy,
    window_tokens: i64,
) -> Built {
    let rebase = decide(session, &tools, policy, window_tokens);
    let current = rebase.as_ref().or(session.rebase.as_ref());
    Built { context: select(session, tools, current), rebase }
}

/// The same where a journal has what was decided then: `rebase` held for the call, whatever the measures say today.
pub fn build_again(session: &Session, tools: Vec<ToolDefinition>, rebase: Option<&Rebase>) -> Built {
    let moved = rebase.filter(|rebase| session.rebase.as_ref() != Some(*rebase)).cloned();
    Built { context: select(session, tools, rebase), rebase: moved }
}

/// The same for a strategy that a person asks about, and what it weighs. One that is not the session's begins with
/// everything. A summary that is due is not written for it.
pub fn build_as(
    session: &Session,
    tools: Vec<ToolDefinition>,
    policy: &ContextPolicy,
    window_tokens: i64,
    strategy: Strategy,
) -> (Built, Weight) {
    if strategy == policy.strategy {
        let built = build(session, tools, policy, window_tokens);
        let weight = weight::weigh(session, &built.context, built.rebase.as_ref());
        return (built, weight);
    }
    let policy = ContextPolicy { strategy, ..*policy };
    let anew = Session { rebase: None, ..session.clone() };
    let rate = Rate::of(session, &tools);
    let built = build(&anew, tools, &policy, window_tokens);
    let current = built.rebase.as_ref();
    // What the provider counted last is of another selection, unless nothing is left out of either.
    let counted = if session.rebase.is_none() { session } else { &Session { records: Vec::new(), ..anew } };
    let weight = Weight {
        messages: built.context.messages.len(),
        bytes: weight::bytes(&built.context),
        tokens: weight::estimate(counted, &built.context, current, &rate),
    };
    (built, weight)
}

/// Everything: the prefix, seeds, records, then the follow-ups that wait in the inbox.
pub fn full(session: &Session, tools: Vec<ToolDefinition>) -> Context {
    select(session, tools, None)
}

/// The numbers of the messages that a context of `session` under `rebase` shows, in its order. Seeds and what waits in
/// the inbox have none.
pub fn numbered(session: &Session, rebase: Option<&Rebase>) -> Vec<Option<i64>> {
    let seeds = seeds(session, rebase).map(|_| None);
    let summary = summary(session, rebase).map(|record| Some(record.message_number));
    let records = shown(session, rebase).map(|record| Some(record.message_number));
    let inbox = session.inbox.iter().map(|_| None);
    seeds.chain(summary).chain(records).chain(inbox).collect()
}

/// The context that `rebase` points at.
pub(super) fn select(session: &Session, tools: Vec<ToolDefinition>, rebase: Option<&Rebase>) -> Context {
    let (system, tools) = match &session.prefix {
        Some(prefix) => (prefix.system.clone(), prefix.tools.clone()),
        None => (system_of(&session.seeds), tools),
    };
    let readable = tools.iter().any(|tool| tool.name == READ_OUTPUT);
    let trim_before = rebase.and_then(|rebase| rebase.trim_results_before).unwrap_or(0);
    let text = |role, text: &str| Message { role, content: vec![Block::Text { text: text.to_owned() }] };
    let seeds = seeds(session, rebase).map(|seed| text(seed.role, &seed.content));
    // It is what the conversation begins with now, and a conversation begins with its user.
    let summary =
        summary(session, rebase).map(|record| Message { role: Role::User, content: record.content.clone() });
    let records = shown(session, rebase).map(|record| {
        let content = if record.message_number < trim_before {
            record.content.iter().map(|block| trimmed(block, readable)).collect()
        } else {
            record.content.clone()
        };
        Message { role: record.role, content }
    });
    let inbox = session.inbox.iter().map(|message| text(Role::User, &message.text));
    let messages = seeds.chain(summary).chain(records).chain(inbox).collect();
    Context { system, tools, messages, prefill: None }
}

fn seeds<'a>(session: &'a Session, rebase: Option<&Rebase>) -> impl Iterator<Item = &'a Seed> {
    // They stand before every record, so what leaves out any record leaves them out first.
    let kept = rebase.is_none_or(|rebase| rebase.keep_from_message_number == 0);
    session.seeds.iter().filter(move |seed| kept && seed.role != Role::System)
}

fn summary<'a>(session: &'a Session, rebase: Option<&Rebase>) -> Option<&'a Record> {
    let number = rebase?.summary_message_number?;
    session.records.iter().find(|record| record.message_number == number)
}

/// The records that are shown, but for the summary.
pub(super) fn shown<'a>(
    session: &'a Session,
    rebase: Option<&Rebase>,
) -> impl DoubleEndedIterator<Item = &'a Record> {
    let keep_from = rebase.map_or(0, |rebase| rebase.keep_from_message_number);
    let users_from = rebase.and_then(|rebase| rebase.user_messages_from);
    session.records.iter().filter(move |record| {
        let number = record.message_number;
        let said_by_user = record.role == Role::User && users_from.is_some_and(|from| number >= from);
        !record.is_summary() && (number >= keep_from || said_by_user)
    })
}

/// A result's block as a line that says what it was. Errors stay: they are what the model must not do again.
fn trimmed(block: &Block, readable: bool) -> Block {
    match block {
        Block::ToolResult(result) if may_trim(result) => {
            let bytes = result.output.as_ref().map_or(result.content.len(), |output| output.bytes);
            let again = if readable {
                format!("Read it again with {READ_OUTPUT} and the call_id {:?}.", result.call_id.as_str())
            } else {
                "Call the tool again if you need it.".to_owned()
            };
            let content = format!("[The result of {bytes} bytes is not shown any more. {again}]");
            Block::ToolResult(ToolResult { content, ..result.clone() })
        }
        Block::ToolResult(_) | Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => {
            block.clone()
        }
    }
}

fn may_trim(result: &ToolResult) -> bool {
    !result.is_error && result.content.len() > WORTH_TRIMMING_BYTES
}

fn decide(
    session: &Session,
    tools: &[ToolDefinition],
    policy: &ContextPolicy,
    window_tokens: i64,
) -> Option<Rebase> {
    let current = session.rebase.as_ref();
    let at = session.last_message_number + session.inbox.len() as i64;
    match policy.strategy {
        // What another strategy left out comes back.
        Strategy::Full => {
            current.filter(|rebase| !rebase.is_nothing()).map(|_| Rebase::nothing(Strategy::Full, at))
        }
        Strategy::SlidingWindow => slide(session, policy, at),
        Strategy::TrimToolResults => trim(session, current, policy, at, policy.trim_at_bytes),
        Strategy::Compaction => trim(session, current, policy, at, policy.trim_at_bytes).or_else(|| {
            // Nearly full: trimming costs no call, so it comes before the summary.
            let context = select(session, tools.to_vec(), current);
            let tokens = weight::estimate(session, &context, current, &Rate::of(session, tools));
            let full = compaction::is_full(tokens, policy, window_tokens);
            full.then(|| trim(session, current, policy, at, 0)).flatten()
        }),
    }
}

/// Cuts a window that has grown to its high mark down to its low one.
fn slide(session: &Session, policy: &ContextPolicy, at: i64) -> Option<Rebase> {
    let current = session.rebase.as_ref();
    let inbox = session.inbox.len();
    let before = seeds(session, current).count() + shown(session, current).count() + inbox;
    let (high, low) = (size(policy.high), size(policy.low));
    if before <= high {
        return None;
    }
    let keep_from = current.map_or(0, |rebase| rebase.keep_from_message_number);
    let records: Vec<&Record> =
        shown(session, current).filter(|record| record.message_number >= keep_from).collect();
    let room = low.saturating_sub(inbox).max(1);
    let first = first_kept(&records, room)?;
    let keep_from_message_number = records[first].message_number;
    if keep_from_message_number <= keep_from {
        // One turn is longer than the window: nothing can be cut off it.
        return None;
    }
    // A window that begins within a long turn shows what that turn is about.
    let user_messages_from = (records[first].role != Role::User)
        .then(|| newest_user_before(session, keep_from_message_number))
        .flatten();
    Some(Rebase {
        keep_from_message_number,
        user_messages_from,
        ..Rebase::nothing(Strategy::SlidingWindow, at)
    })
}

/// Where a window of at most `room` records begins: with a message of the user, unless that would leave less than
/// half of them. Never with a result, whose call would be missing.
fn first_kept(records: &[&Record], room: usize) -> Option<usize> {
    let end = records.len();
    let within = |index: &usize| end - index <= room;
    let of_user = (0..end)
        .filter(|index| starts_user_turn(records, *index))
        .find(within)
        .filter(|index| (end - index) * 2 >= room);
    of_user
        .or_else(|| (0..end).filter(|index| starts_unit(records, *index)).find(within))
        .or_else(|| (0..end).rev().find(|index| starts_unit(records, *index)))
}

fn starts_user_turn(records: &[&Record], index: usize) -> bool {
    records[index].role == Role::User && (index == 0 || records[index - 1].role != Role::User)
}

/// Whether a cut before this record leaves every result with its call.
pub(super) fn starts_unit(records: &[&Record], index: usize) -> bool {
    match records[index].role {
        Role::Assistant => true,
        Role::User => starts_user_turn(records, index),
        Role::Tool | Role::System => false,
    }
}

pub(super) fn newest_user_before(session: &Session, message_number: i64) -> Option<i64> {
    let users = session.records.iter().filter(|record| record.role == Role::User);
    users.map(|record| record.message_number).take_while(|number| *number < message_number).last()
}

/// Trims the results that the model has seen, but for the newest ones, when together they weigh more than `at_bytes`.
fn trim(
    session: &Session,
    current: Option<&Rebase>,
    policy: &ContextPolicy,
    at: i64,
    at_bytes: i64,
) -> Option<Rebase> {
    let trimmed_before = current.and_then(|rebase| rebase.trim_results_before).unwrap_or(0);
    let answered = shown(session, current).rfind(|record| record.role == Role::Assistant)?.message_number;
    let seen: Vec<&Record> = shown(session, current)
        .filter(|record| record.role == Role::Tool && record.message_number < answered)
        .collect();
    let unseen = shown(session, current)
        .filter(|record| record.role == Role::Tool && record.message_number > answered)
        .count();
    let kept = size(policy.keep_results).saturating_sub(unseen);
    let old = &seen[..seen.len().saturating_sub(kept)];
    let bytes: usize = old
        .iter()
        .filter(|record| record.message_number >= trimmed_before)
        .flat_map(|record| record.tool_results())
        .filter(|result| may_trim(result))
        .map(|result| result.content.len())
        .sum();
    if bytes == 0 || bytes <= size(at_bytes) {
        return None;
    }
    let before = seen.get(old.len()).map_or(answered, |record| record.message_number);
    let kept = current.cloned().unwrap_or_else(|| Rebase::nothing(policy.strategy, at));
    Some(Rebase {
        strategy: policy.strategy,
        at_message_number: at,
        trim_results_before: Some(before),
        ..kept
    })
}

fn size(number: i64) -> usize {
    usize::try_from(number).unwrap_or(0)
}
