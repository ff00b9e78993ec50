//! Turns a bundle's rows into rows of a new session: with new ids, nothing that could run, and no reference
//! to the outside.
//!
//! A bundle may have been cut in the middle of a run, and its author may want to make something happen here.
//! So the import closes everything that is open, and says why: an open run fails, a call that may have run
//! becomes uncertain, a call that never started becomes abandoned, and an unsent delivery expires. A retry
//! then asks the model and runs no call of the bundle.

use super::{
    CallRow, DeliveryRow, DeliveryStatus, EventRow, InboxRow, InboxStatus, Line, RecordRow, RunRow,
    RunStatus, SessionRow,
};
use crate::effect::Effect;
use crate::event::Event;
use crate::resolve::AWAITS_APPROVAL;
use crate::session::{CallStatus, SessionStatus};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashMap;

/// The trigger type of imported sessions.
const TRIGGER: &str = "import";

/// Error of a run that was open at the export.
const CUT_OFF: &str =
    "imported: the session was exported in the middle of this run, and the run does not continue here";
/// Error of a run that waited for approval at the export.
const GIVEN_UP: &str =
    "imported: its call that waited for approval was given up. Remedy: retry, and the model is asked again";
/// The error of a cancelled run, and of its session.
const CANCELLED: &str = "cancelled";
/// The reason in the journal for the corrected status of a session that an older Wakeful exported.
const WAS_CANCELLED: &str = "its run was cancelled before that was a status of its own";

/// Error of a delivery that was not sent before the export.
const NOT_SENT: &str = "imported: nothing of a bundle is sent";

/// Key in a message's details: the id that an imported or forked message had originally.
pub const ORIGIN: &str = "origin_message_id";

/// Turns the rows of one bundle into rows of a session of this database. Takes the rows in the bundle's
/// order.
pub struct Adoption {
    session_id: String,
    /// As stored: `space/id`.
    conversation_id: String,
    space_id: String,
    ids: Ids,
    inbox: HashMap<i64, i64>,
    /// The session's status at the export, if it was open.
    open: Option<SessionStatus>,
    /// An older Wakeful cancelled its newest run, and wrote `failed`.
    cancelled: bool,
    waits: bool,
    open_run: Option<String>,
    last_ts: String,
}

/// How new ids of runs and deliveries are made.
enum Ids {
    /// A hash of the session id and the old id: unique, and the same at each occurrence.
    Hashed,
    /// Numbered in the order of their first occurrence.
    Placed(HashMap<String, String>),
}

impl Adoption {
    /// Adopts into session `session_id` of the conversation `space_id/conversation`. `inbox` maps the ids of
    /// the bundle's inbox rows to new ones.
    pub fn new(session_id: &str, space_id: &str, conversation: &str, inbox: HashMap<i64, i64>) -> Adoption {
        Adoption {
            session_id: session_id.to_owned(),
            conversation_id: format!("{space_id}/{conversation}"),
            space_id: space_id.to_owned(),
            ids: Ids::Hashed,
            inbox,
            open: None,
            cancelled: false,
            waits: false,
            open_run: None,
            last_ts: String::new(),
        }
    }

    /// Like [`Adoption::new`], but with numbered ids, so that two imports of one bundle are equal.
    pub(super) fn by_place(inbox: HashMap<i64, i64>) -> Adoption {
        Adoption {
            ids: Ids::Placed(HashMap::new()),
            ..Adoption::new("sess_0", "normal", "conversation", inbox)
        }
    }

    /// The row as the import writes it.
    pub fn adopt(&mut self, line: Line) -> Line {
        match line {
            Line::Session(row) => Line::Session(Box::new(self.session(*row))),
            Line::Seed(row) => Line::Seed(row),
            Line::Run(row) => Line::Run(self.run(row)),
            Line::Record(row) => Line::Record(self.record(row)),
            Line::Step(mut row) => {
                row.run_id = self.id("run", &row.run_id);
                Line::Step(row)
            }
            Line::Event(row) => Line::Event(self.event(row)),
            Line::Call(row) => Line::Call(self.call(row)),
            Line::Delivery(row) => Line::Delivery(self.delivery(row)),
            Line::Inbox(row) => Line::Inbox(self.inbox(row)),
            Line::Blob(part) => Line::Blob(part),
        }
    }

