//! Wakeful's worker: it acts. A library to build a worker of one's own on, and the binary `wakeful`.
//!
//! ```no_run
//! use wakeful::App;
//! use wakeful::tool::{Tool, ToolCallContext, ToolError, ToolOutput};
//! use wakeful::workflow::{agent::ToolDefinition, effect::Effect};
//!
//! struct Weather;
//!
//! #[async_trait::async_trait]
//! impl Tool for Weather {
//!     fn definition(&self) -> ToolDefinition {
//!         ToolDefinition {
//!             name: "weather".into(),
//!             description: "The weather in a city.".into(),
//!             parameters: serde_json::json!({
//!                 "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]
//!             }),
//!             effect: Effect::Pure,
//!         }
//!     }
//!
//!     async fn call(&self, _: &ToolCallContext, args: serde_json::Value) -> Result<ToolOutput, ToolError> {
//!         Ok(ToolOutput::text(format!("Sunny in {}", args["city"])))
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     App::new().tool(Weather).main()
//! }
//! ```
//!
//! | to see | read |
//! |---|---|
//! | one step, hop by hop | [`jobs::step`] |
//! | the only door to models and tools | [`perform`] |
//! | how a message comes in and a session is shown | [`api`], [`origin`] |
//! | how much comes in at once | [`ingest`] |
//! | how a trigger is sent by hand | [`client`] |
//! | how a program starts a session, and goes on with it | [`runner`] |
//! | how a session is run again beside its log | [`replay`] |
//! | how a message goes out | [`jobs::deliver`], [`channel`] |
//! | what ends code that never yields | [`watchdog`] |
//! | which tools, models and channels there are, and how one is added | [`tool`], [`model`], [`channel`], [`app`] |
//! | what is configured, and what of it is wrong | [`config`] |
//! | how the process runs, is operated and is seen from outside | [`serve`], [`cli`], [`dev`], [`telemetry`] |

pub mod api;
pub mod app;
pub mod channel;
pub mod cli;
pub mod client;
pub mod config;
pub mod dev;
pub mod ingest;
pub mod jobs;
pub mod model;
pub mod origin;
pub mod perform;
pub mod replay;
pub mod runner;
pub mod serve;
pub mod telemetry;
pub mod tool;
pub mod watchdog;

pub use app::App;
pub use wakeful_store as store;
pub use wakeful_workflow as workflow;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_store::Store;
use wakeful_store::queue::{News, Notifier, heard};
use wakeful_workflow::agent::{Agent, JournalLevel, Limits, OnUncertain, ToolDefinition};
use wakeful_workflow::context::ContextPolicy;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::session::Session;

/// What every part of a process shares.
pub struct Ctx {
    pub store: Store,
    pub config: config::Config,
    pub tools: tool::registry::Registry,
    pub models: model::Models,
    pub channels: BTreeMap<String, Arc<dyn channel::Channel>>,
    pub notifier: Notifier,
    pub news: News,
    /// How much may come in at once.
    pub intake: ingest::Intake,
    /// The cache of chats from before there were sessions, where one is configured.
    pub legacy: Option<channel::chat::legacy::Cache>,
    pub watchdog: watchdog::Watchdog,
    /// What the replays that run here are held beside.
    pub recordings: replay::Recordings,
    /// Unique among processes, at most 32 bytes.
    pub worker_id: Arc<str>,
    pub host: String,
    /// Below it each session has a folder.
    pub workspaces: PathBuf,
    /// No new work is begun, and `/readyz` says so.
    pub draining: CancellationToken,
    /// The drain's time is up: what still runs is given back.
    pub abort: CancellationToken,
}

impl Ctx {
    /// The tools that `agent` may use, as its model is told of them.
    ///
    /// # Errors
    /// [`Fault::NotConfigured`] when this process has no tool of that name.
    pub fn tools_of(&self, agent: &Agent) -> Result<Vec<ToolDefinition>, Fault> {
        self.tools
            .definitions(&agent.tools)
            .map_err(|error| Fault::NotConfigured { message: format!("agent {:?}: {error}", agent.name) })
    }

    /// The tools that the configuration gives `session`: none where what its model is told of is pinned.
    ///
    /// # Errors
    /// Those of [`Ctx::tools_of`].
    pub fn configured_tools(&self, session: &Session, agent: &Agent) -> Result<Vec<ToolDefinition>, Fault> {
        if session.prefix.is_some() { Ok(Vec::new()) } else { self.tools_of(agent) }
    }

    /// The agent of `session`, with what the session's own policy puts above its configuration.
    ///
    /// # Errors
    /// When the configuration has no such agent.
    pub fn agent_of(&self, session: &Session) -> Result<Agent, config::AgentError> {
        let configured = match (self.config.agent(&session.agent), &session.policy.model) {
            // A replay brings its model and its tools along: where it runs, nobody may know the agent.
            (Err(_), Some(model)) if session.policy.replay.is_some() => Agent {
                name: session.agent.clone(),
                system_prompt: String::new(),
                model: model.clone(),
                tools: Vec::new(),
                limits: Limits::default(),
                on_uncertain: OnUncertain::default(),
                journal: JournalLevel::default(),
                context: ContextPolicy::default(),
                recipients: Vec::new(),
            },
            (configured, _) => configured?,
        };
        let mut agent = session.policy.of(configured);
        if wakeful_workflow::replay::has_recorded_answers(session) {
            // Its recording bounds it: a run of the source that ended at a limit goes on in its next one.
            (agent.limits.steps, agent.limits.tokens) = (i64::MAX, i64::MAX);
        }
        Ok(agent)
    }

    /// What the tool may do to the world, as its code says today: a definition that a session keeps may be older.
    pub fn effect_of(&self, told: &ToolDefinition) -> Effect {
        self.tools.definition(&told.name).map_or(told.effect, |now| now.effect)
    }

    /// The folder of one session, made or not.
    pub fn workspace_of(&self, session_id: &SessionId) -> PathBuf {
        self.workspaces.join(session_id.as_str())
    }

    /// Waits until the session's run is asked to end. Told by notification, and looks every two seconds as well.
    async fn cancelled(&self, session_id: &str) {
        let mut news = self.news.sessions();
        loop {
            tokio::select! {
                () = heard(&mut news, session_id) => {}
                () = tokio::time::sleep(Duration::from_secs(2)) => {}
            }
            // Every chunk of the session's own model call is news as well: they are looked at together.
            tokio::time::sleep(Duration::from_millis(200)).await;
            // A database that is away has nothing to say; the step's own commit will notice.
            if self.store.cancel_requested(session_id).await.unwrap_or(false) {
                return;
            }
        }
    }
}
