//! The rows of a session that was a task, made checkpoint by checkpoint, so that a long task needs little memory.

use super::message::{self, Said};
use super::opening::Opening;
use super::shape::{Reading, Shape};
use super::{DETAILS, Listed, Task, TaskState};
use crate::bundle::{CallRow, RecordRow, RunRow, RunStatus, SeedRow, StepRow};
use crate::derive;
use crate::effect::Effect;
use crate::record::{Block, FinishReason, Role, Usage};
use crate::seed::Seed;
use crate::session::{CallStatus, SessionStatus, Totals};
use crate::state::State;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashMap;

/// Largest value of a checkpoint without messages that is kept in the state.
const KEPT_BYTES: usize = 4096;

/// What becomes of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Fate {
    pub session: SessionStatus,
    pub run: RunStatus,
    pub error: Option<String>,
    /// `Some`: the session gets a job, which is due at this time, or at once if there is none.
    pub job: Option<Option<String>>,
}

impl Fate {
    /// Decides what becomes of `task`. The caller has made sure that Absurd does nothing more with it.
    pub fn of(task: &Task) -> Fate {
        let fate = |session, run| Fate { session, run, error: None, job: None };
        match task.state {
            TaskState::Completed => fate(SessionStatus::Completed, RunStatus::Completed),
            TaskState::Failed => {
                let why = task.failure.as_ref().and_then(|of| of["message"].as_str().map(str::to_owned));
                let error = why.unwrap_or_else(|| "it failed in Absurd, which says no more".to_owned());
                Fate { error: Some(error), ..fate(SessionStatus::Failed, RunStatus::Failed) }
            }
            TaskState::Cancelled => Fate {
                error: Some("cancelled".to_owned()),
                ..fate(SessionStatus::Cancelled, RunStatus::Cancelled)
            },
            TaskState::Pending | TaskState::Sleeping | TaskState::Running if task.waits_for.is_some() => {
                fate(SessionStatus::WaitingInput, RunStatus::WaitingInput)
            }
            // A run that has started holds its conversation; its session stays queued until a worker begins.
            TaskState::Pending | TaskState::Sleeping | TaskState::Running => {
                Fate { job: Some(task.wakes_at.clone()), ..fate(SessionStatus::Queued, RunStatus::Running) }
            }
        }
    }
}

/// Ids of the session, as its rows have them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids {
    pub session_id: String,
    pub run_id: String,
}

impl Ids {
    /// Ids that depend only on the task, so a second import cannot make another session. `time`: how often the task was
    /// taken, from 1.
    pub fn of(space_id: &str, queue: &str, task_id: &str, time: i64) -> Ids {
        let of = |prefix: &str| {
            let text = format!("absurd\n{prefix}\n{space_id}\n{queue}\n{task_id}\n{time}");
            format!("{prefix}_{}", &hex::encode(Sha256::digest(text.as_bytes()))[..32])
        };
        Ids { session_id: of("sess"), run_id: of("run") }
    }
}

/// The seeds of a session: the system prompt, earlier messages, and the prompt if the checkpoints do not have it.
pub fn seeds(opening: &Opening, agents_prompt: &str, prompt_is_seed: bool) -> Vec<Seed> {
    let seed = |role, content: &str| Seed { role, content: content.to_owned(), is_new: true };
    let system = opening.system.as_deref().unwrap_or(agents_prompt);
    let mut seeds = vec![seed(Role::System, system)];
    seeds.extend(opening.history.iter().cloned());
    if prompt_is_seed {
        seeds.push(seed(Role::User, &opening.prompt));
    }
    seeds
}

/// The seeds as rows.
pub fn seed_rows(seeds: &[Seed]) -> Vec<SeedRow> {
    let row = |(ordinal, seed): (usize, &Seed)| SeedRow {
        ordinal: i32::try_from(ordinal).unwrap_or(i32::MAX),
        role: seed.role,
        content: seed.content.clone(),
        is_new: seed.is_new,
        timestamp: None,
        details: None,
    };
    seeds.iter().enumerate().map(row).collect()
}

/// A step whose messages are read and that is not complete yet.
#[derive(Clone, Debug)]
struct Open {
    attempt: i64,
    started_at: String,
    committed_at: String,
    finish: Option<FinishReason>,
    usage: Option<Usage>,
    tools: Option<i64>,
}

