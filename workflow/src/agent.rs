//! An agent: its prompt, its model, the tools it may use and its limits.
#![deny(missing_docs)]

use crate::policy::WebPolicy;
use crate::strategy::ContextPolicy;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use std::ops::Deref;
use std::sync::Arc;

/// One agent of the configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Agent {
    /// The agent's name in the configuration.
    pub name: String,
    /// The system prompt of its new sessions.
    pub system_prompt: String,
    /// `provider/model`, for example `anthropic/claude-sonnet-5`.
    pub model: String,
    /// The models that are called, the first of them that can be, while the provider of `model` fails.
    #[serde(default)]
    pub fallback: Vec<String>,
    /// Names of the tools that the agent may use.
    pub tools: Vec<String>,
    /// Those of them whose calls run only after a person approved them.
    #[serde(default)]
    pub approve: Vec<String>,
    /// Limits of each of its runs.
    pub limits: Limits,
    /// What happens when a guarded effect is uncertain.
    pub on_uncertain: OnUncertain,
    /// What follows a reply without text and calls.
    #[serde(default)]
    pub on_empty_reply: OnEmptyReply,
    /// How the journal records changes of the state.
    pub journal: JournalLevel,
    /// How the context of its model calls is selected.
    #[serde(default)]
    pub context: ContextPolicy,
    /// Addresses that the agent may write mail to: see [`crate::policy::may_write_to`].
    #[serde(default)]
    pub recipients: Vec<String>,
    /// Which hosts its tools may contact. A session's own rules only take away from it.
    #[serde(default)]
    pub web: WebPolicy,
}

impl Agent {
    /// The settings that [`crate::advance::advance`] needs.
    pub fn policy(&self) -> AgentPolicy {
        AgentPolicy {
            on_uncertain: self.on_uncertain,
            journal: self.journal,
            on_empty_reply: self.on_empty_reply,
        }
    }
}

/// Settings of an agent that decide how an outcome is committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgentPolicy {
    /// As in [`Agent`].
    pub on_uncertain: OnUncertain,
    /// As in [`Agent`].
    pub journal: JournalLevel,
    /// As in [`Agent`].
    pub on_empty_reply: OnEmptyReply,
}

/// How the journal records changes of the state. At both levels, folding the journal gives the state after
/// every commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JournalLevel {
    /// Each change of the state is an entry. A checkpoint follows every few steps.
    #[default]
    Full,
    /// A commit that changes the state writes one checkpoint and no entries for the single changes.
    Checkpoint,
}

/// Limits of a run, so that a model in a loop stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Steps of a run since its last complete reply without a call. (A run goes on after such a reply if people wrote meanwhile.)
    pub steps: i64,
    /// Input and output tokens of those steps.
    pub tokens: i64,
    /// Claims of one step without progress before its run fails. Faults that are an outage of the provider do not
    /// count, and neither do claims whose process died: [`Limits::DEATHS`] of those fail the run.
    pub attempts: i64,
    /// Milliseconds that a provider's outage may hold up one step before its run fails.
    #[serde(default = "Limits::default_outage_ms")]
    pub outage_ms: u64,
    /// Seconds that one tool call may take.
    pub tool_s: u64,
}

impl Limits {
    /// How many times a process must die while it holds a step before the step's run fails. A process that
    /// dies takes down all the steps it holds, harmless ones too. A harmless step can die with a bad one
    /// twice before the bad step is claimed alone, and once more each time the bad step made some progress
    /// first. This limit keeps the runs of harmless steps from failing.
    pub const DEATHS: i64 = 5;

    fn default_outage_ms() -> u64 {
        Limits::default().outage_ms
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits { steps: 50, tokens: 2_000_000, attempts: 8, outage_ms: 6 * 3_600_000, tool_s: 60 }
    }
}

/// What happens when a guarded effect is uncertain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnUncertain {
    /// The model gets a result that says neither success nor failure. The run continues.
    #[default]
    TellModel,
    /// The run stops with status `needs_attention` until an operator decides.
    NeedsAttention,
}

/// What follows a reply of the model that has neither text nor a tool call, perhaps only reasoning. The same request
/// would most likely get the same reply, so it is not repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnEmptyReply {
    /// The model is asked once more, in other words. If that reply is empty too, the run ends: as failed if a person waits for a
    /// reply, and the agent has sent no mail since their message.
    #[default]
    AskAgain,
    /// The run ends, and nothing is sent.
    Accept,
}

/// What happens to a run when its question expires without an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnExpired {
    /// The question's result says that no answer came, and the model goes on.
    #[default]
    TellModel,
    /// The run is cancelled, with the missing answer as its reason.
    Fail,
}

/// A tool as described to the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct ToolDefinition {
    /// The name that the model calls. Unique in a process.
    pub name: String,
    /// Tells the model what the tool does and when to use it.
    pub description: String,
    /// A JSON schema of type object. Arguments that do not fit it never reach the tool.
    pub parameters: Value,
    /// Decides what happens to a call that a crash interrupts.
    pub effect: crate::effect::Effect,
}

impl ToolDefinition {
    /// Creates a definition. `parameters` is a JSON schema of type object.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        parameters: Value,
        effect: crate::effect::Effect,
    ) -> ToolDefinition {
        ToolDefinition { name: name.into(), description: description.into(), parameters, effect }
    }
}

/// The tools of a session, sorted by name. Copies share them, because the context of each model call has all of them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "Vec<ToolDefinition>")]
pub struct Tools(Arc<Vec<ToolDefinition>>);

impl Deref for Tools {
    type Target = [ToolDefinition];

    fn deref(&self) -> &[ToolDefinition] {
        &self.0
    }
}

impl From<Vec<ToolDefinition>> for Tools {
    fn from(tools: Vec<ToolDefinition>) -> Tools {
        Tools(Arc::new(tools))
    }
}

impl FromIterator<ToolDefinition> for Tools {
    fn from_iter<I: IntoIterator<Item = ToolDefinition>>(tools: I) -> Tools {
        tools.into_iter().collect::<Vec<_>>().into()
    }
}

impl<'a> IntoIterator for &'a Tools {
    type Item = &'a ToolDefinition;
    type IntoIter = std::slice::Iter<'a, ToolDefinition>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl PartialEq for Tools {
    fn eq(&self, other: &Tools) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl Serialize for Tools {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self[..].serialize(serializer)
    }
}
