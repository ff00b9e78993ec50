//! Reads tasks and writes nothing: for `scan`, and for `show`.

use super::import::{read_batch, shape_of};
use super::source::{Source, batches};
use crate::{Error, Result};
use serde_json::Value;
use sqlx::AssertSqlSafe;
use std::collections::BTreeSet;
use wakeful_workflow::absurd::message::Said;
use wakeful_workflow::absurd::opening::Opening;
use wakeful_workflow::absurd::rows::said_of;
use wakeful_workflow::absurd::shape::Shape;
use wakeful_workflow::absurd::{Listed, Task};

/// A task that was read.
#[derive(Clone, Debug)]
pub struct Looked {
    pub task: Task,
    pub opening: Opening,
    /// `None`: its own checkpoints do not tell it.
    pub shape: Option<Shape>,
    pub messages: i64,
    /// Checkpoints with messages, others, and those that Absurd hides.
    pub said: Vec<Listed>,
    pub others: Vec<Listed>,
    pub hidden: Vec<Listed>,
    /// Fields of steps that do not come along.
    pub left_out: BTreeSet<String>,
    /// Why it cannot come.
    pub why: Option<String>,
}

impl Source {
    /// Tells the shape of the tasks of this name by a few of their checkpoints.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn tell(&mut self, queue: &str, name: &str) -> Result<Option<Shape>> {
        let sql = format!(
            "select c.checkpoint_name, c.state::text from {} t join {} c on c.task_id = t.task_id
            where t.task_name = $1
                and c.checkpoint_name ~ '^(agent-loop|initial-message|message)(-[0-9a-f]{{64}})?(#[0-9]+)?$'
                and pg_column_size(c.state) < 100000
            limit 5",
            self.table('t', queue),
            self.table('c', queue)
        );
        let rows: Vec<(String, Option<String>)> =
            sqlx::query_as(AssertSqlSafe(sql)).bind(name).fetch_all(&mut self.connection).await?;
        for (name, state) in rows {
            let state = serde_json::from_str(&state.unwrap_or_default()).unwrap_or(Value::Null);
            if let Some(shape) = Shape::of(&name, &state) {
                return Ok(Some(shape));
            }
        }
        Ok(None)
    }

    /// Reads a task as an import would. Calls `each` with a checkpoint's name, its raw message, and that message as a
    /// record. `None`: there is no such task.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn look(
        &mut self,
        queue: &str,
        task_id: &str,
        told: Option<&Shape>,
        records_sql: &str,
        each: impl FnMut(&str, &Value, &Said),
    ) -> Result<Option<Looked>> {
        self.begin().await?;
        let looked = self.look_in(queue, task_id, told, records_sql, each).await?;
        self.end().await?;
        Ok(looked)
    }

    async fn look_in(
        &mut self,
        queue: &str,
        task_id: &str,
        told: Option<&Shape>,
        records_sql: &str,
        mut each: impl FnMut(&str, &Value, &Said),
    ) -> Result<Option<Looked>> {
        let Some((task, listed)) = self.task(queue, task_id).await? else { return Ok(None) };
        let shape = match told {
            Some(shape @ Shape::Declared(_)) => Some(shape.clone()),
            told => shape_of(self, &task, &listed).await?.or_else(|| told.cloned()),
        };
        let declared = match &shape {
            Some(Shape::Declared(declared)) => Some(&**declared),
            Some(Shape::AgentLoop | Shape::NewMessages | Shape::MessageLog) | None => None,
        };
        let opening = Opening::of(&task.params, declared);
        let hidden = listed.iter().filter(|one| !one.counts(task.attempt)).cloned().collect();
        let mut looked = Looked {
            task,
            opening,
            shape: shape.clone(),
            messages: 0,
            said: Vec::new(),
            others: Vec::new(),
            hidden,
            left_out: BTreeSet::new(),
            why: None,
        };
        let Some(shape) = shape else {
            looked.others = listed.into_iter().filter(|one| one.counts(looked.task.attempt)).collect();
            looked.why = Some("its checkpoints hold no messages".to_owned());
            return Ok(Some(looked));
        };
        let sorted = shape.sort(listed, looked.task.attempt);
        (looked.said, looked.others) = (sorted.said, sorted.others);
        let conversation = looked.opening.conversation.clone().unwrap_or_default();
        let mut after = None;
        for batch in batches(&looked.said) {
            let records = (records_sql, conversation.as_str());
            let read = match read_batch(self, &looked.task, &shape, batch, records, &mut after).await {
                Ok(Ok(read)) => read,
                Ok(Err(why)) => {
                    looked.why = Some(why);
                    return Ok(Some(looked));
                }
                Err(error @ Error::Corrupt { .. }) => {
                    looked.why = Some(error.to_string());
                    return Ok(Some(looked));
                }
                Err(error) => return Err(error),
            };
            for one in read {
                looked.left_out.extend(one.reading.left_out);
                for raw in &one.reading.messages {
                    match said_of(&shape, raw) {
                        Ok(said) => each(&one.listed.name, raw, &said),
                        Err(why) => {
                            looked.why = Some(format!("{}: {why}", one.listed.name));
                            return Ok(Some(looked));
                        }
                    }
                    looked.messages += 1;
                }
            }
        }
        Ok(Some(looked))
    }

    /// Reads only what a task's params say.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn look_opening(
        &mut self,
        queue: &str,
        task_id: &str,
        told: Option<&Shape>,
    ) -> Result<Option<Opening>> {
        let declared = match told {
            Some(Shape::Declared(declared)) => Some(&**declared),
            Some(Shape::AgentLoop | Shape::NewMessages | Shape::MessageLog) | None => None,
        };
        let sql = format!("select params::text from {} where task_id = $1::uuid", self.table('t', queue));
        let params: Option<String> =
            sqlx::query_scalar(AssertSqlSafe(sql)).bind(task_id).fetch_optional(&mut self.connection).await?;
        let Some(params) = params else { return Ok(None) };
        let params = serde_json::from_str(&params).map_err(|error| Error::corrupt("params", error))?;
        Ok(Some(Opening::of(&params, declared)))
    }

    /// Finds the queue of a task.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn queue_of(&mut self, task_id: &str) -> Result<Option<String>> {
        for queue in self.queues().await? {
            let sql = format!(
                "select exists (select from {} where task_id::text = $1)",
                self.table('t', &queue.name)
            );
            if sqlx::query_scalar(AssertSqlSafe(sql)).bind(task_id).fetch_one(&mut self.connection).await? {
                return Ok(Some(queue.name));
            }
        }
        Ok(None)
    }
}
