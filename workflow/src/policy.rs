//! What holds for one session whatever the configuration says: written when the session is made, never changed.

use crate::agent::Agent;
use crate::id::SessionId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A session's own rules, above those of its agent. Empty for a session that an ordinary trigger made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionPolicy {
    /// `provider/model`, in place of its agent's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Names of the tools it may use, in place of its agent's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
    #[serde(skip_serializing_if = "ToolMode::is_live")]
    pub tool_mode: ToolMode,
    /// The type of trigger that it answers, where its own says only how it was made: a fork, a replay and an import reply
    /// as their source does. It is written down when they are made; an import takes the word of its bundle for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replies_as: Option<String>,
    /// Set where the session runs another one again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<Replay>,
    /// What this version has no word for. Kept as it is.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Whether a session's tool calls touch the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolMode {
    #[default]
    Live,
    /// Pure tools run. Any other says what it would have done, and nothing leaves.
    Dry,
    /// Calls are answered with what came of them in the session that is replayed.
    Recorded,
}

impl ToolMode {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            ToolMode::Live => "live",
            ToolMode::Dry => "dry",
            ToolMode::Recorded => "recorded",
        }
    }

    /// Whether effects happen.
    pub fn is_live(&self) -> bool {
        *self == ToolMode::Live
    }
}

/// The session that is run again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replay {
    pub source_session_id: SessionId,
    /// Up to here its messages were copied; what follows is run again.
    pub after_message_number: i64,
    /// The user's messages of the source are given to it as well, each in its place.
    #[serde(default)]
    pub fed: bool,
    pub answers: Answers,
}

/// Where a replay's model answers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answers {
    /// The model is called.
    Live,
    /// The source's own answers, in their places.
    Recorded,
}

impl SessionPolicy {
    /// `agent` as this session has it.
    pub fn of(&self, agent: Agent) -> Agent {
        Agent {
            model: self.model.clone().unwrap_or(agent.model),
            tools: self.tools.clone().unwrap_or(agent.tools),
            ..agent
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_ordinary_session_has_an_empty_policy_and_unknown_rules_are_kept() {
        assert_eq!(serde_json::to_value(SessionPolicy::default()).unwrap(), json!({}));
        let written = json!({"tool_mode": "dry", "web": {"allow": ["example.org"]}});
        let policy: SessionPolicy = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(policy.tool_mode, ToolMode::Dry);
        assert_eq!(serde_json::to_value(policy).unwrap(), written);
    }

    #[test]
    fn what_it_names_is_above_the_agents() {
        let agent = Agent {
            name: "a".into(),
            system_prompt: String::new(),
            model: "openai/one".into(),
            tools: vec!["x".into()],
            limits: crate::agent::Limits::default(),
            on_uncertain: crate::agent::OnUncertain::default(),
            journal: crate::agent::JournalLevel::default(),
            context: crate::context::ContextPolicy::default(),
        };
        assert_eq!(SessionPolicy::default().of(agent.clone()), agent);
        let policy = SessionPolicy {
            model: Some("openai/two".into()),
            tools: Some(Vec::new()),
            ..SessionPolicy::default()
        };
        let own = policy.of(agent);
        assert_eq!((own.model.as_str(), own.tools.len()), ("openai/two", 0));
    }
}
