//! Writes the session of one task, in one transaction. Nothing is sent or run by it.

use super::source::Source;
use super::writing::Writing;
use crate::wake::NewSession;
use crate::{Result, Store};
use serde::Serialize;
use serde_json::Value;
use wakeful_workflow::absurd::rows::Fate;
use wakeful_workflow::absurd::shape::{Reading, Shape, Sorted, Stays, stays};
use wakeful_workflow::absurd::{Listed, Task};
use wakeful_workflow::session::SessionStatus;

/// How one task is imported.
#[derive(Clone, Debug)]
pub struct Import<'a> {
    /// Agent, model, tools, policy and conversation of the session. Its seeds have the agent's system prompt; its trigger is
    /// not used.
    pub new: &'a NewSession,
    pub queue: &'a str,
    pub task_id: &'a str,
    /// How its checkpoints are read. `None`: no task of this name told it.
    pub shape: Option<&'a Shape>,
    /// Reads the messages of slim steps: see [`Source::records`].
    pub records_sql: &'a str,
    /// Absurd's workers are gone, so open tasks come too.
    pub stopped: bool,
}

/// An imported task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Imported {
    pub session_id: String,
    pub status: SessionStatus,
    pub messages: i64,
    pub steps: i64,
}

/// What became of the import of a task.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Imported(Imported),
    /// It was imported before.
    Already,
    /// Absurd may run it: only `take` brings it over.
    Open,
    /// A worker of Absurd has it.
    Runs,
    /// It cannot come, and why.
    Cannot(String),
}

/// The part of the checkpoints that a batch has read.
pub(super) struct Read {
    pub listed: Listed,
    pub reading: Reading,
}

impl Store {
    /// Imports one task, completely or not at all.
    ///
    /// # Errors
    /// [`crate::Error::Database`], [`crate::Error::Corrupt`].
    pub async fn absurd_import(&self, source: &mut Source, import: &Import<'_>) -> Result<Outcome> {
        source.begin().await?;
        let outcome = self.import_read(source, import).await;
        // An error may have broken the snapshot; the next task begins its own.
        if outcome.is_ok() {
            source.end().await?;
        }
        outcome
    }

