//! Builds the [`NewSession`] that a trigger begins with: a configured agent, its system prompt and its tools.
#![deny(missing_docs)]

use crate::tool::registry::Registry;
use wakeful_config::{Config, DEFAULT_AGENT};
use wakeful_store::wake::{Continues, NewSession};
use wakeful_workflow::id::space_of;
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;

/// No session can be created: the agent does not exist, or it has a tool that this process lacks.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CannotBegin(String);

/// The parts of a new session that depend on its trigger.
pub struct Trigger {
    /// As in [`NewSession`].
    pub mailbox_id: String,
    /// As in [`NewSession`].
    pub trigger_type: &'static str,
    /// As in [`NewSession`].
    pub trigger_id: String,
    /// Which existing session the trigger continues.
    pub continues: Continues,
    /// The session's own rules.
    pub policy: SessionPolicy,
    /// Earlier messages of the thread. They follow the system prompt.
    pub thread: Vec<Seed>,
}

/// Returns the session that a trigger creates if it finds none to continue. `conversation_id` is the stored
/// form, `space/id`.
///
/// # Errors
/// [`CannotBegin`].
pub fn of_trigger(
    config: &Config,
    tools: &Registry,
    conversation_id: String,
    agent: Option<&str>,
    trigger: Trigger,
) -> Result<NewSession, CannotBegin> {
    let name = agent.unwrap_or(DEFAULT_AGENT);
    let agent = config.agent(name).map_err(|error| CannotBegin(error.to_string()))?;
    let tools = tools
        .definitions(&agent.tools)
        .map_err(|error| CannotBegin(format!("the agent {name:?} cannot be used here: {error}")))?;
    let mut seeds = vec![Seed { role: Role::System, content: agent.system_prompt, is_new: true }];
    seeds.extend(trigger.thread);
    Ok(NewSession {
        space_id: space_of(&conversation_id).to_owned(),
        mailbox_id: trigger.mailbox_id,
        conversation_id,
        trigger_type: trigger.trigger_type.to_owned(),
        trigger_id: trigger.trigger_id,
        continues: trigger.continues,
        agent: agent.name,
        model_context_window: i32::try_from(config.context_window(&agent.model)).unwrap_or(i32::MAX),
        model_id: agent.model,
        tools,
        policy: trigger.policy,
        repository_id: None,
        speaker: None,
        only_agent: false,
        seeds,
    })
}

/// Returns the session that a chat creates if its conversation has none yet. `conversation_id` is the stored
/// form, `space/id`.
///
/// # Errors
/// [`CannotBegin`].
pub fn of_chat(
    config: &Config,
    tools: &Registry,
    conversation_id: String,
    agent: Option<&str>,
) -> Result<NewSession, CannotBegin> {
    let trigger_id =
        conversation_id.split_once('/').map_or(conversation_id.as_str(), |(_, id)| id).to_owned();
    let trigger = Trigger {
        mailbox_id: "default".to_owned(),
        trigger_type: "chat",
        trigger_id,
        continues: Continues::Conversation,
        policy: SessionPolicy::default(),
        thread: Vec::new(),
    };
    of_trigger(config, tools, conversation_id, agent, trigger)
}

/// Returns the session that a messenger's conversation creates if it has none yet. The session has no mail
/// participants, so its agent may write mail only to recipients that the configuration names.
///
/// # Errors
/// [`CannotBegin`].
pub fn of_message(
    config: &Config,
    tools: &Registry,
    conversation_id: String,
    agent: Option<&str>,
    reply: Option<ReplyRoute>,
) -> Result<NewSession, CannotBegin> {
    let new = of_chat(config, tools, conversation_id, agent)?;
    let policy = SessionPolicy { reply, ..new.policy };
    Ok(NewSession { trigger_type: "message".to_owned(), policy, ..new })
}
