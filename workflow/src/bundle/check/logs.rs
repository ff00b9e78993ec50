//! Checks journal, ledger, outbox and inbox: the target of every reference must exist.

use super::super::{CallRow, DeliveryRow, EventRow, InboxRow, RecordRow, SessionRow, scan};
use super::fits::{CheckResult, Key, key, times};
use super::rows::{Rows, calls_of};
use crate::derive;
use crate::event::Event;
use crate::record::{Block, Role};
use crate::session::{CallStatus, SessionStatus};
use crate::state::{State, same_state};
use crate::strategy::Rebase;
use crate::workspace::MAX_PACKS;
use std::collections::{HashMap, HashSet};

/// Maximum size of a state, which must fit in one line.
const STATE_BYTES: usize = 8 << 20;

/// The part of the check that handles references between rows.
#[derive(Default)]
pub(super) struct Logs {
    /// The state that results from the messages so far, and its size in bytes.
    fold: State,
    weight: usize,
    /// By call: the number of the message that asks for it, and of the one that answers it.
    asked: HashMap<Key, i64>,
    answered: HashMap<Key, i64>,
    next_seq: i64,
    dedupe: HashSet<Key>,
    lifecycle: Option<String>,
    last_call: (i64, String),
    calls: HashSet<Key>,
    deliveries: i64,
    sources: HashSet<Key>,
    pub(super) inbox_ids: Vec<i64>,
    client_keys: HashSet<Key>,
    /// Targets of journal entries that later sections must contain.
    wanted_deliveries: HashSet<Key>,
    wanted_inbox: HashSet<i64>,
    /// Calls or deliveries.
    wanted_effects: HashSet<Key>,
    /// The latest rebase, and the number of failed summaries since the run began or a summary succeeded.
    rebase: Option<Rebase>,
    failures: i64,
}

impl Logs {
    pub(super) fn session(&mut self, initial: State) {
        self.fold = initial;
    }

    pub(super) fn record(&mut self, row: &RecordRow) -> CheckResult {
        for (call_id, is_result) in calls_of(row) {
            if !scan::is_name(call_id) {
                return Err("call_id: 1 to 512 bytes without control characters".to_owned());
            }
            let (which, role) =
                if is_result { (&mut self.answered, Role::Tool) } else { (&mut self.asked, Role::Assistant) };
            if row.role != role {
                return Err(format!(
                    "message {} has a part that its role does not allow",
                    row.message_number
                ));
            }
            if which.insert(key(call_id), row.message_number).is_some() {
                return Err(format!("call {call_id:?} comes twice"));
            }
            if is_result && !self.asked.contains_key(&key(call_id)) {
                return Err(format!("a result of call {call_id:?}, which no message asks for"));
            }
        }
        for block in &row.content {
            if let Block::ToolResult(result) = block {
                if let Some(path) = result.details.as_ref().filter(|of| of["type"] == "fileWritten")
                    && !path["path"].as_str().is_none_or(scan::is_path_within)
                {
                    return Err(format!("a file {} leads out of the workspace", path["path"]));
                }
                for update in derive::updates(result) {
                    let weigh = |value: &serde_json::Value| value.to_string().len();
                    self.weight += update.key.len() + weigh(&update.value);
                    if let Some(before) = self.fold.get(&update.key) {
                        self.weight =
                            self.weight.saturating_sub(update.key.len().saturating_add(weigh(before)));
                    }
                    derive::apply(&mut self.fold, &update);
                }
            }
        }
        if self.weight > STATE_BYTES {
            return Err(format!("its messages make a state of more than {STATE_BYTES} bytes"));
        }
        Ok(())
    }

