//! The definition of a schedule, read from a configuration, a request or a command line, and the session that
//! a firing starts.

use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use wakeful_config::address::is_address;
use wakeful_config::{AgentError, Config, DEFAULT_AGENT, cron};
use wakeful_engine::new_session::{self, CannotBegin};
use wakeful_engine::tool::registry::Registry;
use wakeful_store::schedule::{Definition, Schedule};
use wakeful_store::wake::NewSession;
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};
use wakeful_workflow::schedule::{Invalid, MISSED_LIMIT, Missed, Overlap, Timing};

/// The longest prompt, in bytes.
const PROMPT_BYTES: usize = 64 << 10;

/// A definition as the user gives it, or the changes to an existing one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewSchedule")]
pub struct ScheduleInput {
    /// Letters, digits, - and _, at most 64.
    #[serde(default)]
    pub name: String,
    /// A cron pattern: five fields, or six with seconds before them, or @daily and similar words.
    #[serde(default)]
    pub cron: Option<String>,
    /// The IANA name of the time zone that the pattern is read in.
    #[serde(default)]
    pub time_zone: Option<String>,
    /// The agent; `default` if not given.
    #[serde(default)]
    pub agent: Option<String>,
    /// The conversation of its sessions; `schedule-NAME` if not given.
    #[serde(default)]
    pub conversation_id: Option<String>,
    /// What the agent is told at each tick.
    #[serde(default)]
    pub prompt: Option<String>,
    /// An address that its replies are mailed to; may be given several times. '' in an edit removes all.
    #[serde(default, deserialize_with = "addresses")]
    pub mail_to: Option<Vec<String>>,
    /// What happens to ticks that were missed while no scheduler ran: skip, one (the default), all.
    #[serde(default, deserialize_with = "missed_in_json")]
    pub missed: Option<Missed>,
    /// How many missed ticks fire at most, with `all`; 10 if not given.
    #[serde(default)]
    pub missed_limit: Option<u32>,
    /// What happens to a tick while an earlier firing still runs: skip, queue (the default).
    #[serde(default, deserialize_with = "overlap_in_json")]
    pub overlap: Option<Overlap>,
}

impl ScheduleInput {
    /// Fills in the missing fields from `before`, and keeps its name.
    pub fn over(self, before: &Definition) -> ScheduleInput {
        let conversation = before.conversation_id.split_once('/').map(|(_, id)| id.to_owned());
        ScheduleInput {
            name: before.name.clone(),
            cron: self.cron.or_else(|| Some(before.cron.clone())),
            time_zone: self.time_zone.or_else(|| Some(before.time_zone.clone())),
            agent: self.agent.or_else(|| Some(before.agent.clone())),
            conversation_id: self.conversation_id.or(conversation),
            prompt: self.prompt.or_else(|| Some(before.prompt.clone())),
            mail_to: self.mail_to.or_else(|| Some(before.mail_to.clone())),
            missed: self.missed.or(Some(before.missed)),
            missed_limit: self.missed_limit.or(Some(before.missed_limit.unsigned_abs())),
            overlap: self.overlap.or(Some(before.overlap)),
        }
    }
}

/// The words of `missed`.
pub const MISSED_RULE: &str = "must be skip, one or all";
/// The words of `overlap`.
pub const OVERLAP_RULE: &str = "must be skip or queue";

fn missed_in_json<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Missed>, D::Error> {
    given(from, "missed", MISSED_RULE, |value| Missed::parse(value.as_str()?))
}

fn overlap_in_json<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Overlap>, D::Error> {
    given(from, "overlap", OVERLAP_RULE, |value| Overlap::parse(value.as_str()?))
}

/// Reads `mail_to`, a list of texts. The caller checks that they are addresses.
pub fn addresses<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<String>>, D::Error> {
    given(from, "mail_to", "must be a list of mail addresses, such as [\"ann@example.org\"]", |value| {
        value.as_array()?.iter().map(|one| one.as_str().map(str::to_owned)).collect()
    })
}

/// Reads a field's value, `None` for null. The error names the field, its value and the rule.
fn given<'de, D: Deserializer<'de>, T>(
    from: D,
    name: &str,
    rule: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(from)?;
    if value.is_null() {
        return Ok(None);
    }
    let wrong = || D::Error::custom(format!("`{name}` is {}: it {rule}", shown(&value)));
    read(&value).map(Some).ok_or_else(wrong)
}

