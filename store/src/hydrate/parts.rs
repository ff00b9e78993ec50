//! What the statement of a hydration gives, and the session that it makes.

use super::warm::Hydrated;
use crate::{Error, Result};
use serde_json::Value;
use std::sync::Arc;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::generation::{InterruptedCall, Purpose};
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::{Attachment, Record};
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::{
    Call, CallStatus, InboxMessage, LeftOut, Run, Session, SessionStatus, Totals,
};
use wakeful_workflow::state::State;
use wakeful_workflow::workspace::Snapshot;

/// What does not change while a worker has the session, except by its own commits.
#[derive(serde::Deserialize)]
pub(super) struct Fixed {
    session_id: String,
    conversation_id: String,
    parent_session_id: Option<String>,
    space_id: String,
    mailbox_id: String,
    trigger_type: String,
    agent: String,
    policy: Option<Value>,
    pub(super) prefix_sha256: Option<String>,
    pub(super) data_key: Option<String>,
    /// What must stay the same for a kept copy to be good: see [`super::Warm`].
    basis: String,
    status: String,
    base_message_number: i64,
    last_message_number: i64,
    to_message_number: i64,
    last_step_number: i64,
    totals: Totals,
    run: Option<RunRow>,
    seeds: Option<Vec<Seed>>,
    left_out: Option<LeftOut>,
}

/// What one statement has read.
pub(super) struct Parts {
    pub(super) fixed: Fixed,
    pub(super) changing: Changing,
    /// The pinned prefix's bytes.
    pub(super) prefix: Option<Vec<u8>>,
    /// In order.
    pub(super) records: Vec<Record>,
}

#[derive(serde::Deserialize)]
pub(super) struct RunRow {
    run_id: String,
    steps: i64,
    tokens: i64,
}

/// What can change while a worker has the session.
#[derive(serde::Deserialize)]
pub(super) struct Changing {
    wake_seq: i64,
    last_event_seq: i64,
    cancel_requested: bool,
    cancel_reason: Option<String>,
    state: Value,
    rebase: Option<Value>,
    compaction_failures: i64,
    workspace: Option<Snapshot>,
    inbox: Option<Vec<InboxRow>>,
    calls: Option<Vec<CallRow>>,
    generations: Option<Vec<GenerationRow>>,
}

impl Parts {
    /// The session, without a copy that it is joined with.
    pub(super) fn hydrated(mut self) -> Result<Hydrated> {
        let basis = self.fixed.basis();
        let prefix = match (&self.fixed.prefix_sha256, &self.prefix) {
            (Some(sha256), Some(bytes)) => {
                Some(Prefix::read(sha256, bytes).map_err(|error| Error::corrupt("pinned prefix", error))?)
            }
            (Some(sha256), None) => {
                return Err(Error::corrupt("pinned prefix", format!("there is no blob {sha256}")));
            }
            (None, _) => None,
        };
        let seeds = self.fixed.seeds.take().unwrap_or_default();
        let left_out = self.fixed.left_out.take().map(Arc::new);
        let session = self.fixed.session(self.changing, prefix, seeds, (self.records, left_out))?;
        Ok(Hydrated::new(session, basis))
    }
}

impl Fixed {
    /// `None`: nothing of the session may be kept. Its texts are sealed, and end with their key.
    pub(super) fn basis(&self) -> Option<String> {
        self.data_key.is_none().then(|| self.basis.clone())
    }

