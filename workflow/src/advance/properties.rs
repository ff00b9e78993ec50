//! Properties of every session, whatever happens to it: plans, commits, crashes, messages and cancels in any
//! order.

mod invariants;

use super::*;
use crate::agent::{AgentPolicy, JournalLevel, Limits, OnUncertain};
use crate::blob::Blob;
use crate::context::{self, Message};
use crate::derive::StateUpdate;
use crate::event::Event;
use crate::example::{self, EARLIER_RUN};
use crate::id::CallId;
use crate::plan::{Action, How, PlannedCall, plan};
use crate::record::{Block, FinishReason, Record, ToolCall};
use crate::session::CallStatus;
use crate::session::{InboxMessage, Run};
use crate::state::State;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::Strategy;
use serde_json::Value;
use std::collections::HashMap;

const LIMITS: Limits = Limits { steps: 4, tokens: 150, attempts: 5, outage_ms: 1000, tool_s: 1 };

/// The tools of these sessions. Each name says the tool's kind.
const TOOLS: [(&str, Effect); 4] = [
    ("pure", Effect::Pure),
    ("idempotent", Effect::Idempotent),
    ("guarded", Effect::Guarded),
    ("ask", Effect::Pure),
];

#[derive(Clone, Debug)]
enum Happening {
    Message,
    Cancel,
    Retry,
    Work(Work),
}

/// One pass of the worker's loop: a plan, its outcome, and what arrives meanwhile.
#[derive(Clone, Debug)]
struct Work {
    /// The calls that the model asks for if it is called: id, and index of the tool.
    asks: Vec<(&'static str, usize)>,
    /// How each tool ends, if tools are called.
    ends: Vec<End>,
    /// The worker dies before it commits.
    dies: bool,
    /// What arrives between the plan and the commit: `true` is a message, `false` a cancel request.
    meanwhile: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Settles,
    /// It never returns.
    IsLost,
    /// It settles, and then its worker dies.
    DiesAfter,
    /// Its worker dies before it settles.
    DiesBefore,
}

fn work() -> impl Strategy<Value = Work> {
    let call = (select(vec!["a", "b", "", "a_3_0"]), 0..TOOLS.len());
    let end = select(vec![End::Settles, End::Settles, End::IsLost, End::DiesAfter, End::DiesBefore]);
    (vec(call, 0..4), vec(end, 4), prop::bool::weighted(0.2), prop::option::weighted(0.3, any::<bool>()))
        .prop_map(|(asks, ends, dies, meanwhile)| Work { asks, ends, dies, meanwhile })
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        3 => Just(Happening::Message),
        1 => Just(Happening::Cancel),
        1 => Just(Happening::Retry),
        16 => work().prop_map(Happening::Work),
    ]
}

/// The rows that the database would hold, and observations for the checks.
struct World {
    session: Session,
    policy: AgentPolicy,
    journal: Vec<Event>,
    /// The blobs that the journal points at.
    blobs: HashMap<String, Vec<u8>>,
    /// The newest run, closed or not.
    newest: Run,
    accepted: i64,
    steps: Vec<StepResult>,
    /// The state updates of all commits, in order.
    drained: Vec<StateUpdate>,
    /// For each commit: the newest message number, the number of state updates so far, and the state.
    cuts: Vec<(i64, usize, State)>,
    /// How often each guarded call ran.
    ran: HashMap<CallId, usize>,
    /// The messages of the model's last request.
    shown: Vec<Message>,
}

impl World {
    fn new(policy: AgentPolicy) -> World {
        let session = Session {
            status: SessionStatus::Created,
            run: None,
            records: Vec::new(),
            last_message_number: 1,
            ..example::session()
        };
        let newest = Run { run_id: EARLIER_RUN.into(), steps: 0, tokens: 0 };
        World {
            session,
            policy,
            journal: Vec::new(),
            blobs: HashMap::new(),
            newest,
            accepted: 0,
            steps: Vec::new(),
            drained: Vec::new(),
            cuts: Vec::new(),
            ran: HashMap::new(),
            shown: Vec::new(),
        }
    }