    /// Journal entries to add after the bundle's last one. They say that the open run failed, or that the status of a
    /// run which an older Wakeful cancelled is `cancelled`. Empty if neither is so.
    pub fn ending(&self, last_seq: i64) -> Vec<EventRow> {
        let transition = |from: SessionStatus, to: SessionStatus, reason: &str| Event::StateTransition {
            from_state: from.as_str().to_owned(),
            to_state: to.as_str().to_owned(),
            reason: Some(reason.to_owned()),
        };
        let events = match self.open {
            Some(from) => vec![
                transition(from, SessionStatus::Failed, CUT_OFF),
                Event::invocation_result(SessionStatus::Failed, Some(CUT_OFF)),
            ],
            None if self.cancelled => {
                vec![transition(SessionStatus::Failed, SessionStatus::Cancelled, WAS_CANCELLED)]
            }
            None => return Vec::new(),
        };
        let entry = |(event, seq): (Event, i64)| {
            let (kind, payload) = event.to_row();
            let (ts, run_id) = (self.last_ts.clone(), self.open_run.clone());
            EventRow { seq, ts, kind, run_id, step_number: None, payload, dedupe_key: None }
        };
        events.into_iter().zip(last_seq + 1..).map(entry).collect()
    }

    /// Number of entries that [`Adoption::ending`] returns for this session.
    pub(super) fn endings(row: &SessionRow) -> i64 {
        if row.status.is_open() { 2 } else { i64::from(was_cancelled(row)) }
    }

    fn session(&mut self, row: SessionRow) -> SessionRow {
        self.open = row.status.is_open().then_some(row.status);
        self.cancelled = was_cancelled(&row);
        self.waits = row.status == SessionStatus::WaitingInput;
        self.last_ts.clone_from(&row.started_at);
        let endings = Adoption::endings(&row);
        let trigger_id = self.conversation_id.split_once('/').map_or("", |(_, id)| id).to_owned();
        SessionRow {
            session_id: self.session_id.clone(),
            conversation_id: self.conversation_id.clone(),
            space_id: self.space_id.clone(),
            trigger_type: TRIGGER.to_owned(),
            trigger_id,
            status: match self.open {
                Some(_) => SessionStatus::Failed,
                None if self.cancelled => SessionStatus::Cancelled,
                None => row.status,
            },
            error: if self.open.is_some() { Some(CUT_OFF.to_owned()) } else { paused(row.error) },
            cancel_requested: false,
            cancel_reason: None,
            policy: Some(policy(row.policy.unwrap_or_default(), &row.trigger_type)),
            last_event_seq: row.last_event_seq + endings,
            parent_session_id: None,
            forked_from_message_id: None,
            parent_conversation_id: None,
            // `forked_at_message_number` stays: it says where the session's own messages begin, and refers to
            // no row.
            ..row
        }
    }

    fn run(&mut self, row: RunRow) -> RunRow {
        let run_id = self.id("run", &row.run_id);
        match row.status {
            RunStatus::Queued | RunStatus::Running => {
                self.open_run = Some(run_id.clone());
                RunRow { run_id, status: RunStatus::Failed, error: Some(CUT_OFF.to_owned()), ..row }
            }
            RunStatus::Failed if row.error.as_deref() == Some(CANCELLED) => {
                RunRow { run_id, status: RunStatus::Cancelled, ..row }
            }
            RunStatus::NeedsAttention => RunRow { run_id, error: paused(row.error), ..row },
            RunStatus::WaitingInput | RunStatus::Completed | RunStatus::Failed | RunStatus::Cancelled => {
                RunRow { run_id, ..row }
            }
        }
    }

    fn record(&mut self, mut row: RecordRow) -> RecordRow {
        row.run_id = self.id("run", &row.run_id);
        let new = hashed("msg", &self.session_id, &row.message_number.to_string());
        let old = std::mem::replace(&mut row.message_id, new);
        row.details.entry(ORIGIN).or_insert(Value::String(old));
        if let Some(inbox_id) = row.details.get_mut("inbox_id") {
            *inbox_id =
                inbox_id.as_i64().and_then(|id| self.inbox.get(&id)).map_or(Value::Null, |id| json!(id));
        }
        row.details.retain(|key, value| key != "inbox_id" || !value.is_null());
        row
    }

    fn event(&mut self, mut row: EventRow) -> EventRow {
        self.last_ts.clone_from(&row.ts);
        row.run_id = row.run_id.map(|id| self.id("run", &id));
        row.dedupe_key = row.dedupe_key.map(|key| self.dedupe_key(&key));
        if let Some(inbox_id) = row.payload.get_mut("inbox_id")
            && row.kind == "MESSAGE_RECEIVED"
        {
            let new = inbox_id.as_i64().and_then(|id| self.inbox.get(&id)).copied();
            *inbox_id = json!(new.unwrap_or_default());
        }
        for key in ["delivery_id", "effect"] {
            if let Some(Value::String(id)) = row.payload.get_mut(key)
                && (key == "delivery_id" || is_delivery(id))
            {
                *id = self.id("dlv", id);
            }
        }
        row
    }

