//! Compares an imported session with the checkpoints of its task.

use super::import::{origin_of, read_batch, shape_of};
use super::known::ImportRow;
use super::source::{Source, batches};
use crate::{Error, Result, Store};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use wakeful_workflow::absurd::compare::{self, Canonical, Difference};
use wakeful_workflow::absurd::opening::Opening;
use wakeful_workflow::absurd::rows::{Builder, Fate, Ids};
use wakeful_workflow::absurd::shape::Shape;

/// One session against its task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub task_id: String,
    pub session_id: String,
    pub result: Compared,
}

/// How a comparison ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compared {
    Equal {
        messages: usize,
    },
    Differs {
        differences: Vec<Difference>,
    },
    /// Absurd has cleaned the task up, so there is nothing to compare with.
    Gone,
}

impl Store {
    /// Compares what the session hydrates to with what the checkpoints hold: the messages by count, order, content and the ids
    /// of their calls; the ledger's ids; the state. What was said here after the import is left out.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`], [`Error::NotFound`] for a session that was erased.
    pub async fn absurd_compare(
        &self,
        source: &mut Source,
        import: &ImportRow,
        shape: Option<&Shape>,
        records_sql: &str,
    ) -> Result<Comparison> {
        let result = self.compared(source, import, shape, records_sql).await?;
        source.end().await?;
        Ok(Comparison { task_id: import.task_id.clone(), session_id: import.session_id.clone(), result })
    }

    async fn compared(
        &self,
        source: &mut Source,
        import: &ImportRow,
        told: Option<&Shape>,
        records_sql: &str,
    ) -> Result<Compared> {
        let queue = import.source.split_once(':').map_or("", |(_, queue)| queue);
        source.begin().await?;
        let Some((task, listed)) = source.task(queue, &import.task_id).await? else {
            return Ok(Compared::Gone);
        };
        let shape = match (told, Shape::built_in(&import.shape)) {
            (Some(shape), _) if shape.as_str() == import.shape => Some(shape.clone()),
            (_, Some(shape)) => Some(shape),
            (_, None) => shape_of(source, &task, &listed).await?,
        };
        let Some(shape) = shape else {
            return Err(Error::corrupt("shape", format!("{:?} is not declared any more", import.shape)));
        };
        let sorted = shape.sort(listed, task.attempt);
        let declared = match &shape {
            Shape::Declared(declared) => Some(&**declared),
            Shape::AgentLoop | Shape::NewMessages | Shape::MessageLog => None,
        };
        let opening = Opening::of(&task.params, declared);
        let conversation = opening.conversation.clone().unwrap_or_default();
        // The same rows are made again, only for the state and the ids of the ledger.
        let mut builder = Builder::new(Ids::of("", "", "", 0), 0, &task);
        let (mut theirs, mut after) = (Vec::new(), None);
        for batch in batches(&sorted.said) {
            let records = (records_sql, conversation.as_str());
            let read = read_batch(source, &task, &shape, batch, records, &mut after).await?;
            for one in read.map_err(|why| Error::corrupt("checkpoint", why))? {
                for raw in &one.reading.messages {
                    let canonical = compare::in_absurd(&shape, &one.listed.name, raw);
                    theirs.push(canonical.map_err(|why| Error::corrupt("checkpoint", why))?);
                }
                builder
                    .add(&shape, &one.listed, one.reading)
                    .map_err(|why| Error::corrupt("checkpoint", why))?;
            }
        }
        if sorted.said.is_empty() {
            builder.prompt(&opening.prompt, &task.enqueued_at);
        }
        for batch in batches(&sorted.others) {
            let states = source.states(queue, &import.task_id, batch).await?;
            for (listed, state) in batch.iter().zip(states) {
                builder.other(&listed.name, state);
            }
        }
        let built = builder.finish(&task, &Fate::of(&task));
        let (ours, state) = self.canonical_of(&import.session_id).await?;
        let mut differences = compare::messages(&theirs, &ours);
        let ids = |ids: Vec<String>| json!(ids);
        let mut expected: Vec<String> = built.calls.iter().map(|call| call.call_id.clone()).collect();
        let mut present = self.ledger_ids(&import.session_id).await?;
        expected.sort();
        present.sort();
        differences.extend(compare::value("ledger", &ids(expected), &ids(present)));
        differences.extend(compare::value("state", &Value::Object(built.state), &state));
        Ok(match differences.is_empty() {
            true => Compared::Equal { messages: theirs.len() },
            false => Compared::Differs { differences },
        })
    }

    /// The session's messages that come from checkpoints, as a hydration has them, and its state at the import.
    async fn canonical_of(&self, session_id: &str) -> Result<(Vec<Canonical>, Value)> {
        let session = self.hydrate(session_id).await?;
        let origins = sqlx::query!(
            r#"select message_number, details::text as "details!" from conversation_records
            where session_id = $1 and details::jsonb ? 'absurd'"#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let mut by_number = BTreeMap::new();
        for row in origins {
            let details: Value =
                serde_json::from_str(&row.details).map_err(|error| Error::corrupt("details", error))?;
            by_number.insert(row.message_number, origin_of(&details));
        }
        let ours = session.records.iter().filter_map(|record| {
            let origin = by_number.get(&record.message_number)?;
            // The prompt of the params is in no checkpoint.
            if origin["form"] == "params" {
                return None;
            }
            Some(compare::here(record.message_number, record.role, &record.content, origin))
        });
        let ours = ours.collect();
        // Later steps may have changed the state here, so it is that of the import: the journal's first checkpoint.
        let state = sqlx::query_scalar!(
            "select b.bytes from session_events e join blobs b on b.sha256 = e.payload ->> 'state_sha256'
            where e.session_id = $1 and e.type = 'checkpoint'
            order by e.seq limit 1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?;
        let at_import = match state {
            Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| Error::corrupt("state", error))?,
            None => Value::Null,
        };
        let unmoved = sqlx::query_scalar!(
            r#"select exists (select from absurd_imports i join conversation_sessions s on s.session_id = i.session_id
                where i.session_id = $1 and s.last_event_seq = i.event_seq) as "unmoved!""#,
            session_id
        )
        .fetch_one(&self.pool)
        .await?;
        Ok((ours, if unmoved { Value::Object(session.state) } else { at_import }))
    }

    /// Ids of the calls in the ledger that came with the import.
    async fn ledger_ids(&self, session_id: &str) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select t.call_id from tool_calls t
            join conversation_records r on r.session_id = t.session_id and r.message_number = t.message_number
            where t.session_id = $1 and r.details::jsonb ? 'absurd'",
            session_id
        )
        .fetch_all(&self.pool)
        .await?)
    }
}
