//! The context of a process: everything that its jobs, its API and its channels share.

use crate::channel::Channel;
use crate::identity::Identity;
use crate::ingest::Intake;
use crate::model::Models;
use crate::replay::Recordings;
use crate::tool::registry::Registry;
use crate::watchdog::Watchdog;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_config::{AgentError, Config};
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
    pub config: Config,
    pub plugins: Plugins,
    pub bus: Bus,
    /// How much may come in at once.
    pub intake: Intake,
    pub watchdog: Watchdog,
    /// What the replays that run here are held beside.
    pub recordings: Recordings,
    pub identity: Identity,
    pub shutdown: Shutdown,
}

/// The tools, models and channels of this process: the built-in ones and those that the program registered.
pub struct Plugins {
    pub tools: Registry,
    pub models: Models,
    /// By name.
    pub channels: BTreeMap<String, Arc<dyn Channel>>,
}

/// Notifications between processes, through the database.
pub struct Bus {
    pub notifier: Notifier,
    pub news: News,
}

/// The two signals that end a process.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
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
        self.plugins
            .tools
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
    pub fn agent_of(&self, session: &Session) -> Result<Agent, AgentError> {
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
        self.plugins.tools.definition(&told.name).map_or(told.effect, |now| now.effect)
    }

    /// The folder of one session, made or not.
    pub fn workspace_of(&self, session_id: &SessionId) -> PathBuf {
        self.config.workspace.folder().join(session_id.as_str())
    }

    /// Waits until the session's run is asked to end. Told by notification, and looks every two seconds as well.
    pub(crate) async fn cancelled(&self, session_id: &str) {
        let mut news = self.bus.news.sessions();
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