    async fn import_read(&self, source: &mut Source, import: &Import<'_>) -> Result<Outcome> {
        let Some((task, listed)) = source.task(import.queue, import.task_id).await? else {
            return Ok(Outcome::Cannot("Absurd has no such task any more".to_owned()));
        };
        match stays(task.state, task.parked, import.stopped) {
            Some(Stays::Runs) => return Ok(Outcome::Runs),
            Some(Stays::Open) => return Ok(Outcome::Open),
            None => {}
        }
        let shape = match import.shape {
            Some(shape @ Shape::Declared(_)) => shape.clone(),
            told => match (shape_of(source, &task, &listed).await?, told) {
                (Some(own), _) => own,
                (None, Some(told)) => told.clone(),
                (None, None) => {
                    return Ok(Outcome::Cannot(
                        "its checkpoints hold no messages, and [absurd.tasks] does not say where they are"
                            .to_owned(),
                    ));
                }
            },
        };
        let space_id = &import.new.space_id;
        let source_name = task.trigger_type();
        let mut tx = self.pool.begin_long().await?;
        let time = sqlx::query_scalar!(
            "insert into absurd_imports
                (space_id, source, task_id, time, session_id, task_name, task_state, shape, idempotency_key, taken)
            select $1, $2, $3, before.times + 1, '', $4, $5, $6, $7, $8
            from (select count(*)::integer as times from absurd_imports
                where space_id = $1 and source = $2 and task_id = $3 and phase = 'returned') before
            on conflict do nothing
            returning time",
            space_id,
            source_name,
            task.task_id,
            task.name,
            task.state.as_str(),
            shape.as_str(),
            task.idempotency_key,
            task.parked
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(time) = time else { return Ok(Outcome::Already) };
        // No `back` gives the task away any more. One may have done so since it was read, so an open task is read again.
        let (task, listed) = if task.state.is_over() {
            (task, listed)
        } else {
            source.begin().await?;
            match source.task(import.queue, import.task_id).await? {
                Some(now) if (now.0.state, now.0.parked) == (task.state, task.parked) => now,
                Some(_) | None => return Ok(Outcome::Open),
            }
        };
        crate::failpoint!("K70");
        let fate = Fate::of(&task);
        let checkpoints = listed.len();
        let sorted = shape.sort(listed, task.attempt);
        let mut writing = match Writing::begin(&mut tx, import, &task, &shape, &fate, i64::from(time)).await?
        {
            Ok(writing) => writing,
            Err(why) => return Ok(Outcome::Cannot(why)),
        };
        if let Err(why) = writing.records(&mut tx, source, &sorted).await? {
            return Ok(Outcome::Cannot(why));
        }
        crate::failpoint!("K71");
        let imported = writing.end(&mut tx, checkpoints, sorted_bytes(&sorted)).await?;
        crate::failpoint!("K72");
        crate::audit::act::on(&imported.session_id);
        tx.commit().await?;
        crate::failpoint!("K73");
        Ok(Outcome::Imported(imported))
    }
}

fn sorted_bytes(sorted: &Sorted) -> i64 {
    sorted.said.iter().chain(&sorted.others).map(|one| one.bytes).sum()
}

/// Tells the shape of a task by its own checkpoints.
pub(super) async fn shape_of(source: &mut Source, task: &Task, listed: &[Listed]) -> Result<Option<Shape>> {
    let telling: Vec<Listed> = listed
        .iter()
        .filter(|one| one.counts(task.attempt) && Shape::is_telling(&one.name))
        .take(8)
        .cloned()
        .collect();
    for one in telling {
        let states = source.states(&task.queue, &task.task_id, std::slice::from_ref(&one)).await?;
        if let Some(shape) = states.first().and_then(|state| Shape::of(&one.name, state)) {
            return Ok(Some(shape));
        }
    }
    Ok(None)
}

/// Reads one batch of checkpoints, and the messages that slim steps point at. `after`: the last message that a slim step
/// before has pointed at; `None`: this task has read no slim step yet.
pub(super) async fn read_batch(
    source: &mut Source,
    task: &Task,
    shape: &Shape,
    batch: &[Listed],
    records: (&str, &str),
    after: &mut Option<i64>,
) -> Result<std::result::Result<Vec<Read>, String>> {
    let (sql, conversation) = records;
    let states = source.states(&task.queue, &task.task_id, batch).await?;
    let mut read = Vec::with_capacity(states.len());
    for (listed, state) in batch.iter().zip(states) {
        let mut reading = match shape.read(&listed.name, &state) {
            Ok(reading) => reading,
            Err(why) => return Ok(Err(why)),
        };
        if let Some(to) = reading.to_message_number {
            if sql.is_empty() {
                return Ok(Err(format!(
                    "{}: the messages are elsewhere, up to number {to}: set `records_sql` in [absurd.tasks]",
                    listed.name
                )));
            }
            if conversation.is_empty() {
                return Ok(Err(format!(
                    "{}: the messages are elsewhere, and the params name no conversation",
                    listed.name
                )));
            }
            // The conversation's messages before this task belong to its earlier tasks.
            let from = match *after {
                Some(after) => after,
                None => source.records_before(&task.queue, &task.task_id, conversation).await?,
            };
            reading.messages = source.records(sql, conversation, from, to).await?;
            if reading.messages.is_empty() && to > from {
                return Ok(Err(format!(
                    "{}: `records_sql` finds no message of {conversation} above {from} and up to {to}",
                    listed.name
                )));
            }
            *after = Some(to);
        }
        read.push(Read { listed: listed.clone(), reading });
    }
    Ok(Ok(read))
}

/// The origin of each message of a session: the part of its details that says where it comes from.
pub(super) fn origin_of(details: &Value) -> Value {
    details[wakeful_workflow::absurd::DETAILS].clone()
}