    fn happens(&mut self, happening: &Happening) {
        match happening {
            Happening::Message => self.message(),
            Happening::Cancel => self.cancel(),
            Happening::Retry => {
                if matches!(self.session.status, SessionStatus::Failed | SessionStatus::NeedsAttention) {
                    self.open(false);
                }
            }
            Happening::Work(work) => {
                self.work(work);
            }
        }
    }

    /// Does what the store's `wake` does.
    fn message(&mut self) {
        self.accepted += 1;
        self.session.wake_seq += 1;
        self.session.inbox.push(InboxMessage {
            inbox_id: self.accepted,
            text: format!("m{}", self.accepted),
            attachments: Vec::new(),
        });
        match self.session.status {
            SessionStatus::Queued | SessionStatus::Running | SessionStatus::NeedsAttention => {}
            SessionStatus::WaitingInput => self.open(false),
            _ => self.open(true),
        }
    }

    fn cancel(&mut self) {
        let status = self.session.status;
        let pauses = matches!(status, SessionStatus::WaitingInput | SessionStatus::NeedsAttention);
        if !pauses && !status.is_open() {
            return;
        }
        if pauses {
            self.open(false);
        }
        self.session.cancel_requested = true;
        self.session.wake_seq += 1;
    }

    /// Does what the store's `run::open` does: opens a new run or the newest one, which takes the waiting
    /// messages.
    fn open(&mut self, new: bool) {
        if new {
            self.newest = Run { run_id: format!("run_{}", self.accepted).into(), steps: 0, tokens: 0 };
        }
        self.becomes(SessionStatus::Queued);
        let session = &mut self.session;
        session.run = Some(self.newest.clone());
        session.cancel_requested = false;
        session.wake_seq += 1;
        for message in std::mem::take(&mut session.inbox) {
            session.last_message_number += 1;
            let mut record = example::user(session.last_message_number, &message.text);
            let question = session.calls.iter().position(|call| call.status == CallStatus::Waiting);
            if let Some(at) = question {
                let call = session.calls.remove(at);
                record = example::result(session.last_message_number, call.call_id.as_str());
            }
            record.run_id = self.newest.run_id.clone();
            record.step_number = session.last_step_number + 1;
            record.details.inbox_id = Some(message.inbox_id);
            session.records.push(record);
        }
    }

    fn becomes(&mut self, status: SessionStatus) {
        let from = self.session.status;
        assert!(from == status || from.may_become(status), "{from:?} became {status:?}");
        self.session.status = status;
        let (from_state, to_state) = (from.as_str().to_owned(), status.as_str().to_owned());
        self.journal.push(Event::StateTransition { from_state, to_state, reason: None });
    }

    /// One pass of the worker's loop. Returns `false` if the session has nothing left to do.
    fn work(&mut self, work: &Work) -> bool {
        let mut warm = self.session.clone();
        let outcome = match plan(&warm, &LIMITS) {
            Action::Rest => return false,
            Action::Begin => Performed::Begun,
            Action::Pause => Performed::Paused,
            Action::Stop(stop) => Performed::Stopped(stop),
            Action::CallModel => self.call_model(work),
            // Only `plan::in_context` plans a summary, and the properties of the context test it.
            Action::Compact => unreachable!("no strategy is asked here"),
            Action::CallTools { calls } => match self.call_tools(calls, work) {
                Some(outcome) => outcome,
                None => return true,
            },
        };
        if let Performed::Replied(_) = &outcome {
            self.join(&warm, &outcome);
        }
        if work.dies {
            return true;
        }
        match work.meanwhile {
            Some(true) => self.message(),
            Some(false) => self.cancel(),
            None => {}
        }
        let transition = advance(&warm, outcome, self.policy);
        let woken = self.session.wake_seq != warm.wake_seq;
        let transition = if woken { transition.continuing() } else { transition };
        self.commit(&transition);
        if !matches!(transition.next, Next::Close(_)) {
            warm.apply(&transition);
            if woken {
                warm.wake_seq = self.session.wake_seq;
                warm.inbox = self.session.inbox.clone();
                warm.calls = self.session.calls.clone();
                warm.cancel_requested = self.session.cancel_requested;
            }
            assert_eq!(warm, self.session, "the warm copy is what hydrate reads");
        }
        true
    }