    pub(super) fn event(&mut self, row: &EventRow, rows: &Rows) -> CheckResult {
        self.next_seq += 1;
        let seq = row.seq;
        if seq != self.next_seq {
            return Err(format!("entry {seq} stands where {} is due", self.next_seq));
        }
        times(&[("ts", Some(&row.ts))])?;
        // MESSAGE_RECEIVED may name a run that has not begun yet.
        let promised = row.kind == "MESSAGE_RECEIVED";
        if row.run_id.as_ref().is_some_and(|id| !scan::is_id(id) || !(promised || rows.has_run(id))) {
            return Err(format!("entry {seq} belongs to a run that is not in the bundle"));
        }
        if row.step_number.is_some_and(|step| !(0..=rows.last_step() + 1).contains(&step)) {
            return Err(format!("entry {seq} belongs to a step that does not exist"));
        }
        if let Some(dedupe) = &row.dedupe_key
            && (dedupe.len() > 1024 || !self.dedupe.insert(key(dedupe)))
        {
            return Err(format!("entry {seq} has the key of another entry, or a key that is too long"));
        }
        let event = Event::from_row(&row.kind, row.payload.clone())
            .map_err(|error| format!("entry {seq} is none that this version knows: {error}"))?;
        if event.to_row().1 != row.payload {
            return Err(format!("entry {seq} has a field that is unknown here, or lacks one"));
        }
        self.points(&event, rows).map_err(|what| format!("entry {seq} points at {what}, which is not there"))
    }

    /// # Errors
    /// The missing target.
    fn points(&mut self, event: &Event, rows: &Rows) -> CheckResult {
        let call = |id: &str, known: &HashMap<Key, i64>| match known.contains_key(&key(id)) {
            true => Ok(()),
            false => Err(format!("call {id:?}")),
        };
        let message = |number: i64, role: Role| match rows.role(number) == Some(role) {
            true => Ok(()),
            false => Err(format!("message {number}")),
        };
        match event {
            Event::MessageReceived { inbox_id } => {
                self.wanted_inbox.insert(*inbox_id);
            }
            Event::GenComplete { message_number, .. } => message(*message_number, Role::Assistant)?,
            Event::ToolInvoked { call_id, message_number, .. } => {
                call(call_id.as_str(), &self.asked)?;
                message(*message_number, Role::Assistant)?;
            }
            Event::ToolResult { call_id, message_number, .. } => {
                call(call_id.as_str(), &self.answered)?;
                message(*message_number, Role::Tool)?;
            }
            Event::ContextRebased(rebase) => {
                let at = rebase.at_message_number;
                if !(0..=rows.last_message()).contains(&at) {
                    return Err(format!("message {at}"));
                }
                // A rebase decided at message `at` cannot leave out later messages.
                let begins = [
                    Some(rebase.keep_from_message_number),
                    rebase.user_messages_from,
                    rebase.trim_results_before,
                ];
                if let Some(number) =
                    begins.into_iter().flatten().find(|number| !(0..=at + 1).contains(number))
                {
                    return Err(format!("message {number}"));
                }
                if let Some(number) = rebase.summary_message_number {
                    message(number, Role::Assistant)?;
                    if number == rebase.at_message_number {
                        self.failures = 0;
                    }
                }
                self.rebase = Some(rebase.clone());
            }
            Event::WorkspaceSnapshot(snapshot) => {
                let at = snapshot.message_number;
                if !(0..=rows.last_message()).contains(&at) {
                    return Err(format!("message {at}"));
                }
                if !scan::is_sha256(&snapshot.tree_sha256) {
                    return Err("a tree whose name is not a hash".to_owned());
                }
                if snapshot.packs.len() > MAX_PACKS {
                    return Err(format!("more than {MAX_PACKS} packs"));
                }
                let names: HashSet<&str> = snapshot.packs.iter().map(|pack| pack.sha256.as_str()).collect();
                if names.len() != snapshot.packs.len() {
                    return Err("a pack twice".to_owned());
                }
            }
            Event::CompactionFailed { .. } => self.failures += 1,
            Event::ToolFailedUncertain { call_id, .. } => call(call_id.as_str(), &self.asked)?,
            Event::GenSent { delivery_id, .. }
            | Event::DeliveryFailed { delivery_id, .. }
            | Event::DeliveryResent { delivery_id, .. }
            | Event::DeliveryBounced { delivery_id, .. } => {
                self.wanted_deliveries.insert(key(delivery_id));
            }
            Event::EffectResolved { effect, .. } => {
                self.wanted_effects.insert(key(effect));
            }
            Event::StateTransition { to_state, .. } => {
                if to_state == SessionStatus::Running.as_str() {
                    self.failures = 0;
                }
                self.lifecycle = Some(to_state.clone());
            }
            Event::Checkpoint { lifecycle_state, .. } => self.lifecycle = Some(lifecycle_state.clone()),
            Event::TriggerEvent { .. }
            | Event::SessionForked { .. }
            | Event::SessionImported { .. }
            | Event::LlmCalled { .. }
            | Event::GenStart { .. }
            | Event::GenResumed { .. }
            | Event::GenFailed { .. }
            | Event::SessionSteered { .. }
            | Event::AttemptFailed { .. }
            | Event::PersonTold { .. }
            | Event::SessionTerminated { .. }
            | Event::InvocationResult { .. }
            | Event::ContextUpdate { .. } => {}
        }
        Ok(())
    }