/// Makes the rows.
#[derive(Debug)]
pub struct Builder {
    ids: Ids,
    base: i64,
    last: i64,
    ended: i64,
    open: Option<Open>,
    steps: Vec<StepRow>,
    unknown_usage: Vec<i64>,
    calls: Vec<CallRow>,
    by_id: HashMap<String, usize>,
    /// Message of the newest turn with calls.
    turn: i64,
    state: State,
    derived: State,
    before: String,
    repeated_calls: i64,
    results: i64,
}

/// What the session's row and its neighbours get at the end.
#[derive(Clone, Debug)]
pub struct Built {
    pub base_message_number: i64,
    pub last_message_number: i64,
    pub to_message_number: i64,
    pub last_step_number: i64,
    pub initial_state: State,
    pub state: State,
    pub totals: Totals,
    pub run: RunRow,
    pub steps: Vec<StepRow>,
    /// Steps whose usage Absurd did not keep.
    pub unknown_usage: Vec<i64>,
    pub calls: Vec<CallRow>,
    /// How many calls have the id of an earlier call of the task.
    pub repeated_calls: i64,
}

impl Builder {
    /// Begins after message `base` of the conversation.
    pub fn new(ids: Ids, base: i64, task: &Task) -> Builder {
        Builder {
            ids,
            base,
            last: base,
            ended: base,
            open: None,
            steps: Vec::new(),
            unknown_usage: Vec::new(),
            calls: Vec::new(),
            by_id: HashMap::new(),
            turn: 0,
            state: State::new(),
            derived: State::new(),
            before: task.started_at.clone().unwrap_or_else(|| task.enqueued_at.clone()),
            repeated_calls: 0,
            results: 0,
        }
    }

    /// The prompt as the session's first message, because no checkpoint has one.
    pub fn prompt(&mut self, text: &str, at: &str) -> RecordRow {
        let said = Said {
            role: Role::User,
            content: vec![Block::Text { text: text.to_owned() }],
            rest: json!({"form": "params"}),
            usage: None,
            finish: None,
        };
        self.record("params", at, said)
    }

    /// Takes the next checkpoint with messages.
    ///
    /// # Errors
    /// A text for people that names a message which cannot be read.
    pub fn add(
        &mut self,
        shape: &Shape,
        listed: &Listed,
        reading: Reading,
    ) -> Result<Vec<RecordRow>, String> {
        let mut rows = Vec::new();
        let whole = shape.steps_are_checkpoints() && !shape.is_opening(&listed.name);
        if whole {
            self.close();
        }
        for (key, value) in reading.updates {
            self.state.insert(key, value);
        }
        let (mut finish, mut usage) = (reading.finish, reading.usage);
        for raw in &reading.messages {
            let said = said_of(shape, raw).map_err(|why| format!("{}: {why}", listed.name))?;
            if said.role == Role::Assistant && !shape.steps_are_checkpoints() {
                self.close();
                self.open = Some(self.opened(listed, said.finish, said.usage, None));
            }
            if whole {
                finish = finish.or(said.finish);
                usage = sum(usage, said.usage.filter(|_| reading.usage.is_none()));
            }
            rows.push(self.record(&listed.name, &listed.updated_at, said));
        }
        if whole {
            self.open = Some(self.opened(listed, finish, usage, reading.tools));
        } else if let Some(open) = &mut self.open {
            open.committed_at.clone_from(&listed.updated_at);
        }
        self.before.clone_from(&listed.updated_at);
        Ok(rows)
    }

    /// Keeps the result of a checkpoint without messages in the state: as it is, or its size and hash.
    pub fn other(&mut self, name: &str, state: Value) {
        let text = state.to_string();
        let kept = match text.len() > KEPT_BYTES {
            true => json!({"bytes": text.len(), "sha256": hex::encode(Sha256::digest(text.as_bytes()))}),
            false => state,
        };
        self.state.insert(format!("absurd/{name}"), kept);
    }

    fn opened(
        &self,
        listed: &Listed,
        finish: Option<FinishReason>,
        usage: Option<Usage>,
        tools: Option<i64>,
    ) -> Open {
        Open {
            attempt: listed.attempt.unwrap_or(1),
            started_at: self.before.clone(),
            committed_at: listed.updated_at.clone(),
            finish,
            usage,
            tools,
        }
    }