    /// A reply and the results of its pure calls change a session alike in one commit and in two.
    fn join(&self, session: &Session, replied: &Performed) {
        let mut reply = advance(session, replied.clone(), self.policy);
        let mut in_two = session.clone();
        in_two.apply(&reply);
        let Action::CallTools { calls } = plan(&in_two, &LIMITS) else { return };
        if reply.calls_opened.iter().any(|call| call.effect != Effect::Pure) {
            return;
        }
        let ended = calls.into_iter().map(|PlannedCall { call, how }| {
            assert_eq!(how, How::Run);
            let details = Some(details(&call, self.accepted));
            let outcome = CallOutcome { details, ..example::outcome("done") };
            EndedCall { call, ending: CallEnd::Settled(CallStatus::Done, outcome) }
        });
        let results = advance(&in_two, Performed::Called(ended.collect()), self.policy);
        in_two.apply(&results);
        let events: Vec<_> = reply.events.iter().chain(&results.events).cloned().collect();
        assert!(reply.join(results));
        assert_eq!(reply.events, events);
        let mut in_one = session.clone();
        in_one.apply(&reply);
        assert_eq!(in_one, in_two);
    }

    fn call_model(&mut self, work: &Work) -> Performed {
        let asked: Vec<_> = self.session.records.iter().flat_map(Record::tool_calls).collect();
        for call in &asked {
            let results = self.session.records.iter().flat_map(Record::tool_results);
            let answers = results.filter(|result| result.call_id == call.call_id).count();
            assert_eq!(answers, 1, "{} has one result before the next model call", call.call_id);
        }
        let shown = context::full(&self.session, Vec::new()).messages;
        assert!(shown.starts_with(&self.shown), "what the model saw is never changed");
        self.shown = shown;
        let call = |(id, tool): &(&str, usize)| {
            Block::ToolCall(ToolCall { name: TOOLS[*tool].0.into(), ..example::tool_call(id) })
        };
        let mut content: Vec<Block> = work.asks.iter().map(call).collect();
        content.insert(0, Block::Text { text: "I say.".into() });
        let reply = Reply { content, finish_reason: FinishReason::Stop, usage: example::USAGE };
        Performed::Replied(Generated {
            generation_id: "gen".into(),
            attempt: 1,
            model: "m".into(),
            request_sha256: String::new(),
            started_at: None,
            repairs: 0,
            resumes: None,
            prefill_bytes: None,
            reply,
            context_strategy: crate::strategy::Strategy::Full,
            rebase: None,
            effects: TOOLS.iter().map(|(name, effect)| ((*name).to_owned(), *effect)).collect(),
        })
    }

    /// Performs the planned calls and writes the ledger. `None`: the worker died.
    fn call_tools(&mut self, calls: Vec<PlannedCall>, work: &Work) -> Option<Performed> {
        let mut performed = Vec::new();
        for (PlannedCall { call, how }, end) in calls.into_iter().zip(&work.ends) {
            let ending = match how {
                How::Reuse(status, outcome) => CallEnd::Settled(status, outcome),
                How::Uncertain { known } => CallEnd::Uncertain { known, why: None },
                How::Answer { inbox_id, text } => CallEnd::Answered { inbox_id, text },
                How::Abandon => CallEnd::Abandoned,
                How::Run => self.run(&call, *end)?,
            };
            performed.push(EndedCall { call, ending });
        }
        Some(Performed::Called(performed))
    }

    fn run(&mut self, call: &ToolCall, end: End) -> Option<CallEnd> {
        let rows = &mut self.session.calls;
        let row = rows.iter_mut().find(|row| row.call_id == call.call_id).expect("its row came with it");
        if call.name == "ask" {
            return Some(CallEnd::Asked("?".into()));
        }
        if row.effect != Effect::Pure {
            row.status = CallStatus::Started;
        }
        if row.effect == Effect::Guarded {
            *self.ran.entry(call.call_id.clone()).or_default() += 1;
        }
        let outcome = CallOutcome {
            details: Some(details(call, self.accepted)),
            // Some calls fail although their result has details.
            is_error: call.call_id.as_str().ends_with("_0"),
            ..example::outcome("done")
        };
        if end == End::DiesBefore {
            return None;
        }
        if end == End::IsLost && row.effect == Effect::Guarded {
            return Some(CallEnd::Uncertain { known: false, why: None });
        }
        if row.effect != Effect::Pure {
            row.status = CallStatus::Done;
            row.outcome = Some(outcome.clone());
        }
        (end != End::DiesAfter).then_some(CallEnd::Settled(CallStatus::Done, outcome))
    }