    pub(super) fn call(&mut self, row: &CallRow, rows: &Rows) -> CheckResult {
        let place = (row.message_number, row.call_id.clone());
        if place <= self.last_call {
            return Err(format!("call {:?} is out of order", row.call_id));
        }
        self.last_call = place;
        let id = key(&row.call_id);
        if self.asked.get(&id) != Some(&row.message_number) {
            return Err(format!(
                "call {:?} was not asked for in message {}",
                row.call_id, row.message_number
            ));
        }
        if self.answered.get(&id) != row.result_message_number.as_ref() {
            return Err(format!("call {:?} has no result where its row says", row.call_id));
        }
        if !rows.has_run(&row.run_id) || !(1..=rows.last_step() + 1).contains(&row.step_number) {
            return Err(format!("call {:?} belongs to a run or a step that does not exist", row.call_id));
        }
        if row.result_message_number.is_some()
            && matches!(
                row.status,
                CallStatus::Invoked | CallStatus::Started | CallStatus::Waiting | CallStatus::Unapproved
            )
        {
            return Err(format!("call {:?} has its result and is {}", row.call_id, row.status.as_str()));
        }
        if row.result_message_number.is_none()
            && row.outcome.is_none()
            && matches!(row.status, CallStatus::Done | CallStatus::Failed)
        {
            return Err(format!("call {:?} is {} without an outcome", row.call_id, row.status.as_str()));
        }
        if !scan::is_name(&row.name) || !scan::is_sha256(&row.args_sha256) || row.attempts < 0 {
            return Err(format!(
                "call {:?}: the name, the hash of the arguments or the attempts are invalid",
                row.call_id
            ));
        }
        times(&[("started_at", row.started_at.as_ref()), ("settled_at", row.settled_at.as_ref())])?;
        self.wanted_effects.remove(&id);
        match self.calls.insert(id) {
            true => Ok(()),
            false => Err(format!("call {:?} comes twice", row.call_id)),
        }
    }

    pub(super) fn delivery(&mut self, row: &DeliveryRow) -> CheckResult {
        if row.place != self.deliveries + 1 {
            return Err(format!("delivery {} is out of order", row.place));
        }
        if !scan::is_id(&row.delivery_id) || !scan::is_name(&row.channel) || !scan::is_name(&row.source_key) {
            return Err("a delivery has an id, a channel and a source".to_owned());
        }
        times(&[
            ("created_at", Some(&row.created_at)),
            ("settled_at", row.settled_at.as_ref()),
            ("not_after", row.not_after.as_ref()),
        ])?;
        // A channel has no control characters, so different pairs never give the same text.
        let source = key(&format!("{}\n{}", row.channel, row.source_key));
        if row.attempt < 0 || !self.sources.insert(source) {
            return Err(format!("{:?} is sent twice", row.source_key));
        }
        let id = key(&row.delivery_id);
        self.wanted_deliveries.remove(&id);
        self.wanted_effects.remove(&id);
        if !self.calls.insert(id) {
            return Err(format!("delivery {} comes twice", row.delivery_id));
        }
        self.deliveries += 1;
        Ok(())
    }

