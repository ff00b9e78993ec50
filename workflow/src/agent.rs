//! What an agent is: its prompt, its model, the tools it may use and the limits it runs under.

use crate::context::ContextPolicy;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One agent of the configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Agent {
    pub name: String,
    pub system_prompt: String,
    /// `provider/model`, for example `anthropic/claude-sonnet-5`.
    pub model: String,
    /// Names of the tools it may use.
    pub tools: Vec<String>,
    pub limits: Limits,
    pub on_uncertain: OnUncertain,
    pub journal: JournalLevel,
    /// How the context of its model calls is selected.
    #[serde(default)]
    pub context: ContextPolicy,
    /// Whom it may write mail to: see [`crate::policy::may_write_to`].
    #[serde(default)]
    pub recipients: Vec<String>,
}

impl Agent {
    /// What of the agent decides how an outcome is written down.
    pub fn policy(&self) -> Policy {
        Policy { on_uncertain: self.on_uncertain, journal: self.journal }
    }
}

/// What an agent's configuration says about how an outcome is written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    pub on_uncertain: OnUncertain,
    pub journal: JournalLevel,
}

/// How the journal keeps the state's history. At either level its fold is the state after every commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JournalLevel {
    /// Each change of the state is an entry, and a checkpoint is written now and then.
    #[default]
    Full,
    /// A commit that changes the state writes a checkpoint, and its single changes are not kept.
    Checkpoint,
}

/// Bounds of a run, so that a loop ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Steps per run.
    pub steps: i64,
    /// Input and output tokens per run.
    pub tokens: i64,
    /// Claims of one step without progress before its run fails. The delays between eight of them add up to about a
    /// minute, which a short outage of a provider stays below. Claims that died count from [`Limits::DEATHS`] on.
    pub attempts: i64,
    /// Seconds that one tool call may take.
    pub tool_s: u64,
}

impl Limits {
    /// How many deaths at one step fail its run at the earliest. A process that dies takes the claims of its neighbours
    /// along, twice before the one that killed it is claimed by itself, and once more for each time that this one made
    /// some progress first: their runs must not fail for it.
    pub const DEATHS: i64 = 5;
}

impl Default for Limits {
    fn default() -> Self {
        Limits { steps: 50, tokens: 2_000_000, attempts: 8, tool_s: 60 }
    }
}

/// What happens when nobody can know whether a guarded effect took place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnUncertain {
    /// The model is told so, in words it cannot take for success or failure, and the run goes on.
    #[default]
    TellModel,
    /// The run stops for a person.
    NeedsAttention,
}

/// What becomes of a run whose question nobody answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnExpired {
    /// The question's result says that no answer came, and the model goes on.
    #[default]
    TellModel,
    /// The run is cancelled, for that reason.
    Fail,
}

/// A tool as a model is told of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolDefinition {
    pub name: String,
    pub description: String,
    /// A JSON schema of type object.
    pub parameters: Value,
    pub effect: crate::effect::Effect,
}
