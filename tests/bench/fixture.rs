//! Databases and sessions to measure.

use anyhow::{Context, Result};
use apalis_core::backend::Backend;
use apalis_core::worker::context::WorkerContext;
use serde_json::json;
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_store::Store;
use wakeful_store::queue::{Holdings, Job, Kind, News, Queue, Settings};
use wakeful_store::step::{Commit, Performance};
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::advance::{Next, Performed, StepResult, Transition, advance};
use wakeful_workflow::agent::AgentPolicy;
use wakeful_workflow::derive::StateUpdate;
use wakeful_workflow::event::Event;
use wakeful_workflow::generation::Purpose;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::record::{Block, Details, FinishReason, Record, Role, ToolCall, ToolResult, Usage};
use wakeful_workflow::session::Session;

/// The roles of a deployed database.
const ROLES: &str = include_str!("../../deploy/roles.sql");

/// Bytes of a message's text and of a session's state.
pub const MESSAGE_BYTES: usize = 2048;
pub const STATE_BYTES: usize = 1024;

/// What every message says; with the JSON around it, [`MESSAGE_BYTES`].
pub static TEXT: LazyLock<String> = LazyLock::new(|| text(MESSAGE_BYTES - 140));

pub const USAGE: Usage = Usage {
    input_tokens: 4210,
    output_tokens: 512,
    cached_tokens: 4096,
    cache_write_tokens: 0,
    cost_micros: 1290,
};

/// A database of its own. [`Database::remove`] removes it, and the end of the server does.
pub struct Database {
    pub url: String,
    name: String,
    admin_url: String,
}

impl Database {
    pub async fn create(admin_url: &str, purpose: &str) -> Result<Database> {
        let database = Database::bare(admin_url, purpose).await?;
        let store = database.store(2).await?;
        store.migrate(|_| {}).await?;
        store.close().await;
        Ok(database)
    }

    /// A database that stays until the server ends, with a name that no other has. To remove one deletes hundreds of files, and for a
    /// minute after that ext4 looks long for each new file's place: a worker spent a third of its CPU there while it made a file for
    /// each session.
    pub async fn lasting(admin_url: &str, purpose: &str) -> Result<Database> {
        Database::create(admin_url, &Database::another(purpose)).await
    }

    /// As [`Database::lasting`], without any table.
    pub async fn lasting_bare(admin_url: &str, purpose: &str) -> Result<Database> {
        Database::bare(admin_url, &Database::another(purpose)).await
    }

    fn another(purpose: &str) -> String {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        format!("{purpose}_{}", NUMBER.fetch_add(1, Ordering::Relaxed))
    }

    /// A database without any table.
    pub async fn bare(admin_url: &str, purpose: &str) -> Result<Database> {
        let name = format!("wakeful_bench_{purpose}");
        let mut url = reqwest::Url::parse(admin_url).context("the database's URL")?;
        url.set_path(&name);
        let database = Database { url: url.to_string(), name, admin_url: admin_url.to_owned() };
        database.remove().await?;
        let mut admin = PgConnection::connect(admin_url).await?;
        let create = format!("create database {} template template0", database.name);
        sqlx::query(AssertSqlSafe(create)).execute(&mut admin).await?;
        Ok(database)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub async fn store(&self, connections: u32) -> Result<Store> {
        Ok(Store::connect(&self.url, connections, "wakeful bench").await?)
    }

    /// The same in the role that `serve` has in production, which row-level security binds.
    pub async fn store_as_runtime(&self, connections: u32) -> Result<Store> {
        Ok(Store::connect(&self.runtime_url().await?, connections, "wakeful bench").await?)
    }

    /// The same in a role with the same rights, which row-level security does not bind.
    pub async fn store_as_exempt(&self, connections: u32) -> Result<Store> {
        const EXEMPT: &str = "wakeful_bench_exempt";
        let mut url = reqwest::Url::parse(&self.runtime_url().await?)?;
        url.set_username(EXEMPT).ok().context("the URL has a user")?;
        let mut owner = self.connect().await?;
        let exists = "select exists(select from pg_roles where rolname = $1)";
        if !sqlx::query_scalar::<_, bool>(exists).bind(EXEMPT).fetch_one(&mut owner).await? {
            let create = format!("create role {EXEMPT} login bypassrls in role wakeful_runtime");
            sqlx::query(AssertSqlSafe(create)).execute(&mut owner).await?;
        }
        owner.close().await?;
        Ok(Store::connect(url.as_str(), connections, "wakeful bench").await?)
    }

    /// The URL of that role, which this makes.
    pub async fn runtime_url(&self) -> Result<String> {
        let mut owner = self.connect().await?;
        sqlx::raw_sql(ROLES).execute(&mut owner).await?;
        owner.close().await?;
        let mut url = reqwest::Url::parse(&self.url).context("the database's URL")?;
        url.set_username("wakeful_runtime").ok().context("the URL has a user")?;
        Ok(url.into())
    }

    /// A connection for queries, and for work that no worker does.
    pub async fn connect(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.url).await?)
    }

    /// What processes tell of sessions: a step began or was committed, a run ended. So nothing is polled while something is measured.
    pub async fn news(&self) -> Result<PgListener> {
        let mut news = PgListener::connect(&self.url).await?;
        news.listen("wakeful_sessions").await?;
        Ok(news)
    }

    pub async fn remove(&self) -> Result<()> {
        let mut admin = PgConnection::connect(&self.admin_url).await?;
        let remove = format!("drop database if exists {} with (force)", self.name);
        sqlx::query(AssertSqlSafe(remove)).execute(&mut admin).await?;
        Ok(())
    }
}