    fn call(&mut self, mut row: CallRow) -> CallRow {
        row.run_id = self.id("run", &row.run_id);
        self.resolution(&mut row.resolution);
        if row.result_message_number.is_some() {
            return row;
        }
        // The call's turn is not over, so a run that continues would act on this row.
        row.status = match row.status {
            CallStatus::Invoked | CallStatus::Unapproved | CallStatus::Abandoned => CallStatus::Abandoned,
            CallStatus::Waiting if self.waits => CallStatus::Waiting,
            CallStatus::Waiting => CallStatus::Abandoned,
            CallStatus::Started => CallStatus::Uncertain,
            // Without an outcome, a later run has nothing to use.
            CallStatus::Done if row.outcome.is_some() => CallStatus::Done,
            CallStatus::Failed if row.outcome.is_some() => CallStatus::Failed,
            CallStatus::Done | CallStatus::Failed | CallStatus::Uncertain => CallStatus::Uncertain,
        };
        // Do not trust the bundle's effect class: a call with an unknown outcome must never run again.
        if row.status == CallStatus::Uncertain && row.outcome.is_none() {
            row.effect = Effect::Guarded;
        }
        // Details could create deliveries and change the state.
        if let Some(outcome) = &mut row.outcome {
            outcome.details = None;
        }
        row
    }

    fn delivery(&mut self, mut row: DeliveryRow) -> DeliveryRow {
        row.delivery_id = self.id("dlv", &row.delivery_id);
        self.resolution(&mut row.resolution);
        match row.status {
            // A person could send an uncertain delivery again.
            DeliveryStatus::Queued | DeliveryStatus::Sending | DeliveryStatus::Uncertain => {
                row.status = DeliveryStatus::Expired;
                row.last_error = Some(NOT_SENT.to_owned());
            }
            DeliveryStatus::Sent | DeliveryStatus::Failed | DeliveryStatus::Expired => {}
        }
        row
    }

    fn inbox(&mut self, mut row: InboxRow) -> InboxRow {
        row.inbox_id = self.inbox.get(&row.inbox_id).copied().unwrap_or(row.inbox_id);
        row.run_id = self.id("run", &row.run_id);
        // A pending message would open a run.
        row.status = InboxStatus::Drained;
        row
    }

    fn resolution(&mut self, resolution: &mut Option<Value>) {
        if let Some(Value::String(run_id)) = resolution.as_mut().and_then(|of| of.get_mut("run_id")) {
            *run_id = self.id("run", run_id);
        }
    }

    /// Renames the delivery in keys such as `sent/dlv_…`, `unsent/dlv_…/…`, `resent/dlv_…/…` and
    /// `resolved/dlv_…/…`. Other keys contain no renamed id.
    fn dedupe_key(&mut self, key: &str) -> String {
        let mut parts = key.splitn(3, '/');
        match (parts.next(), parts.next(), parts.next()) {
            (
                Some(kind @ ("sent" | "unsent" | "resent" | "resolved" | "refused" | "bounced")),
                Some(id),
                rest,
            ) if is_delivery(id) => {
                let id = self.id("dlv", id);
                rest.map_or_else(|| format!("{kind}/{id}"), |rest| format!("{kind}/{id}/{rest}"))
            }
            _ => key.to_owned(),
        }
    }

    fn id(&mut self, prefix: &str, old: &str) -> String {
        match &mut self.ids {
            Ids::Hashed => hashed(prefix, &self.session_id, old),
            Ids::Placed(names) => {
                let place = names.len();
                names.entry(old.to_owned()).or_insert_with(|| format!("{prefix}_{place}")).clone()
            }
        }
    }
}

/// Facts about the session's origin, for people. No code follows them as references.
pub fn origin(row: &SessionRow, redacted: bool, sha256: &str) -> Value {
    json!({
        "bundle_sha256": sha256,
        "redacted": redacted,
        "session_id": row.session_id,
        "conversation_id": row.conversation_id,
        "trigger_type": row.trigger_type,
        "trigger_id": row.trigger_id,
        "status": row.status,
        "policy": row.policy,
        "parent_session_id": row.parent_session_id,
        "forked_from_message_id": row.forked_from_message_id,
        "parent_conversation_id": row.parent_conversation_id,
        "forked_at_message_number": row.forked_at_message_number,
    })
}