    pub(super) fn session(
        self,
        changing: Changing,
        prefix: Option<Prefix>,
        seeds: Vec<Seed>,
        (records, left_out): (Vec<Record>, Option<Arc<LeftOut>>),
    ) -> Result<Session> {
        let policy = match self.policy {
            Some(policy) => {
                serde_json::from_value(policy).map_err(|error| Error::corrupt("policy", error))?
            }
            None => SessionPolicy::default(),
        };
        let mut session = Session {
            session_id: self.session_id.into(),
            conversation_id: self.conversation_id.into(),
            parent_session_id: self.parent_session_id.map(Into::into),
            space_id: self.space_id,
            mailbox_id: self.mailbox_id,
            trigger_type: self.trigger_type,
            agent: self.agent,
            policy,
            prefix,
            status: SessionStatus::parse(&self.status)
                .ok_or_else(|| Error::corrupt("status", &self.status))?,
            cancel_requested: false,
            cancel_reason: None,
            wake_seq: 0,
            base_message_number: self.base_message_number,
            last_message_number: self.last_message_number,
            to_message_number: self.to_message_number,
            last_event_seq: 0,
            last_step_number: self.last_step_number,
            totals: self.totals,
            state: State::new(),
            rebase: None,
            compaction_failures: 0,
            workspace: None,
            run: self.run.map(|run| Run { run_id: run.run_id.into(), steps: run.steps, tokens: run.tokens }),
            seeds,
            records,
            left_out,
            calls: Vec::new(),
            inbox: Vec::new(),
            interrupted: Vec::new(),
        };
        changing.update(&mut session)?;
        Ok(session)
    }
}

impl Changing {
    pub(super) fn update(self, session: &mut Session) -> Result<()> {
        session.wake_seq = self.wake_seq;
        session.last_event_seq = self.last_event_seq;
        session.cancel_requested = self.cancel_requested;
        session.cancel_reason = self.cancel_reason;
        let Value::Object(state) = self.state else {
            return Err(Error::corrupt("state", "not an object"));
        };
        session.state = state;
        session.rebase = self
            .rebase
            .map(serde_json::from_value)
            .transpose()
            .map_err(|error| Error::corrupt("rebase", error))?;
        session.compaction_failures = self.compaction_failures;
        session.workspace = self.workspace;
        session.inbox = self.inbox.unwrap_or_default().into_iter().map(InboxRow::message).collect();
        session.calls =
            self.calls.unwrap_or_default().into_iter().map(CallRow::call).collect::<Result<_>>()?;
        session.interrupted =
            self.generations.unwrap_or_default().into_iter().map(GenerationRow::interrupted).collect();
        Ok(())
    }
}

#[derive(serde::Deserialize)]
pub(super) struct GenerationRow {
    generation_id: String,
    attempt: i64,
    model: String,
    request_sha256: String,
    started_at: String,
    base_sha256: Option<String>,
    repairs: i64,
    resumes: Option<String>,
    resumable: bool,
    purpose: Purpose,
    context_strategy: String,
    last_chunk: i64,
}

#[derive(serde::Deserialize)]
pub(super) struct CallRow {
    id: String,
    effect: String,
    status: String,
    outcome: Option<wakeful_workflow::session::CallOutcome>,
}

#[derive(serde::Deserialize)]
pub(super) struct InboxRow {
    id: i64,
    text: String,
    attachments: Vec<Attachment>,
}

impl CallRow {
    fn call(self) -> Result<Call> {
        Ok(Call {
            call_id: self.id.into(),
            effect: Effect::parse(&self.effect).ok_or_else(|| Error::corrupt("effect", &self.effect))?,
            status: CallStatus::parse(&self.status)
                .ok_or_else(|| Error::corrupt("call status", &self.status))?,
            outcome: self.outcome,
        })
    }
}

impl InboxRow {
    fn message(self) -> InboxMessage {
        InboxMessage { inbox_id: self.id, text: self.text, attachments: self.attachments }
    }
}

impl GenerationRow {
    fn interrupted(self) -> InterruptedCall {
        InterruptedCall {
            generation_id: self.generation_id.as_str().into(),
            attempt: self.attempt,
            model: self.model,
            request_sha256: self.request_sha256,
            started_at: self.started_at,
            base_sha256: self.base_sha256,
            repairs: self.repairs,
            last_chunk: self.last_chunk,
            resumes: self.resumes.as_deref().map(Into::into),
            resumable: self.resumable,
            purpose: self.purpose,
            context_strategy: self.context_strategy,
        }
    }
}
