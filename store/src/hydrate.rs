//! Hydration: reads a session from the database in one round trip.
//!
//! One statement is one snapshot. So `wake_seq` is never newer than the inbox and the ledger that are read
//! with it, and the transcript ends where the row says. Each message is a row of its own, whose stored text is
//! parsed once.
//!
//! A message that arrives after a run's cancel was requested waits for the next run. Its inbox row has the
//! outcome `new_run`, and hydration leaves it out while the cancelled run is open.

mod stored;

use crate::encryption::Seal;
use crate::{Error, Result, Store};
use futures::{Stream, TryStreamExt};
use serde::de::DeserializeOwned;
use serde_json::Value;
use stored::Stored;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::generation::{InterruptedCall, Purpose};
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::{Attachment, Content, Details, Outlined, Record, Role};
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::{Call, CallStatus, InboxMessage, Run, Session, SessionStatus, Totals};
use wakeful_workflow::state::State;
use wakeful_workflow::workspace::Snapshot;

/// Queries `$before`, then one JSON object of everything that can change while a worker has the session `s`, then
/// `$after`.
macro_rules! query_changing {
    (($($before:tt)+), ($($after:tt)+), $session_id:expr) => {
        sqlx::query!(
            $($before)+
                + r#"json_build_object(
                'wake_seq', s.wake_seq, 'last_event_seq', s.last_event_seq, 'cancel_requested', s.cancel_requested,
                'cancel_reason', case when s.cancel_requested then s.cancel_reason end,
                'state', s.state, 'rebase', s.rebase, 'compaction_failures', s.compaction_failures,
                'workspace', (select e.payload from session_events e
                    where e.session_id = s.session_id and e.type = 'WORKSPACE_SNAPSHOT'
                    order by e.seq desc limit 1),
                'inbox', (select json_agg(json_build_object('id', i.inbox_id, 'text', i.content,
                        'attachments', coalesce(i.attachments, '[]')) order by i.inbox_id)
                    from session_inbox i
                    where i.session_id = s.session_id and i.status = 'pending' and i.outcome <> 'new_run'),
                'calls', (select json_agg(json_build_object('id', c.call_id, 'effect', c.effect, 'status', c.status,
                        'outcome', c.outcome) order by c.message_number, c.call_id collate "C")
                    from tool_calls c
                    where c.session_id = s.session_id and c.result_message_number is null),
                'generations', (select json_agg(json_build_object('generation_id', g.generation_id,
                        'attempt', g.attempt, 'model', g.model, 'request_sha256', g.request_sha256,
                        'base_sha256', g.base_sha256, 'started_at', g.started_at, 'repairs', g.repairs,
                        'resumes', g.resumes, 'resumable', g.resumable, 'purpose', g.purpose,
                        'context_strategy', g.context_strategy,
                        'last_chunk', (select coalesce(max(k.chunk_no), -1) from generation_chunks k
                            where k.session_id = g.session_id and k.generation_id = g.generation_id))
                        order by g.attempt, g.started_at)
                    from generations g where g.session_id = s.session_id))"#
                + $($after)+,
            $session_id
        )
    };
}

