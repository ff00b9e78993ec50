//! Writes the rows of one session that was a task, in the caller's transaction.

use super::import::{Import, Imported, Read, read_batch};
use super::source::{Source, batches};
use crate::import::write::Writer;
use crate::run::{self, Wakes};
use crate::{Error, Result};
use serde_json::json;
use sqlx::PgConnection;
use wakeful_workflow::absurd::opening::Opening;
use wakeful_workflow::absurd::rows::{Builder, Built, Fate, Ids, said_of, seed_rows, seeds};
use wakeful_workflow::absurd::shape::{Shape, Sorted};
use wakeful_workflow::absurd::{TRIGGER_PREFIX, Task};
use wakeful_workflow::access::is_of_a_trigger;
use wakeful_workflow::blob::Blob;
use wakeful_workflow::bundle::{Line, RecordRow, SessionRow};
use wakeful_workflow::event::Event;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::Role;
use wakeful_workflow::session::SessionStatus;

/// The session while it is written.
pub(super) struct Writing<'a> {
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
    pub(super) async fn begin(
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
        if !is_new && let Some(why) = not_absurds(tx, &new.conversation_id).await? {
            let id = crate::session::shown(&new.conversation_id);
            return Ok(Err(format!(
                "its conversation {id} {why}: a task may go on only in what came from Absurd"
            )));
        }
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

    pub(super) async fn records(
        &mut self,
        tx: &mut PgConnection,
        source: &mut Source,
        sorted: &Sorted,
    ) -> Result<std::result::Result<(), String>> {
        let conversation = self.opening.conversation.clone().unwrap_or_default();
        let mut after = None;
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

    pub(super) async fn end(
        mut self,
        tx: &mut PgConnection,
        checkpoints: usize,
        bytes: i64,
    ) -> Result<Imported> {
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
        crate::search::enter(tx, &self.ids.session_id, &self.import.new.space_id).await?;
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
            let reason = match status {
                SessionStatus::Cancelled => Some("cancelled in Absurd".to_owned()),
                _ => self.fate.error.clone(),
            };
            events.push(transition("running", status, reason));
            events.push(Event::invocation_result(status, self.fate.error.as_deref()));
        }
        let blob = Blob::of_state(&built.state);
        sqlx::query!(
            "insert into blobs (space_id, sha256, size, media_type, bytes)
            values ($3, $1, length($2::bytea), 'application/json', $2)
            -- An erasure that looks for it at this moment leaves it.
            on conflict (sha256, space_id) do update set touched_at = now()",
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
        run::append_events(tx, &self.ids.session_id, Some(&built.run.run_id), None, Wakes::Nothing, &events)
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

/// Why a task may not write into a conversation that was there before: a task's own parameters name it, and the one who spawned it
/// might name a conversation of others.
async fn not_absurds(tx: &mut PgConnection, conversation_id: &str) -> Result<Option<&'static str>> {
    let row = sqlx::query!(
        r#"select user_id is not null as "has_user!",
            exists (
                select from conversation_sessions s
                where s.conversation_id = c.conversation_id and not starts_with(s.trigger_type, $2)
            ) as "has_others!"
        from conversation_counters c
        where conversation_id = $1"#,
        conversation_id,
        TRIGGER_PREFIX
    )
    .fetch_one(tx)
    .await?;
    let id = conversation_id.split_once('/').map_or(conversation_id, |(_, id)| id);
    Ok(if row.has_user {
        Some("belongs to a user")
    } else if is_of_a_trigger(id) {
        Some("belongs to a trigger")
    } else if row.has_others {
        Some("has sessions that did not come from Absurd")
    } else {
        None
    })
}