    fn record(&mut self, checkpoint: &str, at: &str, mut said: Said) -> RecordRow {
        self.last += 1;
        let number = self.last;
        for block in &mut said.content {
            match block {
                Block::ToolCall(call) => {
                    self.turn = number;
                    self.asked(call.call_id.as_str(), &call.name, &call.arguments, at);
                }
                Block::ToolResult(result) => {
                    if result.name.is_empty()
                        && said.rest["form"] != "pi"
                        && let Some(call) = self.by_id.get(result.call_id.as_str()).map(|at| &self.calls[*at])
                    {
                        result.name.clone_from(&call.name);
                    }
                    self.answered(result.call_id.as_str(), result.is_error, at);
                    for update in derive::updates(result) {
                        derive::apply(&mut self.derived, &update);
                    }
                }
                Block::Text { .. } | Block::Provider { .. } => {}
            }
        }
        let mut origin = match said.rest {
            Value::Object(rest) => rest,
            _ => Map::new(),
        };
        origin.insert("checkpoint".to_owned(), json!(checkpoint));
        let mut details = Map::new();
        if said.role == Role::Assistant {
            if let Some(usage) = said.usage {
                details.insert("usage".to_owned(), json!(usage));
            }
            if let Some(finish) = said.finish {
                details.insert("finish_reason".to_owned(), json!(finish));
            }
        }
        details.insert(DETAILS.to_owned(), Value::Object(origin));
        let id = format!("{}\n{number}", self.ids.session_id);
        RecordRow {
            message_number: number,
            message_id: format!("msg_{}", &hex::encode(Sha256::digest(id.as_bytes()))[..32]),
            run_id: self.ids.run_id.clone(),
            step_number: self.next_step(),
            role: said.role,
            content: said.content,
            internal: false,
            details,
            created_at: at.to_owned(),
        }
    }

    fn next_step(&self) -> i64 {
        self.steps.len() as i64 + 1
    }

    fn asked(&mut self, call_id: &str, name: &str, arguments: &Value, at: &str) {
        if self.by_id.contains_key(call_id) {
            // The ledger has one row for each id. The messages keep both.
            self.repeated_calls += 1;
            return;
        }
        self.by_id.insert(call_id.to_owned(), self.calls.len());
        self.calls.push(CallRow {
            call_id: call_id.to_owned(),
            run_id: self.ids.run_id.clone(),
            step_number: self.next_step(),
            message_number: self.last,
            result_message_number: None,
            name: name.to_owned(),
            args_sha256: hex::encode(Sha256::digest(arguments.to_string().as_bytes())),
            // What a tool of Absurd did to the world is unknown here, so it never runs again by itself.
            effect: Effect::Guarded,
            status: CallStatus::Uncertain,
            attempts: 1,
            outcome: None,
            receipt: None,
            resolution: None,
            started_at: Some(at.to_owned()),
            settled_at: None,
        });
    }

    fn answered(&mut self, call_id: &str, is_error: bool, at: &str) {
        self.results += 1;
        let Some(call) = self.by_id.get(call_id).map(|at| &mut self.calls[*at]) else { return };
        call.status = if is_error { CallStatus::Failed } else { CallStatus::Done };
        call.result_message_number = Some(self.last);
        call.settled_at = Some(at.to_owned());
    }