    pub(super) fn inbox(&mut self, row: &InboxRow) -> CheckResult {
        if self.inbox_ids.last().is_some_and(|last| *last >= row.inbox_id) || row.inbox_id < 1 {
            return Err(format!("inbox row {} is out of order", row.inbox_id));
        }
        if !scan::is_name(&row.client_key) || !self.client_keys.insert(key(&row.client_key)) {
            return Err(format!("inbox row {} has the key of another row, or an invalid key", row.inbox_id));
        }
        if !scan::is_id(&row.run_id) || !scan::is_sha256(&row.content_sha256) {
            return Err(format!("inbox row {} has no run or no hash", row.inbox_id));
        }
        times(&[("created_at", Some(&row.created_at))])?;
        self.wanted_inbox.remove(&row.inbox_id);
        self.inbox_ids.push(row.inbox_id);
        Ok(())
    }

    pub(super) fn close(&self, session: &SessionRow) -> CheckResult {
        if self.next_seq != session.last_event_seq {
            return Err(format!(
                "the last entry is {}, the session says {}",
                self.next_seq, session.last_event_seq
            ));
        }
        if !same_state(&self.fold, &session.state) {
            return Err("the session's state is not what its messages make".to_owned());
        }
        if self.lifecycle.as_deref().unwrap_or("created") != session.status.as_str() {
            return Err("the session's status is not what its journal says".to_owned());
        }
        let rebase = self.rebase.as_ref().and_then(|rebase| serde_json::to_value(rebase).ok());
        if rebase != session.rebase || self.failures != session.compaction_failures {
            return Err("the session's context does not begin where its journal says".to_owned());
        }
        if !self.wanted_deliveries.is_empty() || !self.wanted_effects.is_empty() {
            return Err("an entry points at a call or a delivery that is not there".to_owned());
        }
        match self.wanted_inbox.iter().next() {
            Some(inbox_id) => Err(format!("an entry points at inbox row {inbox_id}, which is not there")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{Counts, Cut, Header, VERSION};
    use super::*;
    use crate::strategy::Strategy;
    use crate::workspace::{Pack, Snapshot};

    fn rows() -> Rows {
        Rows::new(&Header {
            wakeful_bundle: VERSION,
            session_id: "sess_a".to_owned(),
            redacted: false,
            cut: Cut { message_number: 9, step_number: 1, event_seq: 1 },
            counts: Counts::default(),
            gaps: Vec::new(),
        })
    }

    #[test]
    fn a_snapshot_names_few_packs_and_each_once() {
        let rows = rows();
        let fits = |packs: Vec<String>| {
            let packs = packs.into_iter().map(|sha256| Pack { sha256, bytes: 1 }).collect();
            let tree_sha256 = "0".repeat(64);
            let snapshot = Snapshot { tree_sha256, packs, files: 0, bytes: 0, message_number: 0 };
            Logs::default().points(&Event::WorkspaceSnapshot(snapshot), &rows)
        };
        let names = |count: usize| (0..count).map(|n| format!("{n:064x}")).collect::<Vec<_>>();
        assert_eq!(fits(names(MAX_PACKS)), Ok(()));
        assert_eq!(fits(names(MAX_PACKS + 1)), Err("more than 1000 packs".to_owned()));
        assert_eq!(fits([names(2), names(1)].concat()), Err("a pack twice".to_owned()));
    }

    #[test]
    fn a_context_leaves_out_no_more_than_was_there_when_that_was_decided() {
        let rows = rows();
        let fits = |at, keep_from, users_from, trim_before| {
            let rebase = Rebase {
                keep_from_message_number: keep_from,
                user_messages_from: users_from,
                trim_results_before: trim_before,
                ..Rebase::nothing(Strategy::SlidingWindow, at)
            };
            Logs::default().points(&Event::ContextRebased(rebase), &rows).is_ok()
        };
        assert!(fits(0, 0, None, None) && fits(9, 10, Some(2), Some(10)));
        assert!(!fits(0, 5, None, None) && !fits(3, 5, None, None) && !fits(9, -1, None, None));
        assert!(!fits(3, 0, Some(5), None) && !fits(3, 0, None, Some(5)));
        assert!(!fits(10, 0, None, None) && !fits(i64::MAX, 0, None, None));
    }
}
