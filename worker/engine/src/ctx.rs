//! The context of a process: the objects that its jobs, its API and its channels share.

use crate::cancels::Cancels;
use crate::channel::Channel;
use crate::gates::Gates;
use crate::identity::Identity;
use crate::ingest::Intake;
use crate::model::Models;
use crate::model::renderings::Renderings;
use crate::outlines::Outlines;
use crate::pauses::Pauses;
use crate::perform::{Chunks, CutCalls};
use crate::replay::Recordings;
use crate::telemetry::Metrics;
use crate::tool::registry::Registry;
use crate::warm::WarmSessions;
use crate::watchdog::Watchdog;
use crate::web::Web;
use crate::workspace::Workspaces;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use wakeful_config::{AgentError, CloneFrom, Config};
use wakeful_store::Store;
use wakeful_store::queue::{News, Notifier};
use wakeful_workflow::agent::{Agent, JournalLevel, Limits, OnEmptyReply, OnUncertain, ToolDefinition};
use wakeful_workflow::effect::Effect;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::ContextPolicy;

/// The objects that every part of a process shares.
pub struct Ctx {
    pub store: Store,
    pub config: Config,
    pub plugins: Plugins,
    pub bus: Bus,
    pub cancels: Cancels,
    /// Writes the text of model calls while they stream.
    pub chunks: Chunks,
    /// Model calls that were dropped while they ran.
    pub cut: CutCalls,
    /// Limits how many messages come in at once.
    pub intake: Intake,
    pub watchdog: Watchdog,
    /// What operators have paused.
    pub pauses: Pauses,
    /// This process's view of the providers' gates.
    pub gates: Gates,
    /// Source recordings of the replays that run in this process.
    pub recordings: Recordings,
    /// What the next requests of this process's sessions begin with.
    pub renderings: Renderings,
    /// What this process keeps of the sessions that it worked on.
    pub warm: WarmSessions,
    /// Outlines of the sessions whose contexts were looked at last.
    pub outlines: Outlines,
    pub identity: Identity,
    /// What this process measures of its work.
    pub metrics: Metrics,
    /// What tools fetch through.
    pub web: Web,
    /// The sessions' files on this host.
    pub workspaces: Workspaces,
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

/// The signals that end a process.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// Fires when the process begins no new work. `/readyz` reports that.
    pub draining: CancellationToken,
    /// Fires before `draining` when an operator asked for the drain: then it may take as long as what runs.
    pub asked: CancellationToken,
    /// Fires when a signal has asked for the process's end. Then a drain has a time limit.
    pub signalled: CancellationToken,
    /// Fires when the time for the drain is over. Jobs that still run are then dropped and given back.
    pub abort: CancellationToken,
}

impl Ctx {
    /// Returns the definitions of the tools that `agent` may use.
    ///
    /// # Errors
    /// [`Fault::NotConfigured`] when this process lacks one of these tools.
    fn tools_of(&self, agent: &Agent) -> Result<Vec<ToolDefinition>, Fault> {
        self.plugins
            .tools
            .definitions(&agent.tools)
            .map_err(|error| Fault::NotConfigured { message: format!("agent {:?}: {error}", agent.name) })
    }

    /// Returns the tools that the configuration gives to `session`. Empty for a session with a pinned prefix,
    /// which has its own definitions.
    ///
    /// # Errors
    /// [`Fault::NotConfigured`] when this process lacks one of the agent's tools.
    pub fn configured_tools(&self, session: &Session, agent: &Agent) -> Result<Vec<ToolDefinition>, Fault> {
        if session.prefix.is_some() { Ok(Vec::new()) } else { self.tools_of(agent) }
    }

    /// Returns the agent of `session` for a step of it here. A host without git lacks the agents whose files begin with a git
    /// bundle, until another host has made the first snapshot.
    ///
    /// # Errors
    /// Those of [`Ctx::agent_of`], and [`AgentError::NoGit`].
    pub fn agent_here(&self, session: &Session) -> Result<Agent, AgentError> {
        let agent = self.agent_of(session)?;
        if session.workspace.is_none() && !session.has_files() && self.lacks_git_for(&agent.name) {
            return Err(AgentError::NoGit { name: agent.name });
        }
        Ok(agent)
    }

    /// Whether the agent's files begin with a git bundle, and this host has no git.
    pub fn lacks_git_for(&self, agent: &str) -> bool {
        let from = self.config.agents.get(agent).and_then(|agent| agent.clone_from.as_ref());
        !self.workspaces.has_git() && from.is_some_and(CloneFrom::needs_git)
    }

    /// What the files of `session` begin with, if it has none yet. A rehearsal has the files of its source's transcript.
    pub fn seed_of(&self, session: &Session) -> Option<&CloneFrom> {
        let may_begin =
            session.workspace.is_none() && !session.has_files() && session.policy.tool_mode.is_live();
        let agent = self.config.agents.get(&session.agent).filter(|_| may_begin)?;
        agent.clone_from.as_ref()
    }

    /// Returns the agent of `session`: the configured one, with the overrides of the session's own policy.
    ///
    /// # Errors
    /// When the configuration has no such agent for the session's space.
    pub fn agent_of(&self, session: &Session) -> Result<Agent, AgentError> {
        let configured =
            match (self.config.agent_in(&session.space_id, &session.agent), &session.policy.model) {
                // A replay has its own model and tools, so it also runs where the configuration lacks the agent.
                (Err(_), Some(model)) if session.policy.replay.is_some() => Agent {
                    name: session.agent.clone(),
                    system_prompt: String::new(),
                    model: model.clone(),
                    fallback: Vec::new(),
                    tools: Vec::new(),
                    approve: Vec::new(),
                    limits: Limits::default(),
                    on_uncertain: OnUncertain::default(),
                    on_empty_reply: OnEmptyReply::default(),
                    journal: JournalLevel::default(),
                    context: ContextPolicy::default(),
                    recipients: Vec::new(),
                    web: wakeful_workflow::policy::WebPolicy::default(),
                },
                (configured, _) => configured?,
            };
        let mut agent = session.policy.of(configured);
        if session.policy.model.is_some() {
            // The session asks for this model and no other.
            agent.fallback.clear();
        }
        if wakeful_workflow::replay::has_recorded_replies(session) {
            // The recording bounds the replay, so the agent's limits do not apply. If a run of the source
            // ended at a limit, the source went on in its next run, and the replay must get past that limit
            // too.
            (agent.limits.steps, agent.limits.tokens) = (i64::MAX, i64::MAX);
        }
        Ok(agent)
    }

    /// Returns the tool's effect class as its code declares it now. The definition that a session pins may be
    /// older.
    pub fn effect_of(&self, told: &ToolDefinition) -> Effect {
        self.plugins.tools.definition(&told.name).map_or(told.effect, |now| now.effect)
    }

    /// Returns the path of a session's folder. The folder may not exist yet.
    pub fn workspace_of(&self, session_id: &SessionId) -> PathBuf {
        self.config.workspace.folder().join(session_id.as_str())
    }

    /// Waits until someone asks to cancel the session's run.
    pub(crate) async fn cancelled(&self, session_id: &str) {
        self.cancels.cancelled(&self.store, &self.bus.news, session_id).await;
    }
}