/// The rows of a session: the first one is the session's own, every other one a message. `$content` is the column of the
/// contents, and what each is read into.
macro_rules! rows {
    ($store:expr, $content:tt, $session_id:expr) => {
        query_changing!(
            (r#"select 0 as "message_number!", json_build_object(
                'session_id', s.session_id, 'conversation_id', s.conversation_id,
                'parent_session_id', s.parent_session_id, 'space_id', s.space_id, 'mailbox_id', s.mailbox_id,
                'trigger_type', s.trigger_type, 'agent', s.agent, 'policy', s.policy,
                'prefix_sha256', s.prefix_sha256, 'status', s.status, 'data_key', s.data_key,
                'base_message_number', s.base_message_number, 'last_message_number', s.last_message_number,
                'to_message_number', s.to_message_number, 'last_step_number', s.last_step_number,
                'totals', json_build_object('turns', s.total_turns, 'usage', json_build_object(
                    'input_tokens', s.total_input_tokens, 'output_tokens', s.total_output_tokens,
                    'cached_tokens', s.total_cached_tokens, 'cache_write_tokens', s.total_cache_write_tokens,
                    'cost_micros', s.total_cost_micros)),
                'run', case when r.run_id is not null then json_build_object(
                    'run_id', r.run_id, 'steps', r.steps, 'tokens', r.input_tokens + r.output_tokens) end,
                'seeds', (select json_agg(json_build_object('role', m.role, 'content', m.content, 'is_new', m.is_new)
                        order by m.ordinal)
                    from session_seed_messages m where m.session_id = s.session_id)
            )::text as fixed, "#),
            (r#"::text as changing, p.bytes as prefix,
                null as "run_id?", null::bigint as "step_number?", null as "role?",
                "#
                + $content
                + r#", null::boolean as "internal?",
                null::json as "details?: Stored<Details>"
            from conversation_sessions s
            left join session_runs r on r.session_id = s.session_id and r.status = 'running'
            left join blobs p on p.sha256 = s.prefix_sha256 and p.space_id = s.space_id
            where s.session_id = $1
            union all
            select m.message_number, null, null, null, m.run_id, m.step_number, m.role, m.content, m.internal, m.details
            from conversation_records m
            where m.session_id = $1
                and m.message_number <= (select s.last_message_number from conversation_sessions s where s.session_id = $1)"#),
            $session_id
        )
        .fetch(&$store.pool)
        .map_ok(|row| Row {
            message_number: row.message_number,
            session: row.fixed.zip(row.changing),
            prefix: row.prefix,
            run_id: row.run_id,
            step_number: row.step_number,
            role: row.role,
            content: row.content,
            internal: row.internal,
            details: row.details,
        })
    };
}

impl Store {
    /// Rebuilds the session: row, seeds, transcript, state, totals, open calls, inbox, interrupted model
    /// calls. The result equals the copy in memory of the worker that committed last.
    ///
    /// The first row is the session's, with an object for each of its parts that stay small. Every other row
    /// is a message, whose JSON is parsed while the server sends the next ones.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn hydrate(&self, session_id: &str) -> Result<Session> {
        self.knows_key(session_id).await?;
        self.read(session_id, rows!(self, r#"null::json as "content?: Stored<Content>""#, session_id)).await
    }

    /// Rebuilds the session to weigh its context, and for nothing else: its messages have no blocks, but the
    /// [`Outline`](wakeful_workflow::record::Outline) of what they say. Of a long session that is read in half the time.
    ///
    /// # Errors
    /// Like [`Store::hydrate`].
    pub async fn hydrate_outlined(&self, session_id: &str) -> Result<Session> {
        self.knows_key(session_id).await?;
        self.read(session_id, rows!(self, r#"null::json as "content?: Stored<Outlined>""#, session_id)).await
    }

    /// Asks the key store before a connection is taken, not while one waits.
    async fn knows_key(&self, session_id: &str) -> Result<()> {
        if self.vault.is_open() {
            self.seal_of(session_id).await?;
        }
        Ok(())
    }

    async fn read<C: DeserializeOwned + Into<Content>>(
        &self,
        session_id: &str,
        rows: impl Stream<Item = sqlx::Result<Row<C>>>,
    ) -> Result<Session> {
        let mut rows = std::pin::pin!(rows);
        let (mut head, mut records, mut sealed) = (None, Vec::new(), Vec::new());
        while let Some(row) = rows.try_next().await.map_err(unreadable)? {
            if let Some((fixed, changing)) = row.session {
                head = Some((self.head(session_id, fixed, changing).await?, row.prefix));
                continue;
            }
            let (Some(run_id), Some(step_number), Some(role), Some(content), Some(internal), Some(details)) =
                (row.run_id, row.step_number, row.role, row.content, row.internal, row.details)
            else {
                return Err(Error::corrupt(
                    "messages",
                    format!("message {} is not whole", row.message_number),
                ));
            };
            let record = |content, details| {
                Ok::<_, Error>(Record {
                    message_number: row.message_number,
                    run_id: run_id.into(),
                    step_number,
                    role: Role::parse(&role).ok_or_else(|| Error::corrupt("messages", &role))?,
                    content,
                    internal,
                    details,
                })
            };
            match (content, details) {
                (Stored::Read(content), Stored::Read(details)) => {
                    records.push(record(content.into(), details)?);
                }
                (content, details) => {
                    sealed.push((record(Content::default(), Details::default())?, content, details));
                }
            }
        }
        let ((fixed, changing, seal), prefix) =
            head.ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
        for (record, content, details) in sealed {
            records.push(Record {
                content: content.open("messages", &seal)?.into(),
                details: details.open("messages", &seal)?,
                ..record
            });
        }
        // They come in order out of the index, which the statement does not promise.
        records.sort_by_key(|record| record.message_number);
        fixed.session(changing, prefix, records)
    }

    /// Reads the parts that are not messages, opens them, and learns which key the session has.
    async fn head(
        &self,
        session_id: &str,
        fixed: String,
        changing: String,
    ) -> Result<(Fixed, Changing, Seal)> {
        let read: Fixed = from_text("session", &fixed)?;
        self.vault.learn(session_id, read.data_key.as_deref());
        let seal = self.vault.seal(read.data_key.as_deref()).await?;
        if !seal.is_on() {
            return Ok((read, from_text("session", &changing)?, seal));
        }
        let (fixed, changing) = (seal.open_json(fixed)?, seal.open_json(changing)?);
        Ok((from_text("session", &fixed)?, from_text("session", &changing)?, seal))
    }

    /// Updates a worker's copy after `wake_seq` changed or a model call was interrupted. Reads inbox, ledger,
    /// model calls in flight, the cancel flag, and the state, which an operator may have rebuilt.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn refresh(&self, session: &mut Session) -> Result<()> {
        let seal = self.seal_of(session.session_id.as_str()).await?;
        let row = query_changing!(
            ("select "),
            (r#"::text as "changing!" from conversation_sessions s where s.session_id = $1"#),
            session.session_id.as_str()
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session.session_id.to_string() })?;
        let changing: Changing = from_text("session", &seal.open_json(row.changing)?)?;
        changing.update(session)
    }
}

/// A message whose JSON cannot be read makes the session corrupt. Every other error is the database's.
fn unreadable(error: sqlx::Error) -> Error {
    match error {
        sqlx::Error::ColumnDecode { source, .. } => Error::corrupt("messages", source),
        other => other.into(),
    }
}

/// The session's own row, or one of its messages.
struct Row<C> {
    message_number: i64,
    /// What is fixed, and what can change.
    session: Option<(String, String)>,
    prefix: Option<Vec<u8>>,
    run_id: Option<String>,
    step_number: Option<i64>,
    role: Option<String>,
    content: Option<Stored<C>>,
    internal: Option<bool>,
    details: Option<Stored<Details>>,
}

/// What does not change while a worker has the session, except by its own commits.
#[derive(serde::Deserialize)]
struct Fixed {
    session_id: String,
    conversation_id: String,
    parent_session_id: Option<String>,
    space_id: String,
    mailbox_id: String,
    trigger_type: String,
    agent: String,
    policy: Option<Value>,
    prefix_sha256: Option<String>,
    data_key: Option<String>,
    status: String,
    base_message_number: i64,
    last_message_number: i64,
    to_message_number: i64,
    last_step_number: i64,
    totals: Totals,
    run: Option<RunRow>,
    seeds: Option<Vec<Seed>>,
}

#[derive(serde::Deserialize)]
struct RunRow {
    run_id: String,
    steps: i64,
    tokens: i64,
}

/// What can change while a worker has the session.
#[derive(serde::Deserialize)]
struct Changing {
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

impl Fixed {
    fn session(self, changing: Changing, prefix: Option<Vec<u8>>, records: Vec<Record>) -> Result<Session> {
        let policy = match self.policy {
            Some(policy) => {
                serde_json::from_value(policy).map_err(|error| Error::corrupt("policy", error))?
            }
            None => SessionPolicy::default(),
        };
        let prefix = match (&self.prefix_sha256, &prefix) {
            (Some(sha256), Some(bytes)) => {
                Some(Prefix::read(sha256, bytes).map_err(|error| Error::corrupt("pinned prefix", error))?)
            }
            (Some(sha256), None) => {
                return Err(Error::corrupt("pinned prefix", format!("there is no blob {sha256}")));
            }
            (None, _) => None,
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
            seeds: self.seeds.unwrap_or_default(),
            records,
            calls: Vec::new(),
            inbox: Vec::new(),
            interrupted: Vec::new(),
        };
        changing.update(&mut session)?;
        Ok(session)
    }
}

impl Changing {
    fn update(self, session: &mut Session) -> Result<()> {
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
struct GenerationRow {
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
struct CallRow {
    id: String,
    effect: String,
    status: String,
    outcome: Option<wakeful_workflow::session::CallOutcome>,
}

#[derive(serde::Deserialize)]
struct InboxRow {
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

pub(crate) fn from_text<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::corrupt(what, error))
}

pub(crate) fn from_bytes<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::corrupt(what, error))
}
