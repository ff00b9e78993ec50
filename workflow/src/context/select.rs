//! Selection: which messages a call shows, and when the beginning of the selection moves.

use super::compaction;
use super::input::{Context, Message};
use super::weight::{self, Rate, Weight};
use crate::agent::{ToolDefinition, Tools};
use crate::prefix::system_of;
use crate::record::{Block, READ_OUTPUT, Record, Role};
use crate::seed::Seed;
use crate::session::Session;
use crate::strategy::{ContextPolicy, Rebase, Strategy};
use crate::turns::{in_turns, is_within_turn};
use std::borrow::Cow;

/// A context, and the rebase that was decided for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Built {
    pub context: Context,
    /// Journalled with the reply. `None`: the context begins where the previous context began.
    pub rebase: Option<Rebase>,
}

/// Builds the next request's context under `policy`, for a model with a window of `window_tokens`. `tools`
/// come from the agent's configuration and are used only if the session has no pinned prefix.
///
/// Depends on its arguments alone: a worker that repeats a call after a crash builds the same bytes.
pub fn build(
    session: &Session,
    tools: impl Into<Tools>,
    policy: &ContextPolicy,
    window_tokens: i64,
) -> Built {
    let tools = tools.into();
    let rebase = decide(session, &tools, policy, window_tokens);
    let current = rebase.as_ref().or(session.rebase.as_ref());
    Built { context: select(session, tools, current), rebase }
}

/// Builds the context of a call that was already made. Uses the `rebase` that the journal has for that call
/// and decides nothing again.
pub fn build_again(session: &Session, tools: impl Into<Tools>, rebase: Option<&Rebase>) -> Built {
    let moved = rebase.filter(|rebase| session.rebase.as_ref() != Some(*rebase)).cloned();
    Built { context: select(session, tools.into(), rebase), rebase: moved }
}

/// Builds the context that `strategy` would select, for a person who asks. A strategy other than the session's own starts
/// from the whole transcript. Writes no summary, even if one is due.
pub fn build_as(
    session: &Session,
    tools: Vec<ToolDefinition>,
    policy: &ContextPolicy,
    window_tokens: i64,
    strategy: Strategy,
) -> Built {
    let session = &of(session, policy, strategy);
    build(session, tools, &ContextPolicy { strategy, ..*policy }, window_tokens)
}

/// Weighs the context that [`build_as`] builds, without building it. Also returns the rebase that is decided for it.
pub fn weigh_as(
    session: &Session,
    tools: &[ToolDefinition],
    policy: &ContextPolicy,
    window_tokens: i64,
    strategy: Strategy,
) -> (Weight, Option<Rebase>) {
    let begun = &of(session, policy, strategy);
    let rebase = decide(begun, tools, &ContextPolicy { strategy, ..*policy }, window_tokens);
    if begun.rebase == session.rebase {
        return (weight::weigh(session, tools, rebase.as_ref()), rebase);
    }
    let rate = Rate::of(session, tools);
    let Size { messages, bytes } = size(begun, tools, rebase.as_ref());
    // The provider's last count is for the session's own selection, so all of this one is estimated from its bytes.
    (Weight { messages, bytes, tokens: rate.tokens(bytes) }, rebase)
}

/// The system prompt and the tools of each context of `session`.
pub fn head(session: &Session, tools: impl Into<Tools>) -> (String, Tools) {
    match &session.prefix {
        Some(prefix) => (prefix.system.clone(), prefix.tools.clone()),
        None => (system_of(&session.seeds), tools.into()),
    }
}

/// The session as `strategy` would begin with it: without the rebase of another strategy. A session without a rebase is borrowed,
/// because a copy of a long one costs much.
fn of<'a>(session: &'a Session, policy: &ContextPolicy, strategy: Strategy) -> Cow<'a, Session> {
    if strategy == policy.strategy || session.rebase.is_none() {
        return Cow::Borrowed(session);
    }
    Cow::Owned(Session { rebase: None, ..session.clone() })
}

