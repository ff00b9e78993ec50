//! `[schedules.NAME]`: prompts that agents get at the times of a cron pattern.

use super::Config;
use super::address::is_address;
use super::problem::Origin;
use super::read::Section;
use super::routes::no_agent;
use std::collections::BTreeMap;
use wakeful_workflow::id::DEFAULT_SPACE;
use wakeful_workflow::schedule::{self, Invalid, Missed, Overlap, Timing};

/// The time zone of a schedule that names none.
pub const DEFAULT_ZONE: &str = "UTC";

/// How many missed ticks fire at most, by default.
pub const MISSED_LIMIT: u32 = 10;

/// The rule for a schedule's name, for error messages.
pub const NAME_RULE: &str =
    "has letters, digits, - and _ only, and 1 to 64 of them; it does not begin with sched_, as ids do";

/// A schedule of the configuration, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub cron: String,
    pub time_zone: String,
    pub agent: String,
    /// The space of its sessions.
    pub space: String,
    /// `None`: a conversation named after the schedule.
    pub conversation: Option<String>,
    pub prompt: String,
    /// The addresses that replies are mailed to.
    pub mail_to: Vec<String>,
    pub missed: Missed,
    pub missed_limit: u32,
    pub overlap: Overlap,
}

/// Reads all schedules. `config` has the agents.
pub(super) fn read(root: &mut Section<'_>, config: &Config) -> BTreeMap<String, Schedule> {
    let mut schedules = BTreeMap::new();
    for (name, origin, mut section) in root.sections("schedules") {
        if !is_name(&name) {
            section.problem(origin.clone(), format!("schedules.{name:?}: a schedule's name {NAME_RULE}"));
        }
        let schedule = one(&mut section, &origin, config);
        section.finish();
        schedules.insert(name, schedule);
    }
    schedules
}

fn one(section: &mut Section<'_>, origin: &Origin, config: &Config) -> Schedule {
    let at = |section: &Section<'_>, key: &str| section.origin(key).unwrap_or_else(|| origin.clone());
    let (cron_at, zone_at, agent_at) = (at(section, "cron"), at(section, "time_zone"), at(section, "agent"));
    let (has_cron, has_prompt) = (section.origin("cron").is_some(), section.origin("prompt").is_some());
    let text = |text: &str| Some(text.to_owned());
    let cron = section.text("cron", "must be a cron pattern, such as \"0 9 * * MON-FRI\"", text);
    let zone = section.text("time_zone", "must be a time zone, such as \"Europe/Berlin\"", text);
    let zone = zone.unwrap_or_else(|| DEFAULT_ZONE.to_owned());
    if let Some(cron) = &cron
        && let Err(invalid) = Timing::parse(cron, &zone)
    {
        let (origin, key) = match &invalid {
            Invalid::Pattern { .. } | Invalid::Never { .. } => (cron_at, "cron"),
            Invalid::Zone(_) => (zone_at, "time_zone"),
        };
        section.problem(origin, format!("{}: {invalid}", section.full(key)));
    }
    let prompt = section.text("prompt", "must be text, and not empty", |prompt| {
        (!prompt.trim().is_empty() && !prompt.contains('\0')).then(|| prompt.to_owned())
    });
    for (key, given) in [("cron", has_cron), ("prompt", has_prompt)] {
        if !given {
            section.problem(origin.clone(), format!("{} is missing", section.full(key)));
        }
    }
    let agent = section.text("agent", "must be the name of an agent", text);
    let agent = agent.unwrap_or_else(|| super::DEFAULT_AGENT.to_owned());
    let space = super::read::space(section).unwrap_or_else(|| DEFAULT_SPACE.to_owned());
    let agents = config.agent_names_in(&space);
    if !agents.contains(&agent) {
        let known = agents.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let text = format!(
            "{} = {agent:?}: {}; there are: {known}",
            section.full("agent"),
            no_agent(&agent, &space)
        );
        section.problem(agent_at, text);
    }
    let mail_at = at(section, "mail_to");
    let mail_to = section.list("mail_to").unwrap_or_default();
    if let Some(wrong) = mail_to.iter().find(|address| !is_address(address)) {
        section.problem(
            mail_at,
            format!("{} has {wrong:?}: it must be a mail address", section.full("mail_to")),
        );
    }
    let most = i64::from(schedule::MISSED_LIMIT);
    Schedule {
        cron: cron.unwrap_or_default(),
        time_zone: zone,
        agent,
        space,
        conversation: section.text(
            "conversation",
            "must be a conversation's id, of at most 256 bytes",
            |id| {
                (!id.is_empty() && id.len() <= 256 && !id.chars().any(char::is_control))
                    .then(|| id.to_owned())
            },
        ),
        prompt: prompt.unwrap_or_default(),
        mail_to,
        missed: section.text("missed", "must be skip, one or all", Missed::parse).unwrap_or_default(),
        missed_limit: super::read::narrow(section.number("missed_limit", 1..=most), MISSED_LIMIT),
        overlap: section.text("overlap", "must be skip or queue", Overlap::parse).unwrap_or_default(),
    }
}

/// Returns whether a schedule may have this name.
pub fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && !name.starts_with("sched_")
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::super::{Config, tests::parse};
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        parse(text, &[]).expect_err("should be refused").lines().collect()
    }

    #[test]
    fn a_schedule_is_read_with_its_defaults() {
        let config: Config = parse(
            "[schedules.morning]\ncron = \"0 7 * * *\"\nprompt = \"Good morning.\"\ntime_zone = \"Europe/Berlin\"",
            &[],
        )
        .unwrap();
        let schedule = &config.schedules["morning"];
        assert_eq!((schedule.agent.as_str(), schedule.missed_limit), ("default", 10));
        assert_eq!((schedule.missed, schedule.overlap), (Missed::One, Overlap::Queue));
    }

    #[test]
    fn what_is_wrong_with_a_schedule_is_told_with_its_place() {
        for (key, line, reason) in [
            ("cron = \"61 * * * *\"", 2, "schedules.x.cron: \"61 * * * *\" is no cron pattern"),
            ("cron = \"0 0 30 2 *\"", 2, "schedules.x.cron: \"0 0 30 2 *\" names no day that ever comes"),
            (
                "cron = \"@daily\"\ntime_zone = \"Mars/Base\"",
                3,
                "schedules.x.time_zone: \"Mars/Base\" is no time zone",
            ),
            ("cron = \"@daily\"\nagent = \"nobody\"", 3, "there is no agent \"nobody\"; there are: default"),
            ("cron = \"@daily\"\nmail_to = [\"ann\"]", 3, "schedules.x.mail_to has \"ann\""),
            (
                "cron = \"@daily\"\nmissed = \"some\"",
                3,
                "schedules.x.missed = \"some\" must be skip, one or all",
            ),
            ("cron = \"@daily\"\nmissed_limit = 0", 3, "must be a whole number from 1 to 100"),
            ("cron = \"@daily\"\noverlap = \"no\"", 3, "schedules.x.overlap = \"no\" must be skip or queue"),
        ] {
            let found = lines(&format!("[schedules.x]\n{key}\nprompt = \"Hi.\"\n"));
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with(&format!("etc/wakeful.toml:{line}: ")), "{found:?}");
            assert!(found[0].contains(reason), "{found:?}");
        }
        assert_eq!(lines("[schedules.x]\n").len(), 2);
        for name in ["\"a b\"", "sched_0123456789abcdef0123"] {
            let text = format!("[schedules.{name}]\ncron = \"@daily\"\nprompt = \"Hi.\"");
            assert!(lines(&text)[0].contains(NAME_RULE), "{name}");
        }
    }
}