    fn commit(&mut self, transition: &Transition) {
        assert_eq!(transition.step_number, self.steps.len() as i64 + 1);
        if let Some(status) = transition.status() {
            let from = self.session.status;
            assert!(from == status || from.may_become(status), "{from:?} became {status:?}");
        }
        for opened in &transition.calls_opened {
            assert!(self.session.call(&opened.call_id).is_none());
        }
        let mut tried = self.session.clone();
        let before = tried.apply_tentatively(transition);
        let after = tried.clone();
        tried.undo(before, transition);
        assert_eq!(tried, self.session, "what was applied tentatively is undone");
        self.session.apply(transition);
        assert_eq!(after, self.session);
        self.journal.extend(transition.events.iter().cloned());
        let mut blobs: Vec<Blob> = transition.blobs.clone();
        if let Next::Close(closing) = &transition.next {
            self.journal.extend(closing.events.iter().cloned());
            blobs.push(closing.snapshot.clone());
        }
        self.blobs.extend(blobs.into_iter().map(|blob| (blob.sha256, blob.bytes)));
        self.steps.extend(transition.step.clone());
        self.drained.extend(transition.state_updates.iter().cloned());
        let session = &self.session;
        self.cuts.push((session.last_message_number, self.drained.len(), session.state.clone()));
        if let Some(run) = &self.session.run {
            self.newest = run.clone();
        }
        if let Next::Close(_) = transition.next {
            self.session.run = None;
            self.session.cancel_requested = false;
        }
        self.check();
    }

    /// Works without disturbance until the session has nothing left to do. Returns the number of passes.
    fn rests(&mut self) -> usize {
        let work = Work {
            asks: vec![("a", 0), ("b", 2)],
            ends: vec![End::Settles; 4],
            dies: false,
            meanwhile: None,
        };
        (0..100).find(|_| !self.work(&work)).expect("a run ends under its limits")
    }
}

/// Returns the details that a tool records: each known kind, and an unknown kind. The same file is written
/// many times.
fn details(call: &ToolCall, version: i64) -> Value {
    match call.name.as_str() {
        "pure" => {
            serde_json::json!({"type": "sentEmail", "to": ["a@b.c"], "subject": call.call_id, "body": "x"})
        }
        "idempotent" => {
            serde_json::json!({"type": "fileWritten", "path": "f", "bytes": version, "sha256": "00"})
        }
        _ if version % 2 == 0 => serde_json::json!({"type": "fileWritten", "path": call.call_id, "bytes": 1}),
        _ => serde_json::json!({"type": "other", "path": "f"}),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn no_life_loses_a_message_or_a_result_or_a_count(happenings in vec(happening(), 1..40), ask in any::<bool>(), full in any::<bool>()) {
        let policy = AgentPolicy {
            on_uncertain: if ask { OnUncertain::NeedsAttention } else { OnUncertain::TellModel },
            journal: if full { JournalLevel::Full } else { JournalLevel::Checkpoint },
            ..AgentPolicy::default()
        };
        let mut world = World::new(policy);
        for happening in &happenings {
            world.happens(happening);
        }
        world.rests();
        prop_assert!(!world.session.status.is_open());

        // From every resting status, a message or an operator makes the session continue. In the end every
        // call has a result and every cost is counted.
        if world.session.status == SessionStatus::NeedsAttention {
            world.open(false);
        } else {
            world.message();
        }
        world.rests();
        if world.session.open_turn().is_none() {
            let said = world.session.records.iter().filter_map(|record| record.details.usage);
            let cost: i64 = said.map(|usage| usage.cost_micros).sum();
            prop_assert_eq!(world.session.totals.usage.cost_micros, cost, "every answer is counted");
        }
        prop_assert!(world.session.inbox.is_empty() || world.session.status == SessionStatus::NeedsAttention);
    }
}