/// The policy of an imported session. Keeps only the tool mode and how the source replied. A model, tools or
/// unknown rules from a file could exceed what the agent may do here, so they are dropped. Tool mode
/// `recorded` becomes `dry`, because it would read a replay's answers in another session. If the source
/// limited its recipients or was cut off as a loop, the import gets an empty list of recipients: the people of
/// the source belong to another system, and without a limit the agent's own recipients would apply.
fn policy(mut policy: Map<String, Value>, trigger_type: &str) -> Map<String, Value> {
    let bounded =
        ["recipients", "loop_suspicion", "participants"].iter().any(|rule| policy.contains_key(*rule));
    policy.retain(|rule, _| rule == "tool_mode" || rule == "replies_as");
    if policy.get("tool_mode").is_some_and(|mode| mode == "recorded") {
        policy.insert("tool_mode".to_owned(), json!("dry"));
    }
    if bounded {
        policy.insert("recipients".to_owned(), json!([]));
    }
    policy.entry("replies_as").or_insert_with(|| json!(trigger_type));
    policy
}

/// Older versions wrote `failed` for a cancelled run.
fn was_cancelled(row: &SessionRow) -> bool {
    row.status == SessionStatus::Failed && row.error.as_deref() == Some(CANCELLED)
}

/// The error of a run that pauses. The import has given up its call, so a person cannot approve it.
fn paused(error: Option<String>) -> Option<String> {
    error.map(|error| if error == AWAITS_APPROVAL { GIVEN_UP.to_owned() } else { error })
}

fn is_delivery(id: &str) -> bool {
    id.starts_with("dlv_")
}

fn hashed(prefix: &str, session_id: &str, old: &str) -> String {
    let digest = hex::encode(Sha256::digest(format!("{session_id}\n{old}").as_bytes()));
    format!("{prefix}_{}", &digest[..32])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_keeps_no_rule_of_its_bundles_choice_and_writes_to_nobody_where_there_was_one() {
        let nobody = json!({"recipients": [], "replies_as": "email"});
        for (rules, kept) in [
            (json!({}), json!({"replies_as": "email"})),
            (json!({"model": "dear/one", "web": {"allow": ["*"]}}), json!({"replies_as": "email"})),
            (json!({"tool_mode": "recorded"}), json!({"replies_as": "email", "tool_mode": "dry"})),
            (json!({"replies_as": "chat"}), json!({"replies_as": "chat"})),
            (json!({"recipients": ["*"]}), nobody.clone()),
            (json!({"recipients": []}), nobody.clone()),
            (json!({"loop_suspicion": ["a loop"]}), nobody.clone()),
            (json!({"participants": ["ann@example.com"], "reply": {"channel": "email"}}), nobody),
        ] {
            let row = rules.as_object().cloned().unwrap();
            assert_eq!(Value::Object(policy(row, "email")), kept, "{rules}");
        }
    }

    #[test]
    fn a_run_that_waited_for_approval_says_that_its_call_was_given_up() {
        let given_up = "imported: its call that waited for approval was given up. Remedy: retry, and the model is asked again";
        assert_eq!(paused(Some(AWAITS_APPROVAL.to_owned())).as_deref(), Some(given_up));
        assert_eq!(paused(Some("a call may have run".to_owned())).as_deref(), Some("a call may have run"));
        assert_eq!(paused(None), None);
    }

    #[test]
    fn a_call_without_a_result_and_without_an_outcome_never_runs() {
        for effect in [Effect::Pure, Effect::Idempotent, Effect::Guarded] {
            for (status, adopted) in [
                (CallStatus::Invoked, CallStatus::Abandoned),
                (CallStatus::Waiting, CallStatus::Abandoned),
                (CallStatus::Unapproved, CallStatus::Abandoned),
                (CallStatus::Abandoned, CallStatus::Abandoned),
                (CallStatus::Started, CallStatus::Uncertain),
                (CallStatus::Done, CallStatus::Uncertain),
                (CallStatus::Failed, CallStatus::Uncertain),
                (CallStatus::Uncertain, CallStatus::Uncertain),
            ] {
                let row = CallRow {
                    call_id: "call_a".to_owned(),
                    run_id: "run_a".to_owned(),
                    step_number: 1,
                    message_number: 2,
                    result_message_number: None,
                    name: "compose_email".to_owned(),
                    args_sha256: "0".repeat(64),
                    effect,
                    status,
                    attempts: 0,
                    outcome: None,
                    receipt: None,
                    resolution: None,
                    started_at: None,
                    settled_at: None,
                };
                let row = Adoption::new("sess_a", "default", "c1", HashMap::new()).call(row);
                assert_eq!(row.status, adopted, "{status:?} {effect:?}");
                assert!(adopted == CallStatus::Abandoned || row.effect == Effect::Guarded, "{status:?}");
            }
        }
    }
}
