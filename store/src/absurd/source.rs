//! Reads Absurd's tables, over a connection of its own that may only read.
//!
//! Queues have tables of their own, so the statements are put together here; every name in them is quoted. One task is read in
//! one snapshot: its row, its last run, and its checkpoints, first without their states and then a few states at a time.

use crate::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row};
use std::str::FromStr;
use wakeful_workflow::absurd::{Listed, Task, TaskState};

/// The beginning of `claimed_by` of a run that `take` has parked. JSON follows: what `back` restores.
pub(super) const MARKER: &str = "wakeful:";

/// Bytes of states in Absurd's tables that are read at a time. Compressed ones are larger in memory.
const AT_ONCE_BYTES: i64 = 64 << 10;

/// A database with Absurd's schema, or that of `durable`, its port to Rust.
#[derive(Debug)]
pub struct Source {
    pub(super) connection: PgConnection,
    pub(super) schema: &'static str,
    pub(super) version: String,
    pub(super) has_status: bool,
    pub(super) has_key: bool,
    /// A transaction is open. After an error it is rolled back before the next one.
    pub(super) is_open: bool,
}

/// Whether a connection may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum May {
    Read,
    /// To park tasks and to give them back.
    Park,
}

/// A queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Queue {
    pub name: String,
    pub partitioned: bool,
    /// Bytes of all its tables with their indexes, and of its checkpoints alone.
    pub bytes: i64,
    pub checkpoint_bytes: i64,
}

/// How many tasks of one name are in one state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Count {
    pub name: String,
    pub state: TaskState,
    pub tasks: i64,
    /// Parked by `take`.
    pub parked: i64,
}

/// A task in a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub task_id: String,
    pub name: String,
    pub state: TaskState,
    pub parked: bool,
    /// `None` if they are large.
    pub params: Option<Value>,
}

/// Which tasks a list has.
#[derive(Clone, Debug, Default)]
pub struct Wanted<'a> {
    /// Only these names. Empty: all.
    pub names: &'a [String],
    pub after: Option<&'a str>,
    pub limit: i64,
    /// Only tasks that `take` has parked.
    pub parked: bool,
}

/// A quoted name.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A time as a bundle has it. Null for infinity.
fn time(column: &str) -> String {
    format!(
        "case when isfinite({column}) then to_char({column} at time zone 'utc', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') end"
    )
}

fn json(row: &PgRow, column: &str) -> Result<Option<Value>> {
    let text: Option<String> = row.try_get(column)?;
    text.map(|text| serde_json::from_str(&text))
        .transpose()
        .map_err(|error| Error::corrupt("Absurd's JSON", error))
}

pub(super) fn state(row: &PgRow) -> Result<TaskState> {
    let word: String = row.try_get("state")?;
    TaskState::parse(&word).ok_or_else(|| Error::corrupt("state of a task", word))
}

impl Source {
    /// Connects to the database and looks for the schema.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::NotFound`] if it has neither schema, [`Error::Schema`] if its tables are of a version that
    /// cannot be read.
    pub async fn open(url: &str, application: &str, may: May) -> Result<Source> {
        let read_only = if may == May::Read { "on" } else { "off" };
        let options = PgConnectOptions::from_str(url)?.application_name(application);
        let mut connection = options.connect().await?;
        let set = format!(
            "select set_config('default_transaction_read_only', '{read_only}', false), set_config('statement_timeout', '10min', false),
                set_config('idle_in_transaction_session_timeout', '10min', false), set_config('TimeZone', 'UTC', false)"
        );
        sqlx::query(AssertSqlSafe(set)).execute(&mut connection).await?;
        let found: Option<String> = sqlx::query_scalar(
            "select n.nspname::text from pg_namespace n join pg_class c on c.relnamespace = n.oid and c.relname = 'queues'
            where n.nspname in ('absurd', 'durable')
            order by n.nspname limit 1",
        )
        .fetch_optional(&mut connection)
        .await?;
        let schema = match found.as_deref() {
            Some("absurd") => "absurd",
            Some("durable") => "durable",
            _ => return Err(Error::NotFound { what: "schema", id: "absurd".to_owned() }),
        };
        let mut source = Source {
            connection,
            schema,
            version: String::new(),
            has_status: true,
            has_key: true,
            is_open: false,
        };
        source.find_version().await?;
        Ok(source)
    }