/// Returns the whole session: the prefix, seeds, records, then the messages that wait in the inbox.
pub fn full(session: &Session, tools: impl Into<Tools>) -> Context {
    select(session, tools.into(), None)
}

/// Returns the message number of each message that a context of `session` under `rebase` shows, in order.
/// Seeds and inbox messages have no number.
pub fn numbered(session: &Session, rebase: Option<&Rebase>) -> Vec<Option<i64>> {
    let seeds = seeds(session, rebase).map(|_| None);
    let summary = summary(session, rebase).map(|record| Some(record.message_number));
    let records = in_turns(shown(session, rebase)).into_iter().map(|record| Some(record.message_number));
    let inbox = session.inbox.iter().map(|_| None);
    seeds.chain(summary).chain(records).chain(inbox).collect()
}

/// Returns the context that `rebase` selects. `None`: the whole session.
pub(super) fn select(session: &Session, tools: Tools, rebase: Option<&Rebase>) -> Context {
    let (system, tools) = head(session, tools);
    let readable = tools.iter().any(|tool| tool.name == READ_OUTPUT);
    let trim_before = rebase.and_then(|rebase| rebase.trim_results_before).unwrap_or(0);
    let text =
        |role, text: &str| Message { role, content: vec![Block::Text { text: text.to_owned() }].into() };
    let seeds = seeds(session, rebase).map(|seed| text(seed.role, &seed.content));
    // The context begins with the summary, and a context must begin with the user's role.
    let summary =
        summary(session, rebase).map(|record| Message { role: Role::User, content: record.content.clone() });
    let records = in_turns(shown(session, rebase)).into_iter().map(|record| {
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

/// The size of the context that [`select`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub messages: usize,
    /// Bytes of the system prompt, the tools' definitions and the messages.
    pub bytes: usize,
}

/// Returns the size of what [`select`] would make of the same arguments. A session is weighed several times for each context
/// that is built.
pub(super) fn size(session: &Session, tools: &[ToolDefinition], rebase: Option<&Rebase>) -> Size {
    let system_of_seeds;
    let (system, tools) = match &session.prefix {
        Some(prefix) => (&prefix.system, &*prefix.tools),
        None => {
            system_of_seeds = system_of(&session.seeds);
            (&system_of_seeds, tools)
        }
    };
    let readable = tools.iter().any(|tool| tool.name == READ_OUTPUT);
    let trim_before = rebase.and_then(|rebase| rebase.trim_results_before).unwrap_or(0);
    let definitions = tools
        .iter()
        .map(|tool| tool.name.len() + tool.description.len() + tool.parameters.to_string().len())
        .sum::<usize>();
    let of_record = |record: &Record| {
        let outline = record.content.outline();
        if record.message_number < trim_before { outline.trimmed_bytes(readable) } else { outline.bytes }
    };
    let seeds = seeds(session, rebase).map(|seed| seed.content.len());
    let summary = summary(session, rebase).map(|record| record.content.bytes());
    let inbox = session.inbox.iter().map(|message| message.text.len());
    let mut size = Size { messages: 0, bytes: system.len() + definitions };
    let mut add = |bytes: usize| {
        size.messages += 1;
        size.bytes += bytes;
    };
    seeds.chain(summary).for_each(&mut add);
    shown(session, rebase).map(of_record).for_each(&mut add);
    inbox.for_each(&mut add);
    size
}

fn seeds<'a>(session: &'a Session, rebase: Option<&Rebase>) -> impl Iterator<Item = &'a Seed> {
    // Seeds come before all records, so a rebase that leaves out any record leaves out the seeds too.
    let kept = rebase.is_none_or(|rebase| rebase.keep_from_message_number == 0);
    session.seeds.iter().filter(move |seed| kept && seed.role != Role::System)
}

fn summary<'a>(session: &'a Session, rebase: Option<&Rebase>) -> Option<&'a Record> {
    let number = rebase?.summary_message_number?;
    session.records.iter().find(|record| record.message_number == number)
}

/// The records that are shown under `rebase`, without the summary.
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

