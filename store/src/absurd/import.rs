//! Writes the session of one task, in one transaction. Nothing is sent or run by it.

use super::source::{Source, batches};
use crate::import::write::Writer;
use crate::run::{self, Wakes};
use crate::wake::NewSession;
use crate::{Error, Result, Store};
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::PgConnection;
use wakeful_workflow::absurd::opening::Opening;
use wakeful_workflow::absurd::rows::{Builder, Built, Fate, Ids, said_of, seed_rows, seeds};
use wakeful_workflow::absurd::shape::{Reading, Shape, Sorted, Stays, stays};
use wakeful_workflow::absurd::{Listed, Task};
use wakeful_workflow::blob::Blob;
use wakeful_workflow::bundle::{Line, RecordRow, SessionRow};
use wakeful_workflow::event::Event;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::Role;
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

/// A task that was imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImportRow {
    pub source: String,
    pub task_id: String,
    pub time: i32,
    pub session_id: String,
    pub task_name: String,
    pub shape: String,
    pub taken: bool,
    pub phase: String,
}

/// The part of the checkpoints that a batch has read.
pub(super) struct Read {
    pub listed: Listed,
    pub reading: Reading,
}

impl Store {
    /// Which of these tasks are here.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn absurd_known(
        &self,
        space_id: &str,
        source: &str,
        task_ids: &[String],
    ) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select task_id from absurd_imports
            where space_id = $1 and source = $2 and task_id = any ($3) and phase <> 'returned'",
            space_id,
            source,
            task_ids
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Imported tasks in the order of their ids, above `after`.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn absurd_imports(
        &self,
        space_id: &str,
        after: Option<(&str, &str)>,
        limit: i64,
    ) -> Result<Vec<ImportRow>> {
        let (source, task_id) = after.unwrap_or_default();
        Ok(sqlx::query_as!(
            ImportRow,
            "select source, task_id, time, session_id, task_name, shape, taken, phase from absurd_imports
            where space_id = $1 and (source, task_id) > ($2, $3) and phase = 'here'
            order by source, task_id
            limit $4",
            space_id,
            source,
            task_id,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// How many tasks are here.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn absurd_count(&self, space_id: &str) -> Result<i64> {
        Ok(sqlx::query_scalar!(
            r#"select count(*) as "count!" from absurd_imports where space_id = $1 and phase = 'here'"#,
            space_id
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Imported tasks by chance: others for each `seed`.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn absurd_sample(&self, space_id: &str, seed: &str, limit: i64) -> Result<Vec<ImportRow>> {
        Ok(sqlx::query_as!(
            ImportRow,
            "select source, task_id, time, session_id, task_name, shape, taken, phase from absurd_imports
            where space_id = $1 and phase = 'here'
            order by md5(session_id || $2)
            limit $3",
            space_id,
            seed,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// The session of a task that was spawned under this key before it came here.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn absurd_by_key(&self, space_id: &str, source: &str, key: &str) -> Result<Option<String>> {
        Ok(sqlx::query_scalar!(
            "select session_id from absurd_imports
            where space_id = $1 and source = $2 and idempotency_key = $3 and phase <> 'returned'
            limit 1",
            space_id,
            source,
            key
        )
        .fetch_optional(&self.intake)
        .await?)
    }

    /// Imports one task, completely or not at all.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Corrupt`].
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
        let mut tx = self.pool.begin().await?;
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
/// before has pointed at.
pub(super) async fn read_batch(
    source: &mut Source,
    task: &Task,
    shape: &Shape,
    batch: &[Listed],
    records: (&str, &str),
    after: &mut i64,
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
            reading.messages = source.records(sql, conversation, *after, to).await?;
            *after = to;
        }
        read.push(Read { listed: listed.clone(), reading });
    }
    Ok(Ok(read))
}

/// The session while it is written.
struct Writing<'a> {
    import: &'a Import<'a>,
    task: &'a Task,
    shape: &'a Shape,
    fate: &'a Fate,
    opening: Opening,
    ids: Ids,
    time: i64,
    /// Last message of the conversation before this session.
    earlier: i64,
    is_new: bool,
    writer: Writer,
    builder: Option<Builder>,
    prompt_is_seed: bool,
    messages: i64,
}

impl<'a> Writing<'a> {
    async fn begin(
        tx: &mut PgConnection,
        import: &'a Import<'a>,
        task: &'a Task,
        shape: &'a Shape,
        fate: &'a Fate,
        time: i64,
    ) -> Result<std::result::Result<Writing<'a>, String>> {
        let new = import.new;
        let is_new = sqlx::query_scalar!(
            "insert into conversation_counters (conversation_id, space_id, mailbox_id) values ($1, $2, $3)
            on conflict (conversation_id) do nothing
            returning conversation_id",
            new.conversation_id,
            new.space_id,
            new.mailbox_id
        )
        .fetch_optional(&mut *tx)
        .await?
        .is_some();
        let conversation = run::lock_conversation(tx, &new.conversation_id).await?;
        if conversation.open_run_id.is_some() {
            let id = crate::session::shown(&new.conversation_id);
            return Ok(Err(format!("its conversation {id} has an open run: let that end, and import again")));
        }
        let declared = match shape {
            Shape::Declared(declared) => Some(&**declared),
            Shape::AgentLoop | Shape::NewMessages | Shape::MessageLog => None,
        };
        let ids = Ids::of(&new.space_id, import.queue, import.task_id, time);
        let origin = json!({"absurd": {"queue": import.queue, "task_id": import.task_id, "task_name": task.name,
            "state": task.state, "shape": shape.as_str()}});
        Ok(Ok(Writing {
            import,
            task,
            shape,
            fate,
            opening: Opening::of(&task.params, declared),
            writer: Writer::of_own(&ids.session_id, &new.conversation_id, &new.space_id, origin),
            ids,
            time,
            earlier: conversation.last_message_number,
            is_new,
            builder: None,
            prompt_is_seed: false,
            messages: 0,
        }))
    }

    fn agents_prompt(&self) -> &str {
        let seeds = &self.import.new.seeds;
        seeds.iter().find(|seed| seed.role == Role::System).map_or("", |seed| seed.content.as_str())
    }

    fn seeds(&self) -> Vec<wakeful_workflow::seed::Seed> {
        seeds(&self.opening, self.agents_prompt(), self.prompt_is_seed)
    }

    /// The builder. What the first message is decides whether the prompt is a seed.
    fn builder(&mut self, first: Option<Role>) -> &mut Builder {
        self.prompt_is_seed |= self.builder.is_none() && first.is_some_and(|role| role != Role::User);
        let seeds = self.seeds().len() as i64;
        // The first session of a conversation leaves the numbers of its seeds free.
        let base = if self.is_new { seeds } else { self.earlier };
        self.builder.get_or_insert_with(|| Builder::new(self.ids.clone(), base, self.task))
    }

    async fn records(
        &mut self,
        tx: &mut PgConnection,
        source: &mut Source,
        sorted: &Sorted,
    ) -> Result<std::result::Result<(), String>> {
        let conversation = self.opening.conversation.clone().unwrap_or_default();
        let mut after = 0;
        for batch in batches(&sorted.said) {
            let sql = (self.import.records_sql, conversation.as_str());
            let read = match read_batch(source, self.task, self.shape, batch, sql, &mut after).await? {
                Ok(read) => read,
                Err(why) => return Ok(Err(why)),
            };
            let mut rows = Vec::new();
            for Read { listed, reading } in read {
                let first = match reading.messages.first().map(|raw| said_of(self.shape, raw)) {
                    Some(Ok(said)) => Some(said.role),
                    Some(Err(why)) => return Ok(Err(format!("{}: {why}", listed.name))),
                    None => None,
                };
                if first.is_none() && self.builder.is_none() {
                    // A step without messages says nothing about the prompt.
                    self.builder(Some(Role::Assistant));
                }
                let shape = self.shape;
                match self.builder(first).add(shape, &listed, reading) {
                    Ok(made) => rows.extend(made),
                    Err(why) => return Ok(Err(why)),
                }
            }
            self.write(tx, rows).await?;
        }
        if self.builder.is_none() {
            let (prompt, at) = (self.opening.prompt.clone(), self.task.enqueued_at.clone());
            let row = self.builder(None).prompt(&prompt, &at);
            self.write(tx, vec![row]).await?;
        }
        for batch in batches(&sorted.others) {
            let states = source.states(&self.task.queue, &self.task.task_id, batch).await?;
            for (listed, state) in batch.iter().zip(states) {
                self.builder(None).other(&listed.name, state);
            }
        }
        Ok(Ok(()))
    }

    async fn write(&mut self, tx: &mut PgConnection, rows: Vec<RecordRow>) -> Result<()> {
        self.messages += rows.len() as i64;
        let rows: Vec<Line> = rows.into_iter().map(Line::Record).collect();
        self.writer.write(tx, rows).await
    }

    async fn end(mut self, tx: &mut PgConnection, checkpoints: usize, bytes: i64) -> Result<Imported> {
        self.builder(None);
        let Some(builder) = self.builder.take() else {
            return Err(Error::corrupt("import", "it has no builder"));
        };
        let mut built = builder.finish(self.task, self.fate);
        let seeds = self.seeds();
        let prefix = Prefix::new(&seeds, self.import.new.tools.clone());
        let prefix_sha256 = crate::create::pin(&mut *tx, &self.import.new.space_id, &prefix).await?;
        self.supersede(tx).await?;
        let row = self.session(&built, &prefix, prefix_sha256, seeds.len());
        let steps = built.last_step_number;
        let of = |rows: Vec<Line>| rows;
        self.writer.write(tx, of(vec![Line::Session(Box::new(row))])).await?;
        self.writer.write(tx, seed_rows(&seeds).into_iter().map(Line::Seed).collect()).await?;
        self.writer.write(tx, of(vec![Line::Run(built.run.clone())])).await?;
        self.writer.write(tx, std::mem::take(&mut built.steps).into_iter().map(Line::Step).collect()).await?;
        self.writer.write(tx, std::mem::take(&mut built.calls).into_iter().map(Line::Call).collect()).await?;
        sqlx::query!(
            "update session_steps set usage_unknown = true where session_id = $1 and step_number = any ($2)",
            self.ids.session_id,
            &built.unknown_usage
        )
        .execute(&mut *tx)
        .await?;
        self.journal(tx, &built, checkpoints).await?;
        self.open(tx, &built).await?;
        sqlx::query!(
            "update absurd_imports i
            set session_id = s.session_id, event_seq = s.last_event_seq, messages = $5, steps = $6, checkpoint_bytes = $7,
                record_bytes = (select coalesce(sum(pg_column_size(r.content) + pg_column_size(r.details) + 200), 0)
                        from conversation_records r where r.session_id = s.session_id)
                    + (select count(*) * 160 from session_steps p where p.session_id = s.session_id)
            from conversation_sessions s
            where i.space_id = $1 and i.source = $2 and i.task_id = $3 and i.time = $4 and s.session_id = $8",
            self.import.new.space_id,
            self.task.trigger_type(),
            self.task.task_id,
            self.time as i32,
            self.messages,
            steps,
            bytes,
            self.ids.session_id
        )
        .execute(&mut *tx)
        .await?;
        Ok(Imported {
            session_id: self.ids.session_id,
            status: self.fate.session,
            messages: self.messages,
            steps,
        })
    }

    /// A message that found the conversation's latest session must see that it is not the latest any more.
    async fn supersede(&self, tx: &mut PgConnection) -> Result<()> {
        sqlx::query!(
            "update conversation_sessions
            set superseded = true
            where session_id = (
                select session_id from conversation_sessions where conversation_id = $1 order by ordinal desc limit 1
            )",
            self.import.new.conversation_id
        )
        .execute(tx)
        .await?;
        Ok(())
    }

    fn session(&self, built: &Built, prefix: &Prefix, prefix_sha256: String, seeds: usize) -> SessionRow {
        let (new, task) = (self.import.new, self.task);
        let usage = built.totals.usage;
        // A task that was given back left a session with its own id behind.
        let trigger_id = match self.time {
            1 => task.task_id.clone(),
            time => format!("{}:{time}", task.task_id),
        };
        SessionRow {
            session_id: self.ids.session_id.clone(),
            conversation_id: new.conversation_id.clone(),
            space_id: new.space_id.clone(),
            mailbox_id: new.mailbox_id.clone(),
            trigger_type: task.trigger_type(),
            trigger_id,
            agent: new.agent.clone(),
            model_id: new.model_id.clone(),
            model_context_window: new.model_context_window,
            status: self.fate.session,
            cancel_requested: false,
            cancel_reason: None,
            error: self.fate.error.clone(),
            policy: serde_json::to_value(&new.policy).ok().and_then(|policy| policy.as_object().cloned()),
            tool_names: Some(prefix.tools.iter().map(|tool| tool.name.clone()).collect()),
            prefix_sha256: Some(prefix_sha256),
            initial_state: built.initial_state.clone(),
            state: built.state.clone(),
            seed_message_count: i32::try_from(seeds).unwrap_or(i32::MAX),
            base_message_number: built.base_message_number,
            last_message_number: built.last_message_number,
            to_message_number: built.to_message_number,
            last_step_number: built.last_step_number,
            last_event_seq: 0,
            total_turns: i32::try_from(built.totals.turns).unwrap_or(i32::MAX),
            total_input_tokens: usage.input_tokens,
            total_output_tokens: usage.output_tokens,
            total_cached_tokens: usage.cached_tokens,
            total_cache_write_tokens: usage.cache_write_tokens,
            total_cost_micros: usage.cost_micros,
            started_at: task.started_at.clone().unwrap_or_else(|| task.enqueued_at.clone()),
            completed_at: built.run.completed_at.clone(),
            repository_id: new.repository_id.clone(),
            parent_session_id: None,
            forked_from_message_id: None,
            parent_conversation_id: None,
            forked_at_message_number: None,
            base_step_number: 0,
            rebase: None,
            compaction_failures: 0,
        }
    }

    async fn journal(&self, tx: &mut PgConnection, built: &Built, checkpoints: usize) -> Result<()> {
        let task = self.task;
        let transition = |from: &str, to: SessionStatus, reason: Option<String>| Event::StateTransition {
            from_state: from.to_owned(),
            to_state: to.as_str().to_owned(),
            reason,
        };
        let mut events = vec![
            Event::SessionImported {
                source: task.trigger_type(),
                task_id: task.task_id.clone(),
                task_name: task.name.clone(),
                task_state: task.state.as_str().to_owned(),
                shape: self.shape.as_str().to_owned(),
                checkpoints: checkpoints as i64,
            },
            Event::TriggerEvent {
                trigger_type: task.trigger_type(),
                trigger_id: Some(self.opening.trigger.clone().unwrap_or_else(|| task.task_id.clone())),
            },
        ];
        let status = self.fate.session;
        events.push(transition("created", SessionStatus::Queued, None));
        if status != SessionStatus::Queued {
            events.push(transition("queued", SessionStatus::Running, Some("in Absurd".to_owned())));
            events.push(transition("running", status, self.fate.error.clone()));
            events.push(Event::invocation_result(status, self.fate.error.as_deref()));
        }
        let blob = Blob::of_state(&built.state);
        sqlx::query!(
            "insert into blobs (space_id, sha256, size, media_type, bytes)
            values ($3, $1, length($2::bytea), 'application/json', $2)
            on conflict (sha256, space_id) do nothing",
            blob.sha256,
            blob.bytes,
            self.import.new.space_id
        )
        .execute(&mut *tx)
        .await?;
        events.push(Event::Checkpoint {
            step_number: built.last_step_number,
            to_message_number: built.to_message_number,
            lifecycle_state: status.as_str().to_owned(),
            state_sha256: blob.sha256,
        });
        run::append_events(tx, &self.ids.session_id, Some(&built.run.run_id), None, Wakes::Nobody, &events)
            .await
    }

    /// The conversation's row, and the job of a task that goes on here by itself.
    async fn open(&self, tx: &mut PgConnection, built: &Built) -> Result<()> {
        let new = self.import.new;
        sqlx::query!(
            "update conversation_counters set last_message_number = $2, open_run_id = $3 where conversation_id = $1",
            new.conversation_id,
            built.last_message_number,
            self.fate.job.as_ref().map(|_| built.run.run_id.clone())
        )
        .execute(&mut *tx)
        .await?;
        let Some(at) = &self.fate.job else { return Ok(()) };
        sqlx::query!(
            "insert into jobs (kind, runner, space_id, conversation_id, session_id, step_number, run_at)
            values ('step', '', $1, $2, $3, $4, coalesce($5::text::timestamptz, clock_timestamp()))",
            new.space_id,
            new.conversation_id,
            self.ids.session_id,
            built.last_step_number + 1,
            at.as_deref() as Option<&str>
        )
        .execute(tx)
        .await?;
        Ok(())
    }
}

/// The origin of each message of a session: the part of its details that says where it comes from.
pub(super) fn origin_of(details: &Value) -> Value {
    details[wakeful_workflow::absurd::DETAILS].clone()
}