/// A value for an error message, cut to 60 characters.
pub fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        text
    } else {
        format!("{}…", text.chars().take(60).collect::<String>())
    }
}

/// Checks a definition of a schedule of `space`, and fills in the defaults.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn read(asked: ScheduleInput, space: &str, config: &Config) -> Result<Definition, String> {
    if !cron::is_name(&asked.name) {
        return Err(format!("`name` is {:?}: it {}", asked.name, cron::NAME_RULE));
    }
    let cron = asked.cron.ok_or("`cron` is missing: give a pattern, such as \"0 9 * * MON-FRI\"")?;
    let prompt = asked.prompt.ok_or("`prompt` is missing: say what the agent is to do at each tick")?;
    let time_zone = asked.time_zone.unwrap_or_else(|| cron::DEFAULT_ZONE.to_owned());
    Timing::parse(&cron, &time_zone).map_err(|invalid| {
        let key = match invalid {
            Invalid::Pattern { .. } | Invalid::Never { .. } => "cron",
            Invalid::Zone(_) => "time_zone",
        };
        format!("`{key}`: {invalid}")
    })?;
    let agent = asked.agent.unwrap_or_else(|| DEFAULT_AGENT.to_owned());
    match config.agent_in(space, &agent) {
        // Only the process that runs the agent must know its model; the command line's configuration may not
        // name it.
        Ok(_) | Err(AgentError::NoModel { .. } | AgentError::NoGit { .. }) => {}
        Err(error @ AgentError::Unknown { .. }) => return Err(error.to_string()),
    }
    if prompt.trim().is_empty() || prompt.len() > PROMPT_BYTES || prompt.contains('\0') {
        return Err(format!("`prompt` has 1 to {PROMPT_BYTES} bytes and no NUL character"));
    }
    let mail_to = asked.mail_to.unwrap_or_default();
    if let Some(wrong) = mail_to.iter().find(|address| !is_address(address)) {
        return Err(format!("`mail_to` has {wrong:?}: it must be a mail address"));
    }
    let missed_limit = asked.missed_limit.unwrap_or(cron::MISSED_LIMIT);
    if !(1..=MISSED_LIMIT).contains(&missed_limit) {
        return Err(format!("`missed_limit` must be a number from 1 to {MISSED_LIMIT}"));
    }
    let conversation = asked.conversation_id.unwrap_or_else(|| conversation_of(&asked.name));
    Ok(Definition {
        conversation_id: wakeful_workflow::id::conversation_id_in(space, &conversation)
            .map_err(|problem| problem.to_string())?,
        name: asked.name,
        cron,
        time_zone,
        agent,
        prompt,
        mail_to: lower(mail_to),
        missed: asked.missed.unwrap_or_default(),
        missed_limit: i32::try_from(missed_limit).unwrap_or(i32::MAX),
        overlap: asked.overlap.unwrap_or_default(),
    })
}

/// The schedules of the configuration. They were checked when it was loaded.
pub(super) fn of_config(config: &Config) -> Vec<Definition> {
    let definitions = config.schedules.iter().map(|(name, schedule)| Definition {
        name: name.clone(),
        cron: schedule.cron.clone(),
        time_zone: schedule.time_zone.clone(),
        agent: schedule.agent.clone(),
        conversation_id: format!(
            "{}/{}",
            schedule.space,
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

/// The session that a firing starts. If the schedule names addresses, replies are mailed there, and the
/// addressees are the session's participants.
///
/// # Errors
/// When this process does not know the agent.
pub fn session_of(config: &Config, tools: &Registry, schedule: &Schedule) -> Result<NewSession, CannotBegin> {
    let definition = &schedule.definition;
    let new =
        new_session::of_chat(config, tools, definition.conversation_id.clone(), Some(&definition.agent))?;
    Ok(NewSession { policy: mailing(config, &definition.mail_to, &definition.name), ..new })
}

/// A policy that mails a session's replies to these addresses, as a new mail thread. The default policy if
/// there are none.
pub fn mailing(config: &Config, mail_to: &[String], subject: &str) -> SessionPolicy {
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
    addresses.into_iter().map(|address| address.to_ascii_lowercase()).collect()
}
