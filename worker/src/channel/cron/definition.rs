//! What a schedule is made of, from a configuration, a request or a command line, and what its firings are made of.

use crate::config::{AgentError, Config, DEFAULT_AGENT, cron};
use crate::origin::{self, CannotBegin};
use crate::tool::registry::Registry;
use serde::Deserialize;
use serde_json::json;
use wakeful_store::schedule::{Definition, Schedule};
use wakeful_store::wake::NewSession;
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};
use wakeful_workflow::schedule::{MISSED_LIMIT, Missed, Overlap, Timing};

/// The most bytes of a prompt.
const PROMPT_BYTES: usize = 64 << 10;

/// A definition as somebody writes it.
#[derive(Clone, Debug, Default, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct Asked {
    /// Letters, digits, - and _, at most 64.
    #[arg(skip)]
    #[serde(default)]
    pub name: String,
    /// A cron pattern: five fields, or six with seconds before them, or @daily and its like.
    #[arg(long)]
    pub cron: String,
    /// The IANA name of the time zone that the pattern is read in.
    #[arg(long, value_name = "ZONE")]
    #[serde(default)]
    pub time_zone: Option<String>,
    /// The agent, `default` without it.
    #[arg(long, value_name = "NAME")]
    #[serde(default)]
    pub agent: Option<String>,
    /// The conversation that its sessions stand in, `schedule-NAME` without it.
    #[arg(long, value_name = "ID")]
    #[serde(default)]
    pub conversation_id: Option<String>,
    /// What the agent is told at each tick.
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,
    /// An address that its replies are mailed to; may be given several times.
    #[arg(long, value_name = "ADDRESS")]
    #[serde(default)]
    pub mail_to: Vec<String>,
    /// What becomes of ticks that nobody was there for: skip, one, all.
    #[arg(long, value_name = "POLICY", value_parser = missed, default_value = "one")]
    #[serde(default)]
    pub missed: Missed,
    /// How many ticks are made good at most, with `all`.
    #[arg(long, value_name = "N")]
    #[serde(default)]
    pub missed_limit: Option<u32>,
    /// What becomes of a tick while an earlier firing is not through: skip, queue.
    #[arg(long, value_name = "POLICY", value_parser = overlap, default_value = "queue")]
    #[serde(default)]
    pub overlap: Overlap,
}

fn missed(word: &str) -> Result<Missed, &'static str> {
    Missed::parse(word).ok_or("must be skip, one or all")
}

fn overlap(word: &str) -> Result<Overlap, &'static str> {
    Overlap::parse(word).ok_or("must be skip or queue")
}

/// Reads what somebody asked for.
///
/// # Errors
/// What is wrong with it, in words.
pub(crate) fn read(asked: Asked, config: &Config) -> Result<Definition, String> {
    if !cron::is_name(&asked.name) {
        return Err(format!("`name` {}", cron::NAME_RULE));
    }
    let time_zone = asked.time_zone.unwrap_or_else(|| cron::DEFAULT_ZONE.to_owned());
    Timing::parse(&asked.cron, &time_zone).map_err(|error| error.to_string())?;
    let agent = asked.agent.unwrap_or_else(|| DEFAULT_AGENT.to_owned());
    match config.agent(&agent) {
        // Which model it has is for whoever runs it: the command line may know less than they do.
        Ok(_) | Err(AgentError::NoModel { .. }) => {}
        Err(error @ AgentError::Unknown { .. }) => return Err(error.to_string()),
    }
    if asked.prompt.trim().is_empty() || asked.prompt.len() > PROMPT_BYTES || asked.prompt.contains('\0') {
        return Err(format!("`prompt` has 1 to {PROMPT_BYTES} bytes and no NUL character"));
    }
    if let Some(wrong) = asked.mail_to.iter().find(|address| !cron::is_address(address)) {
        return Err(format!("`mail_to` has {wrong:?}: it must be a mail address"));
    }
    let missed_limit = asked.missed_limit.unwrap_or(cron::MISSED_LIMIT);
    if !(1..=MISSED_LIMIT).contains(&missed_limit) {
        return Err(format!("`missed_limit` must be a number from 1 to {MISSED_LIMIT}"));
    }
    let conversation = asked.conversation_id.unwrap_or_else(|| conversation_of(&asked.name));
    Ok(Definition {
        conversation_id: crate::api::stored_conversation_id(&conversation)
            .map_err(|problem| problem.to_string())?,
        name: asked.name,
        cron: asked.cron,
        time_zone,
        agent,
        prompt: asked.prompt,
        mail_to: lower(asked.mail_to),
        missed: asked.missed,
        missed_limit: i32::try_from(missed_limit).unwrap_or(i32::MAX),
        overlap: asked.overlap,
    })
}

/// The schedules of a configuration, which has read them.
pub(super) fn of_config(config: &Config) -> Vec<Definition> {
    let definitions = config.schedules.iter().map(|(name, schedule)| Definition {
        name: name.clone(),
        cron: schedule.cron.clone(),
        time_zone: schedule.time_zone.clone(),
        agent: schedule.agent.clone(),
        conversation_id: format!(
            "{}/{}",
            crate::api::DEFAULT_SPACE,
            schedule.conversation.clone().unwrap_or_else(|| conversation_of(name))
        ),
        prompt: schedule.prompt.clone(),
        mail_to: lower(schedule.mail_to.clone()),
        missed: schedule.missed,
        missed_limit: i32::try_from(schedule.missed_limit).unwrap_or(i32::MAX),
        overlap: schedule.overlap,
    });
    definitions.collect()
}

/// The session of a firing. Its replies are mailed where the schedule names addresses, and these take part in it.
///
/// # Errors
/// When this process has no such agent.
pub(crate) fn session_of(
    config: &Config,
    tools: &Registry,
    schedule: &Schedule,
) -> Result<NewSession, CannotBegin> {
    let definition = &schedule.definition;
    let new = origin::of_chat(config, tools, definition.conversation_id.clone(), Some(&definition.agent))?;
    Ok(NewSession { policy: mailing(config, &definition.mail_to, &definition.name), ..new })
}

/// The policy of a session whose replies are mailed to these addresses, if there are any: a first mail, which answers none.
pub(crate) fn mailing(config: &Config, mail_to: &[String], subject: &str) -> SessionPolicy {
    if mail_to.is_empty() {
        return SessionPolicy::default();
    }
    let to = json!({
        "from": config.email.from,
        "to": mail_to,
        "cc": [],
        "subject": subject,
        "in_reply_to": null,
        "references": [],
        "reply_to": null,
    });
    SessionPolicy {
        reply: Some(ReplyRoute { channel: "email".to_owned(), to, split_at: None }),
        participants: mail_to.to_vec(),
        ..SessionPolicy::default()
    }
}

fn conversation_of(name: &str) -> String {
    format!("schedule-{name}")
}

fn lower(addresses: Vec<String>) -> Vec<String> {
    addresses.into_iter().map(|address| address.to_lowercase()).collect()
}