/// A queue whose jobs the bench claims one by one.
pub struct Claims {
    queue: Queue,
    context: WorkerContext,
    draining: CancellationToken,
}

impl Claims {
    pub fn start(store: &Store, concurrency: usize) -> Claims {
        let settings = Settings {
            kind: Kind::Step,
            runner: "".into(),
            concurrency,
            lease: Duration::from_secs(3600),
            poll: Duration::from_millis(20),
            agents: [].into(),
        };
        let draining = CancellationToken::new();
        let news = News::listen(store, draining.clone());
        let holdings = Arc::new(Holdings::default());
        let queue = Queue::start(store.clone(), settings, "bench".into(), holdings, &news, draining.clone());
        Claims { queue, context: WorkerContext::new("bench"), draining }
    }

    /// The next job. Dropping it frees its slot.
    pub async fn next(&mut self) -> Result<Job> {
        let task = poll_fn(|cx| self.queue.poll_next(cx, &self.context)).await;
        Ok(task.context("the queue ended")??.args)
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.draining.cancel();
    }
}

/// A session that the bench holds like a worker.
pub struct Held {
    pub job: Job,
    pub session: Session,
}

const PERFORMANCE: Performance<'static> = Performance { elapsed_s: 0.5, attempt: 1, intent: None };

impl Held {
    /// Commits, and updates the copy as the step job does.
    pub async fn commit(&mut self, store: &Store, transition: &Transition) -> Result<()> {
        let commit = store.commit(&self.job.lease, &self.session, transition, PERFORMANCE).await?;
        anyhow::ensure!(matches!(commit, Commit::Continued { .. }), "the commit was {commit:?}");
        self.session.apply(transition);
        Ok(())
    }
}

/// Sessions with a kilobyte of state, woken, claimed, hydrated and running.
/// `first` is the number of the first: each number is a session.
pub async fn hold_sessions(store: &Store, first: usize, count: usize) -> Result<Vec<Held>> {
    for number in first..first + count {
        let new = NewSession {
            space_id: "bench".into(),
            mailbox_id: "chat".into(),
            conversation_id: format!("bench/{number}"),
            trigger_type: "chat".into(),
            trigger_id: number.to_string(),
            continues: Continues::Trigger,
            agent: "assistant".into(),
            model_id: "scripted/bench".into(),
            model_context_window: 200_000,
            tools: Vec::new(),
            policy: SessionPolicy::default(),
            repository_id: None,
            speaker: None,
            only_agent: false,
            seeds: Vec::new(),
        };
        let message = NewMessage {
            client_key: None,
            text: text(200),
            sender: None,
            trace_context: None,
            attachments: Vec::new(),
        };
        store.wake(&new, &message).await?;
    }
    let mut claims = Claims::start(store, count);
    let mut held = Vec::new();
    for _ in 0..count {
        let job = claims.next().await?;
        let session = store.hydrate(job.session_id.as_deref().context("a step job")?).await?;
        let mut one = Held { job, session };
        let begin = advance(&one.session, Performed::Begun, AgentPolicy::default());
        one.commit(store, &begin).await?;
        let mut fill = Transition { events: Vec::new(), ..begin };
        fill.state_updates = (0..STATE_BYTES / 100).map(state_update).collect();
        one.commit(store, &fill).await?;
        held.push(one);
    }
    Ok(held)
}