    /// Completes the open step.
    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        let number = self.next_step();
        let of_step = |call: &&CallRow| call.step_number == number;
        let has_calls =
            self.calls.iter().rev().take_while(|call| call.step_number >= number).any(|call| of_step(&call));
        let usual = if has_calls { FinishReason::ToolCalls } else { FinishReason::Stop };
        if open.usage.is_none() {
            self.unknown_usage.push(number);
        }
        let usage = open.usage.unwrap_or_default();
        let narrow = |count: i64| i32::try_from(count).unwrap_or(i32::MAX);
        self.steps.push(StepRow {
            workspace_sha256: None,
            step_number: number,
            run_id: self.ids.run_id.clone(),
            from_message_number: self.ended,
            to_message_number: self.last,
            finish_reason: open.finish.unwrap_or(usual).as_str().to_owned(),
            input_tokens: narrow(usage.input_tokens),
            output_tokens: narrow(usage.output_tokens),
            cached_tokens: narrow(usage.cached_tokens),
            cache_write_tokens: narrow(usage.cache_write_tokens),
            cost_micros: usage.cost_micros,
            executed_local_tool_count: narrow(open.tools.unwrap_or(self.results).max(0)),
            attempt: narrow(open.attempt),
            // The entry that says where the session comes from.
            event_seq: 1,
            started_at: open.started_at,
            committed_at: open.committed_at,
        });
        self.ended = self.last;
        self.results = 0;
    }

    /// Ends the session.
    pub fn finish(mut self, task: &Task, fate: &Fate) -> Built {
        let turn = self.turn;
        let lacks = |call: &CallRow| call.message_number == turn && call.result_message_number.is_none();
        let unanswered = self.calls.iter().any(lacks);
        // A pause and the end complete their step. Otherwise a step with open calls goes on here, at once or when somebody asks.
        let goes_on =
            matches!(fate.session, SessionStatus::Queued | SessionStatus::Failed | SessionStatus::Cancelled);
        if !(unanswered && goes_on) {
            self.close();
        }
        let mut asks = fate.session == SessionStatus::WaitingInput;
        for call in self.calls.iter_mut().filter(|call| call.result_message_number.is_none()) {
            call.status = match (call.message_number == turn, fate.session) {
                (true, SessionStatus::WaitingInput) if std::mem::take(&mut asks) => CallStatus::Waiting,
                (true, SessionStatus::WaitingInput) => CallStatus::Uncertain,
                (true, _) if goes_on => CallStatus::Uncertain,
                (_, _) => CallStatus::Abandoned,
            };
        }
        if let Some(result) = task.result.clone().filter(|result| !result.is_null()) {
            self.other("$result", result);
        }
        if let Some(event) = &task.waits_for {
            self.state.insert("absurd/$waitsFor".to_owned(), json!(event));
        }
        let mut totals = Totals { turns: self.steps.len() as i64, ..Totals::default() };
        let mut tools = 0;
        for step in &self.steps {
            totals.usage.input_tokens += i64::from(step.input_tokens);
            totals.usage.output_tokens += i64::from(step.output_tokens);
            totals.usage.cached_tokens += i64::from(step.cached_tokens);
            totals.usage.cache_write_tokens += i64::from(step.cache_write_tokens);
            totals.usage.cost_micros += step.cost_micros;
            tools += i64::from(step.executed_local_tool_count);
        }
        let mut state = self.state.clone();
        state.extend(self.derived);
        let ended = matches!(fate.run, RunStatus::Completed | RunStatus::Failed | RunStatus::Cancelled);
        let ended_at = task.ended_at.clone().unwrap_or_else(|| self.before.clone());
        Built {
            base_message_number: self.base,
            last_message_number: self.last,
            to_message_number: self.ended,
            last_step_number: self.steps.len() as i64,
            initial_state: self.state,
            state,
            totals,
            run: RunRow {
                run_id: self.ids.run_id,
                status: fate.run,
                prompt_message_number: (self.last > self.base).then_some(self.base + 1),
                steps: self.steps.len() as i64,
                input_tokens: totals.usage.input_tokens,
                output_tokens: totals.usage.output_tokens,
                tool_calls: tools,
                error: fate.error.clone(),
                created_at: task.enqueued_at.clone(),
                started_at: Some(task.started_at.clone().unwrap_or_else(|| task.enqueued_at.clone())),
                completed_at: ended.then_some(ended_at),
            },
            steps: self.steps,
            unknown_usage: self.unknown_usage,
            calls: self.calls,
            repeated_calls: self.repeated_calls,
        }
    }
}

/// Reads a message of this shape.
///
/// # Errors
/// Why it is not a message, as a text for people.
pub fn said_of(shape: &Shape, raw: &Value) -> Result<Said, String> {
    match shape {
        Shape::AgentLoop | Shape::NewMessages | Shape::MessageLog => message::read(raw),
        Shape::Declared(declared) => declared.message(raw),
    }
}

fn sum(a: Option<Usage>, b: Option<Usage>) -> Option<Usage> {
    match (a, b) {
        (Some(a), Some(b)) => Some(Usage {
            input_tokens: a.input_tokens + b.input_tokens,
            output_tokens: a.output_tokens + b.output_tokens,
            cached_tokens: a.cached_tokens + b.cached_tokens,
            cache_write_tokens: a.cache_write_tokens + b.cache_write_tokens,
            cost_micros: a.cost_micros + b.cost_micros,
        }),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
