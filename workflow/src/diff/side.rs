//! The parts of a session that a comparison reads. Built from a hydrated session or from a bundle.

use crate::agent::{ToolDefinition, Tools};
use crate::event::Event;
use crate::id::{GenerationId, SessionId};
use crate::prefix::{Prefix, system_of};
use crate::record::{Record, Role, Usage};
use crate::seed::Seed;
use crate::session::Session;
use crate::state::State;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// One session.
#[derive(Clone, Debug, PartialEq)]
pub struct Side {
    pub session_id: SessionId,
    pub agent: String,
    pub model: String,
    pub status: String,
    /// The system prompt that the model received.
    pub system: String,
    pub tools: Vec<ToolDefinition>,
    /// Messages before the first record. Those with role `system` are in `system`.
    pub seeds: Vec<Seed>,
    /// Ordered by message number.
    pub records: Vec<Record>,
    /// The final state.
    pub state: State,
    /// Usage and time of the answers, by message number. Unknown answers are absent.
    pub answers: BTreeMap<i64, Answer>,
}

/// Usage and time of one answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Answer {
    #[serde(flatten)]
    pub usage: Usage,
    /// From the start of its step until the commit.
    pub time_ms: Option<i64>,
    pub model: Option<String>,
    pub request_sha256: Option<String>,
}

/// A committed step. It produced the answer numbered `from_message_number < n <= to_message_number`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub from_message_number: i64,
    pub to_message_number: i64,
    pub usage: Usage,
    pub time_ms: i64,
}

impl Side {
    /// Builds the side of a hydrated session.
    pub fn of(session: Session, model: String, answers: BTreeMap<i64, Answer>) -> Side {
        let Prefix { system, tools } = session
            .prefix
            .unwrap_or_else(|| Prefix { system: system_of(&session.seeds), tools: Tools::default() });
        Side {
            session_id: session.session_id,
            agent: session.agent,
            model,
            status: session.status.as_str().to_owned(),
            system,
            tools: tools.to_vec(),
            seeds: session.seeds,
            records: session.records,
            state: session.state,
            answers,
        }
    }

    /// Usage and time of the answers among `records`, taken from the steps and the journal. `events` needs
    /// only LLM_CALLED and GEN_COMPLETE.
    pub fn answers<'a>(
        records: &[Record],
        steps: &[Step],
        events: impl IntoIterator<Item = &'a Event>,
    ) -> BTreeMap<i64, Answer> {
        let mut called: HashMap<&GenerationId, (&str, &str)> = HashMap::new();
        let mut asked: HashMap<i64, (&str, &str)> = HashMap::new();
        for event in events {
            if let Event::LlmCalled { generation_id, model, request_sha256, .. } = event {
                called.insert(generation_id, (model, request_sha256));
            }
            if let Event::GenComplete { generation_id, message_number, .. } = event
                && let Some(call) = called.get(generation_id)
            {
                asked.insert(*message_number, *call);
            }
        }
        let mut steps: Vec<&Step> = steps.iter().collect();
        steps.sort_by_key(|step| step.to_message_number);
        let answers = records.iter().filter(|record| record.role == Role::Assistant);
        answers
            .filter_map(|record| {
                let number = record.message_number;
                let at = steps.partition_point(|step| step.to_message_number < number);
                let step = steps.get(at).filter(|step| step.from_message_number < number);
                let call = asked.get(&number);
                if step.is_none() && call.is_none() {
                    return None;
                }
                let usage = step.map(|step| step.usage).or(record.details.usage).unwrap_or_default();
                let answer = Answer {
                    usage,
                    time_ms: step.map(|step| step.time_ms),
                    model: call.map(|(model, _)| (*model).to_owned()),
                    request_sha256: call.map(|(_, sha256)| (*sha256).to_owned()),
                };
                Some((number, answer))
            })
            .collect()
    }
}
