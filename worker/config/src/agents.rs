//! Agents, with their defaults filled in.

use crate::read::Section;
use crate::{AgentError, AgentSettings, Config, DEFAULT_AGENT, DEFAULT_PROMPT, DEFAULT_TOOLS};
use std::collections::BTreeSet;
use wakeful_workflow::agent::Agent;
use wakeful_workflow::id::DEFAULT_SPACE;
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
            approve: settings.approve,
            limits: settings.limits,
            on_uncertain: settings.on_uncertain,
            on_empty_reply: settings.on_empty_reply,
            journal: settings.journal,
            context: settings.context,
            recipients: settings.recipients.unwrap_or_else(|| vec![PARTICIPANTS.to_owned()]),
            web: settings.web,
        })
    }

    /// The agent `name`, for a session of `space`.
    ///
    /// # Errors
    /// [`AgentError`]. An agent of other spaces only is as unknown as one that is not configured.
    pub fn agent_in(&self, space: &str, name: &str) -> Result<Agent, AgentError> {
        let is_named = self.agents.contains_key(name) || self.agents.is_empty() && name == DEFAULT_AGENT;
        if is_named && self.serves(name, space) {
            return self.agent(name);
        }
        let known = self.agent_names_in(space).into_iter().collect::<Vec<_>>().join(", ");
        Err(AgentError::Unknown { name: name.to_owned(), known })
    }

    /// The names that [`Config::agent_in`] accepts.
    pub fn agent_names_in(&self, space: &str) -> BTreeSet<String> {
        self.agent_names().into_iter().filter(|name| self.serves(name, space)).collect()
    }

    fn serves(&self, name: &str, space: &str) -> bool {
        let spaces = self.agents.get(name).and_then(|agent| agent.spaces.as_ref());
        spaces.is_none_or(|spaces| spaces.iter().any(|one| one == space))
    }

    /// The agents that a worker with this configuration can run, and the spaces of those that are limited to some.
    pub fn served_agents(&self) -> Vec<(String, Option<Vec<String>>)> {
        let names = self.agent_names().into_iter().filter(|name| self.agent(name).is_ok());
        names
            .map(|name| (name.clone(), self.agents.get(&name).and_then(|agent| agent.spaces.clone())))
            .collect()
    }

    /// A space in which the agent may be used.
    pub fn space_of_agent(&self, name: &str) -> &str {
        let spaces = self.agents.get(name).and_then(|agent| agent.spaces.as_ref());
        spaces.and_then(|spaces| spaces.first()).map_or(DEFAULT_SPACE, String::as_str)
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

/// The tools of `[agents.NAME] approve`. A tool that the agent does not have is a problem: the name may be misspelt, and
/// then calls would run that somebody meant to hold.
pub(super) fn approve(section: &mut Section<'_>, tools: Option<&[String]>) -> Vec<String> {
    let (origin, given) = (section.origin("approve"), section.origin("tools").is_some());
    let names = section.list("approve").unwrap_or_default();
    let has = |name: &String| match tools {
        Some(tools) => tools.contains(name),
        // `tools` that are no list have their own line.
        None => given || DEFAULT_TOOLS.contains(&name.as_str()),
    };
    for wrong in names.iter().filter(|name| !has(name)) {
        if let Some(origin) = origin.clone() {
            let key = section.full("approve");
            section.problem(origin, format!("{key} has {wrong:?}, which is none of the agent's tools"));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::parse;

    #[test]
    fn a_tool_that_the_agent_does_not_have_cannot_be_held() {
        let text = "[agents.till]\ntools = [\"charge\"]\napprove = [\"charge\", \"refund\"]\n\
                    [agents.desk]\napprove = [\"write_file\", \"charge\"]";
        let refused = parse(text, &[]).expect_err("should be refused");
        assert_eq!(
            refused.lines().collect::<Vec<_>>(),
            [
                r#"etc/wakeful.toml:3: agents.till.approve has "refund", which is none of the agent's tools"#,
                r#"etc/wakeful.toml:5: agents.desk.approve has "charge", which is none of the agent's tools"#,
            ]
        );
        let text = "[agents.till]\nmodel = \"scripted/x\"\ntools = [\"charge\"]\napprove = [\"charge\"]";
        let config = parse(text, &[]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.agent("till").expect("it is configured").approve, ["charge"]);
    }

    #[test]
    fn an_agent_of_other_spaces_is_as_unknown_as_one_that_is_not_configured() {
        let of = |spaces: Option<&[&str]>| AgentSettings {
            model: Some("scripted/x".to_owned()),
            spaces: spaces.map(|spaces| spaces.iter().map(|one| (*one).to_owned()).collect()),
            ..AgentSettings::default()
        };
        let agents =
            [("everyones", of(None)), ("acmes", of(Some(&["acme", "bolt"]))), ("bolts", of(Some(&["bolt"])))];
        let config = Config {
            agents: agents.into_iter().map(|(name, agent)| (name.to_owned(), agent)).collect(),
            ..Config::load(None, std::iter::empty()).expect("no configuration is one")
        };
        assert!(config.agent_in("acme", "acmes").is_ok() && config.agent_in("bolt", "acmes").is_ok());
        assert!(config.agent_in("anywhere", "everyones").is_ok());
        let refused = |name: &str| config.agent_in("acme", name).unwrap_err().to_string();
        assert_eq!(refused("bolts"), refused("missing").replace("missing", "bolts"));
        assert!(!refused("missing").contains("has: bolts") && !refused("missing").contains(", bolts"));
        assert_eq!([config.space_of_agent("bolts"), config.space_of_agent("everyones")], ["bolt", "default"]);
    }
}