/// Text like English, so that it compresses as messages do. Always the same.
pub fn text(bytes: usize) -> String {
    const WORDS: [&str; 24] = [
        "the",
        "order",
        "was",
        "shipped",
        "to",
        "Hamburg",
        "on",
        "Tuesday",
        "and",
        "customer",
        "asked",
        "whether",
        "invoice",
        "could",
        "be",
        "corrected",
        "because",
        "address",
        "changed",
        "please",
        "confirm",
        "warehouse",
        "delivery",
        "number",
    ];
    let (mut text, mut seed) = (String::new(), 88_172_645_463_325_252_u64);
    while text.len() < bytes {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        text.push_str(WORDS[(seed % WORDS.len() as u64) as usize]);
        text.push(' ');
        if seed % 11 == 0 {
            text.push_str(&(seed % 100_000).to_string());
            text.push(' ');
        }
    }
    text.truncate(bytes);
    text
}

pub fn state_update(number: usize) -> StateUpdate {
    StateUpdate {
        key: format!("file/notes-{number:02}.txt"),
        value: json!({ "bytes": 2048 + number, "sha256": "5d41402abc4b2a76b9719d911017c5925d41402abc4b2a76b9719d91" }),
    }
}

/// One step as one commit: an assistant's message and a tool's result of 2 KB each, one small change of the state,
/// three journal entries, the step's cached result.
pub fn step(session: &Session) -> Transition {
    let idle = advance(session, Performed::Begun, AgentPolicy::default());
    let (step_number, first) = (idle.step_number, session.last_message_number + 1);
    let call_id = format!("call_{step_number}");
    let generation = format!("gen_0193e8d7c4e07c3fa1b2c3d4{step_number:08}");
    let record = |number, role, content, details| Record {
        message_number: number,
        run_id: idle.run_id.clone(),
        step_number,
        role,
        content: Vec::into(content),
        internal: false,
        details,
    };
    let details =
        Details { usage: Some(USAGE), finish_reason: Some(FinishReason::ToolCalls), ..Details::default() };
    Transition {
        records: vec![
            record(first, Role::Assistant, assistant_content(&call_id), details),
            record(first + 1, Role::Tool, vec![tool_result(&call_id)], Details::default()),
        ],
        events: vec![
            Event::LlmCalled {
                generation_id: generation.as_str().into(),
                model: "scripted/bench".into(),
                attempt: 1,
                request_sha256: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855".into(),
                context_strategy: "full".into(),
                prompt_tokens: Some(USAGE.input_tokens),
                repairs: 0,
                prefill_bytes: None,
                started_at: Some("2026-01-01T00:00:00.000000+00:00".into()),
                purpose: Purpose::Reply,
            },
            Event::GenStart { generation_id: generation.as_str().into(), stream: true },
            Event::GenComplete {
                generation_id: generation.as_str().into(),
                message_number: first,
                reason: "tool_calls".into(),
            },
        ],
        state_updates: vec![state_update(step_number as usize % 10)],
        step: Some(StepResult {
            from_message_number: session.to_message_number,
            to_message_number: first + 1,
            finish_reason: FinishReason::ToolCalls,
            usage: USAGE,
            executed_local_tool_count: 1,
        }),
        next: Next::NextStep,
        ..idle
    }
}

pub fn tool_call(call_id: &str) -> ToolCall {
    ToolCall {
        call_id: call_id.into(),
        name: "write_file".into(),
        arguments: json!({ "path": "notes-01.txt" }),
        malformed: None,
    }
}

pub fn assistant_content(call_id: &str) -> Vec<Block> {
    vec![Block::Text { text: TEXT.clone() }, Block::ToolCall(tool_call(call_id))]
}

fn tool_result(call_id: &str) -> Block {
    Block::ToolResult(ToolResult {
        call_id: call_id.into(),
        name: "write_file".into(),
        content: TEXT.clone(),
        is_error: false,
        details: None,
        output: None,
    })
}