/// Replaces a result's content by one line that says how to get it again.
fn trimmed(block: &Block, readable: bool) -> Block {
    match block {
        Block::ToolResult(result) => match result.trimmed(readable) {
            Some(trimmed) => Block::ToolResult(trimmed),
            None => block.clone(),
        },
        Block::Text { .. } | Block::ToolCall(_) | Block::Provider { .. } => block.clone(),
    }
}

pub(super) fn decide(
    session: &Session,
    tools: &[ToolDefinition],
    policy: &ContextPolicy,
    window_tokens: i64,
) -> Option<Rebase> {
    let current = session.rebase.as_ref();
    let at = session.last_message_number + session.inbox.len() as i64;
    match policy.strategy {
        // Shows again what another strategy left out.
        Strategy::Full => {
            current.filter(|rebase| !rebase.is_nothing()).map(|_| Rebase::nothing(Strategy::Full, at))
        }
        Strategy::SlidingWindow => slide(session, policy, at),
        Strategy::TrimToolResults => trim(session, current, policy, at, policy.trim_at_bytes),
        Strategy::Compaction => trim(session, current, policy, at, policy.trim_at_bytes).or_else(|| {
            if compaction::has_room(session, policy, window_tokens) {
                return None;
            }
            // Trimming needs no model call, so a nearly full context is trimmed before a summary is written.
            let bytes = size(session, tools, current).bytes;
            let tokens = weight::estimate(session, bytes, current, &Rate::of(session, tools));
            let full = compaction::is_full(tokens, policy, window_tokens);
            full.then(|| trim(session, current, policy, at, 0)).flatten()
        }),
    }
}

/// Cuts a window that has grown beyond `policy.high` messages down to `policy.low`.
fn slide(session: &Session, policy: &ContextPolicy, at: i64) -> Option<Rebase> {
    let current = session.rebase.as_ref();
    let inbox = session.inbox.len();
    let before = seeds(session, current).count() + shown(session, current).count() + inbox;
    let (high, low) = (count(policy.high), count(policy.low));
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
        // One turn is longer than the window, and a turn is never cut.
        return None;
    }
    // A window that begins inside a long turn also shows the user message that the turn answers.
    let user_messages_from = (records[first].role != Role::User)
        .then(|| newest_user_before(session, keep_from_message_number))
        .flatten();
    Some(Rebase {
        keep_from_message_number,
        user_messages_from,
        ..Rebase::nothing(Strategy::SlidingWindow, at)
    })
}

/// Returns the index at which a window of at most `room` records begins. Prefers a user message, unless that
/// would leave less than half of `room`. Never returns a tool result, because its call would be missing.
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
    records[index].role == Role::User
        && (index == 0 || records[index - 1].role != Role::User)
        && !is_within_turn(records, index)
}

/// Returns whether a cut before this record keeps every tool result together with its call.
pub(super) fn starts_unit(records: &[&Record], index: usize) -> bool {
    match records[index].role {
        Role::Assistant => true,
        Role::User => starts_user_turn(records, index),
        Role::Tool | Role::System => false,
    }
}

/// Returns the number of the user's newest message before `message_number`. Looks only at messages that the newest rebase shows,
/// because the others may not have been read.
pub(super) fn newest_user_before(session: &Session, message_number: i64) -> Option<i64> {
    let users = shown(session, session.rebase.as_ref()).filter(|record| record.role == Role::User);
    users.map(|record| record.message_number).take_while(|number| *number < message_number).last()
}

/// Trims the results that the model has seen, except the newest ones, if together they have more than
/// `at_bytes`.
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
    let kept = count(policy.keep_results).saturating_sub(unseen);
    let old = &seen[..seen.len().saturating_sub(kept)];
    let bytes: usize = old
        .iter()
        .filter(|record| record.message_number >= trimmed_before)
        .map(|record| record.content.outline().trimmable_bytes)
        .sum();
    if bytes == 0 || bytes <= count(at_bytes) {
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

fn count(number: i64) -> usize {
    usize::try_from(number).unwrap_or(0)
}
