//! Agents, with their defaults filled in.

use crate::{AgentError, AgentSettings, Config, DEFAULT_AGENT, DEFAULT_PROMPT, DEFAULT_TOOLS};
use std::collections::BTreeSet;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::policy::PARTICIPANTS;

impl Config {
    /// The agent `name`, with its defaults filled in.
    ///
    /// If no agent is configured, there is one, [`DEFAULT_AGENT`]. An agent without a model gets one of the
    /// provider that has a key, Anthropic first, then [`Config::fallback_model`].
    ///
    /// # Errors
    /// [`AgentError`]: the agent is unknown, or no model can be found for it.
    pub fn agent(&self, name: &str) -> Result<Agent, AgentError> {
        let settings = match self.agents.get(name) {
            Some(settings) => settings.clone(),
            None if self.agents.is_empty() && name == DEFAULT_AGENT => AgentSettings::default(),
            None => {
                let known = self.agent_names().into_iter().collect::<Vec<_>>().join(", ");
                return Err(AgentError::Unknown { name: name.to_owned(), known });
            }
        };
        let model = settings
            .model
            .or_else(|| self.model_of_keys())
            .ok_or_else(|| AgentError::NoModel { name: name.to_owned() })?;
        let default_tools = || DEFAULT_TOOLS.map(str::to_owned).to_vec();
        Ok(Agent {
            name: name.to_owned(),
            system_prompt: settings.system_prompt.unwrap_or_else(|| DEFAULT_PROMPT.to_owned()),
            model,
            fallback: settings.fallback,
            tools: settings.tools.unwrap_or_else(default_tools),
            limits: settings.limits,
            on_uncertain: settings.on_uncertain,
            on_empty_reply: settings.on_empty_reply,
            journal: settings.journal,
            context: settings.context,
            recipients: settings.recipients.unwrap_or_else(|| vec![PARTICIPANTS.to_owned()]),
            web: settings.web,
        })
    }

    /// Whether several users may write in one conversation of this agent.
    pub fn is_shared(&self, agent: &str) -> bool {
        self.agents.get(agent).is_some_and(|agent| agent.shared)
    }

    /// Whether several users may write in one conversation, if that is the same for all agents.
    pub fn shared_by_all(&self) -> Option<bool> {
        let mut agents = self.agents.values().map(|agent| agent.shared);
        let first = agents.next().unwrap_or(false);
        agents.all(|shared| shared == first).then_some(first)
    }

    /// The names that [`Config::agent`] accepts.
    pub fn agent_names(&self) -> BTreeSet<String> {
        if self.agents.is_empty() {
            BTreeSet::from([DEFAULT_AGENT.to_owned()])
        } else {
            self.agents.keys().cloned().collect()
        }
    }
}