    /// `absurd` or `durable`.
    pub fn schema(&self) -> &'static str {
        self.schema
    }

    /// Absurd's own word for the version: a number, or `main`.
    pub fn version(&self) -> &str {
        &self.version
    }

    pub(super) fn table(&self, kind: char, queue: &str) -> String {
        format!("{}.{}", self.schema, quoted(&format!("{kind}_{queue}")))
    }

    /// The queues, with their sizes.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn queues(&mut self) -> Result<Vec<Queue>> {
        // The tables of a partitioned queue are empty themselves: their sizes are those of the partitions.
        let sql = format!(
            "with sizes as (
                select q.queue_name, k.kind, c.relkind = 'p' as partitioned,
                    coalesce((select sum(pg_total_relation_size(p.relid)) from pg_partition_tree(c.oid) p where p.isleaf),
                        pg_total_relation_size(c.oid))::bigint as bytes
                from {0}.queues q
                cross join unnest(array['t', 'r', 'c', 'e', 'w', 'i']) as k (kind)
                join pg_class c on c.relname = k.kind || '_' || q.queue_name
                join pg_namespace n on n.oid = c.relnamespace and n.nspname = '{0}'
            )
            select queue_name, bool_or(partitioned) as partitioned, sum(bytes)::bigint as bytes,
                coalesce(sum(bytes) filter (where kind = 'c'), 0)::bigint as checkpoint_bytes
            from sizes
            group by queue_name
            having count(*) filter (where kind in ('t', 'r', 'c')) = 3
            order by queue_name",
            self.schema
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&mut self.connection).await?;
        let queue = |row: &PgRow| {
            Ok(Queue {
                name: row.try_get("queue_name")?,
                partitioned: row.try_get("partitioned")?,
                bytes: row.try_get("bytes")?,
                checkpoint_bytes: row.try_get("checkpoint_bytes")?,
            })
        };
        rows.iter().map(queue).collect()
    }

    /// Counts a queue's tasks by name and state.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn counts(&mut self, queue: &str) -> Result<Vec<Count>> {
        let sql = format!(
            "select t.task_name, t.state, count(*) as tasks,
                count(*) filter (where r.claimed_by like '{MARKER}%' and r.state = 'pending') as parked
            from {} t left join {} r on r.run_id = t.last_attempt_run
            group by t.task_name, t.state
            order by t.task_name, t.state",
            self.table('t', queue),
            self.table('r', queue)
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&mut self.connection).await?;
        let count = |row: &PgRow| {
            Ok(Count {
                name: row.try_get("task_name")?,
                state: state(row)?,
                tasks: row.try_get("tasks")?,
                parked: row.try_get("parked")?,
            })
        };
        rows.iter().map(count).collect()
    }

    /// Lists tasks in the order of their ids, which is the order in which they were spawned.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn tasks(&mut self, queue: &str, wanted: &Wanted<'_>) -> Result<Vec<Found>> {
        let sql = format!(
            "select t.task_id::text as task_id, t.task_name, t.state,
                coalesce(r.claimed_by like '{MARKER}%' and r.state = 'pending', false) as parked,
                case when pg_column_size(t.params) <= 8192 then t.params::text end as params
            from {} t left join {} r on r.run_id = t.last_attempt_run
            where ($1::uuid is null or t.task_id > $1::uuid) and (cardinality($2::text[]) = 0 or t.task_name = any ($2))
                and (not $4 or (r.claimed_by like '{MARKER}%' and r.state = 'pending'))
            order by t.task_id
            limit $3",
            self.table('t', queue),
            self.table('r', queue)
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(wanted.after)
            .bind(wanted.names)
            .bind(wanted.limit)
            .bind(wanted.parked)
            .fetch_all(&mut self.connection)
            .await?;
        let found = |row: &PgRow| {
            Ok(Found {
                task_id: row.try_get("task_id")?,
                name: row.try_get("task_name")?,
                state: state(row)?,
                parked: row.try_get("parked")?,
                params: json(row, "params")?,
            })
        };
        rows.iter().map(found).collect()
    }

    /// Begins a snapshot, in which a task is read.
    pub(crate) async fn begin(&mut self) -> Result<()> {
        self.begin_as("begin isolation level repeatable read, read only").await
    }

    pub(super) async fn begin_as(&mut self, begin: &'static str) -> Result<()> {
        if self.is_open {
            sqlx::query("rollback").execute(&mut self.connection).await?;
        }
        self.is_open = true;
        sqlx::query(begin).execute(&mut self.connection).await?;
        Ok(())
    }

    /// Ends the snapshot.
    pub(crate) async fn end(&mut self) -> Result<()> {
        if self.is_open {
            sqlx::query("commit").execute(&mut self.connection).await?;
        }
        self.is_open = false;
        Ok(())
    }

    /// The task, and its checkpoints without their states. `None`: there is no such task.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn task(&mut self, queue: &str, task_id: &str) -> Result<Option<(Task, Vec<Listed>)>> {
        let sql = format!(
            "select t.task_id::text as task_id, t.task_name, t.params::text as params, t.state,
                coalesce(r.attempt, t.attempts) as attempt, {} as enqueued_at, {} as started_at,
                {} as ended_at, r.failure_reason::text as failure, t.completed_payload::text as result,
                {} as idempotency_key, r.wake_event, r.state as run_state, r.claimed_by, {} as available_at
            from {} t left join {} r on r.run_id = t.last_attempt_run
            where t.task_id = $1::uuid",
            time("t.enqueue_at"),
            time("t.first_started_at"),
            time("coalesce(r.completed_at, r.failed_at, t.cancelled_at)"),
            if self.has_key { "t.idempotency_key" } else { "null::text" },
            time("r.available_at"),
            self.table('t', queue),
            self.table('r', queue)
        );
        let Some(row) =
            sqlx::query(AssertSqlSafe(sql)).bind(task_id).fetch_optional(&mut self.connection).await?
        else {
            return Ok(None);
        };
        let (claimed_by, run_state): (Option<String>, Option<String>) =
            (row.try_get("claimed_by")?, row.try_get("run_state")?);
        let was = claimed_by.as_deref().filter(|_| run_state.as_deref() == Some("pending")).and_then(marked);
        let sleeping = match &was {
            Some(was) => was["state"] == "sleeping",
            None => run_state.as_deref() == Some("sleeping"),
        };
        let available_at: Option<String> = match &was {
            Some(was) => was["available_at"].as_str().map(str::to_owned),
            None => row.try_get("available_at")?,
        };
        let task = Task {
            queue: queue.to_owned(),
            task_id: row.try_get("task_id")?,
            name: row.try_get("task_name")?,
            params: json(&row, "params")?.unwrap_or(Value::Null),
            state: state(&row)?,
            attempt: i64::from(row.try_get::<i32, _>("attempt")?),
            enqueued_at: row.try_get("enqueued_at")?,
            started_at: row.try_get("started_at")?,
            ended_at: row.try_get("ended_at")?,
            failure: json(&row, "failure")?,
            result: json(&row, "result")?,
            idempotency_key: row.try_get("idempotency_key")?,
            waits_for: row.try_get::<Option<String>, _>("wake_event")?.filter(|_| sleeping),
            wakes_at: available_at.filter(|_| sleeping),
            parked: was.is_some(),
        };
        let sql = format!(
            "select c.checkpoint_name, {} as status, o.attempt, {} as updated_at, (coalesce(pg_column_size(c.state), 0) + octet_length(c.checkpoint_name) + 64)::bigint as bytes
            from {} c left join {} o on o.run_id = c.owner_run_id
            where c.task_id = $1::uuid",
            if self.has_status { "c.status" } else { "'committed'" },
            time("c.updated_at"),
            self.table('c', queue),
            self.table('r', queue)
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).bind(task_id).fetch_all(&mut self.connection).await?;
        let listed = |row: &PgRow| {
            Ok(Listed {
                name: row.try_get("checkpoint_name")?,
                status: row.try_get("status")?,
                attempt: row.try_get::<Option<i32>, _>("attempt")?.map(i64::from),
                updated_at: row.try_get("updated_at")?,
                bytes: row.try_get("bytes")?,
            })
        };
        Ok(Some((task, rows.iter().map(listed).collect::<Result<_>>()?)))
    }

    /// States of checkpoints, in the order of `listed`. A few at a time: see [`batches`].
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn states(&mut self, queue: &str, task_id: &str, listed: &[Listed]) -> Result<Vec<Value>> {
        let names: Vec<&str> = listed.iter().map(|one| one.name.as_str()).collect();
        let sql = format!(
            "select c.state::text as state
            from unnest($2::text[]) with ordinality as wanted (name, place)
            join {} c on c.task_id = $1::uuid and c.checkpoint_name = wanted.name
            order by wanted.place",
            self.table('c', queue)
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(task_id)
            .bind(&names)
            .fetch_all(&mut self.connection)
            .await?;
        let states: Vec<Value> =
            rows.iter().map(|row| Ok(json(row, "state")?.unwrap_or(Value::Null))).collect::<Result<_>>()?;
        if states.len() == listed.len() {
            return Ok(states);
        }
        Err(Error::corrupt(
            "checkpoints",
            format!("{} of the task {task_id} went away", listed.len() - states.len()),
        ))
    }

    /// The last message that a slim step of an earlier task of the same conversation points at, or 0. Ids of tasks are in the
    /// order in which they were spawned.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub(super) async fn records_before(
        &mut self,
        queue: &str,
        task_id: &str,
        conversation: &str,
    ) -> Result<i64> {
        let sql = format!(
            "select coalesce(max((c.state ->> 'toMessageNumber')::numeric), 0)::bigint
            from {} t join {} c on c.task_id = t.task_id
            where t.task_id < $1::uuid
                and (t.params @> jsonb_build_object('conversationId', $2::text)
                    or t.params @> jsonb_build_object('conversation_id', $2::text))
                and jsonb_typeof(c.state -> 'toMessageNumber') = 'number'{}",
            self.table('t', queue),
            self.table('c', queue),
            if self.has_status { " and c.status = 'committed'" } else { "" }
        );
        let sql = sqlx::query_scalar(AssertSqlSafe(sql)).bind(task_id).bind(conversation);
        Ok(sql.fetch_one(&mut self.connection).await?)
    }

    /// Messages that the slim shape of a step points at. `sql` takes the conversation's id and two message numbers, and
    /// gives one column of JSON.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
    pub async fn records(
        &mut self,
        sql: &str,
        conversation: &str,
        after: i64,
        to: i64,
    ) -> Result<Vec<Value>> {
        let text = format!("select message::text from ({sql}) as found (message)");
        let texts: Vec<String> = sqlx::query_scalar(AssertSqlSafe(text))
            .bind(conversation)
            .bind(after)
            .bind(to)
            .fetch_all(&mut self.connection)
            .await?;
        let parse =
            |text: &String| serde_json::from_str(text).map_err(|error| Error::corrupt("a message", error));
        texts.iter().map(parse).collect()
    }
}

/// What `take` noted of a run: its state, its time and the task's rules of cancellation.
pub(super) fn marked(claimed_by: &str) -> Option<Value> {
    serde_json::from_str(claimed_by.strip_prefix(MARKER)?).ok()
}

/// Divides checkpoints into batches of few bytes each.
pub fn batches(listed: &[Listed]) -> Vec<&[Listed]> {
    let (mut batches, mut from, mut bytes) = (Vec::new(), 0, 0);
    for (at, one) in listed.iter().enumerate() {
        if at > from && bytes + one.bytes > AT_ONCE_BYTES {
            batches.push(&listed[from..at]);
            (from, bytes) = (at, 0);
        }
        bytes += one.bytes;
    }
    if from < listed.len() {
        batches.push(&listed[from..]);
    }
    batches
}
