//! Decides which ticks of a schedule are due, and what happens to missed ones. The time is an argument.
//!
//! A tick is an instant that a cron pattern names in a time zone. A schedule stores only one instant: the
//! tick up to which everything is decided ([`Decision::last_tick`]). If the clock jumps back, no tick before
//! that one is due again. If the clock jumps forward or the system was down, the ticks since then are due,
//! and the policy decides what happens to them.
//!
//! Daylight saving time follows croner. A pattern with one time of day (`30 2 * * *`) fires once a day: a
//! skipped time fires at the first instant after the gap, and a repeated time fires at the first of the two.
//! Any other pattern (`*/15 * * * *`, `0 2,14 * * *`) follows the wall clock: a skipped time does not fire,
//! and a repeated one fires twice.
#![doc = include_str!("README.md")]

use chrono::{DateTime, SecondsFormat, SubsecRound, TimeDelta, Utc};
use chrono_tz::Tz;
use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

/// A tick that fires at most this late does not count as missed.
const ON_TIME: TimeDelta = TimeDelta::seconds(60);

/// Maximum number of missed ticks that fire at once.
pub const MISSED_LIMIT: u32 = 100;

/// Maximum number of passed ticks that are counted exactly.
const COUNTED: usize = 1000;

/// A cron pattern in a time zone.
#[derive(Clone, Debug)]
pub struct Timing {
    cron: Cron,
    zone: Tz,
}

/// Why a pattern or a time zone is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("{pattern:?} is no cron pattern: {reason}")]
    Pattern { pattern: String, reason: String },
    #[error("{pattern:?} names no day that ever comes")]
    Never { pattern: String },
    #[error("{0:?} is no time zone: it must be a name of the IANA database, such as UTC or Europe/Berlin")]
    Zone(String),
}

/// What happens to ticks that did not fire in time, because the system was down or the clock jumped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Missed {
    /// None of them fires.
    Skip,
    /// The newest one fires, for all of them.
    #[default]
    One,
    /// Each of them fires, up to a limit of the newest.
    All,
}

impl Missed {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Missed::Skip => "skip",
            Missed::One => "one",
            Missed::All => "all",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<Missed> {
        match word {
            "skip" => Some(Missed::Skip),
            "one" => Some(Missed::One),
            "all" => Some(Missed::All),
            _ => None,
        }
    }
}

/// What happens to a tick while an earlier firing of its schedule is not finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Overlap {
    /// It does not fire.
    Skip,
    /// It waits for its turn in the schedule's conversation.
    #[default]
    Queue,
}

impl Overlap {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Overlap::Skip => "skip",
            Overlap::Queue => "queue",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<Overlap> {
        match word {
            "skip" => Some(Overlap::Skip),
            "queue" => Some(Overlap::Queue),
            _ => None,
        }
    }
}

/// The decision about one schedule at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Oldest first.
    pub fire: Vec<DateTime<Utc>>,
    pub passed: Option<Passed>,
    /// Everything up to this tick is decided. Never moves back.
    pub last_tick: DateTime<Utc>,
    /// The next tick after `last_tick`, if there is one.
    pub next_at: Option<DateTime<Utc>>,
}

/// Ticks that were due but do not fire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    pub first: DateTime<Utc>,
    pub last: DateTime<Utc>,
    pub count: usize,
    /// Whether there are more than `count`.
    pub more: bool,
}

impl Passed {
    /// The reason that is stored.
    pub fn reason(&self, missed: Missed) -> String {
        let more = if self.more { "more than " } else { "" };
        let ticks = if self.count == 1 { "tick" } else { "ticks" };
        format!(
            "missed: {more}{} {ticks} since {}, missed = {}",
            self.count,
            written(self.first),
            missed.as_str()
        )
    }
}

impl Timing {
    /// Parses a pattern of five fields, or of six with seconds first, and a time zone's IANA name. Accepts
    /// `@daily` and similar patterns.
    ///
    /// # Errors
    /// [`Invalid`] if the pattern or the zone is invalid, or if the pattern never fires.
    pub fn parse(pattern: &str, zone: &str) -> Result<Timing, Invalid> {
        let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
        let cron = parser.parse(pattern).map_err(|_| Invalid::Pattern {
            pattern: pattern.to_owned(),
            reason: why_not(&parser, pattern),
        })?;
        let zone = zone.parse::<Tz>().map_err(|_| Invalid::Zone(zone.to_owned()))?;
        let timing = Timing { cron, zone };
        // A pattern has no years and so repeats: if it fires at all, it fires after any instant.
        if timing.after(DateTime::UNIX_EPOCH).is_none() {
            return Err(Invalid::Never { pattern: pattern.to_owned() });
        }
        Ok(timing)
    }

    /// The first tick after `instant`.
    pub fn after(&self, instant: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let local = instant.trunc_subsecs(0).with_timezone(&self.zone);
        self.cron.find_next_occurrence(&local, false).ok().map(|tick| tick.with_timezone(&Utc))
    }

    /// Every tick after `instant`, oldest first.
    pub fn ticks(&self, instant: DateTime<Utc>) -> impl Iterator<Item = DateTime<Utc>> + '_ {
        std::iter::successors(self.after(instant), |tick| self.after(*tick))
    }

    /// An instant in local time, with the time zone's name.
    pub fn local(&self, instant: DateTime<Utc>) -> String {
        format!("{} {}", instant.with_timezone(&self.zone).format("%Y-%m-%d %H:%M:%S %:z"), self.zone.name())
    }

    /// The newest `limit` ticks of (`after`, `until`], oldest first.
    fn newest(&self, after: DateTime<Utc>, until: DateTime<Utc>, limit: usize) -> VecDeque<DateTime<Utc>> {
        let mut window = TimeDelta::minutes(1);
        loop {
            // Search backwards in growing windows: after a year without decisions, a pattern of every second
            // must not take thirty million steps.
            let from = until.checked_sub_signed(window).map_or(after, |from| from.max(after));
            let mut ticks = VecDeque::new();
            for tick in self.ticks(from).take_while(|tick| *tick <= until) {
                if ticks.len() == limit {
                    ticks.pop_front();
                }
                ticks.push_back(tick);
            }
            if from <= after || ticks.len() >= limit {
                return ticks;
            }
            window = window * 2;
        }
    }
}

/// The fields of a pattern, and the values that each accepts.
const FIELDS: [(&str, &str); 6] = [
    ("second", "0 to 59"),
    ("minute", "0 to 59"),
    ("hour", "0 to 23"),
    ("day of the month", "1 to 31, or L for the last"),
    ("month", "1 to 12, or JAN to DEC"),
    ("day of the week", "0 to 7, or SUN to SAT"),
];

/// Explains why the parser refused a pattern. Parses each field alone, with stars in the others, to find the
/// wrong one.
fn why_not(parser: &CronParser, pattern: &str) -> String {
    if pattern.trim_start().starts_with('@') {
        return "of this kind there are @yearly, @monthly, @weekly, @daily and @hourly".to_owned();
    }
    let written: Vec<&str> = pattern.split_whitespace().collect();
    let known = match written.len() {
        5 => &FIELDS[1..],
        6 => &FIELDS[..],
        fields => {
            return format!(
                "it has {fields} fields, and must have five (minute, hour, day of the month, month, day of the week), which a \
                 sixth one for seconds may stand before"
            );
        }
    };
    for (at, (field, (name, takes))) in written.iter().zip(known).enumerate() {
        let mut alone = vec!["*"; written.len()];
        alone[at] = field;
        if parser.parse(&alone.join(" ")).is_err() {
            return format!(
                "its {name} is {field:?}, and must be {takes}; or *, a list (1,3), a range (1-5) or a step (*/2)"
            );
        }
    }
    "its fields do not go together".to_owned()
}

/// Decides what is due at `now` for a schedule that is decided up to `last_tick`.
pub fn decide(
    timing: &Timing,
    missed: Missed,
    missed_limit: u32,
    last_tick: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Decision {
    let limit = match missed {
        Missed::Skip | Missed::One => 1,
        Missed::All => missed_limit.clamp(1, MISSED_LIMIT) as usize,
    };
    let mut fire = Vec::from(timing.newest(last_tick, now, limit));
    let Some(newest) = fire.last().copied() else {
        return Decision { fire, passed: None, last_tick, next_at: timing.after(last_tick) };
    };
    match missed {
        Missed::Skip => fire.retain(|tick| now - *tick <= ON_TIME),
        Missed::One | Missed::All => {}
    }
    let before = fire.first().copied();
    let mut passed: Option<Passed> = None;
    for tick in timing.ticks(last_tick).take_while(|tick| *tick <= newest && Some(*tick) != before) {
        let so_far = passed.get_or_insert(Passed { first: tick, last: tick, count: 0, more: false });
        if so_far.count == COUNTED {
            so_far.more = true;
            break;
        }
        so_far.count += 1;
        so_far.last = tick;
    }
    Decision { fire, passed, last_tick: newest, next_at: timing.after(newest) }
}

/// The trigger id of a tick. Firing the same tick again gives the same trigger.
pub fn trigger_id(schedule_id: &str, tick: DateTime<Utc>) -> String {
    format!("cron:{schedule_id}:{}", written(tick))
}

/// The trigger id of a firing that a person requested.
pub fn manual_trigger_id(schedule_id: &str, client_key: &str) -> String {
    format!("cron:{schedule_id}:manual:{client_key}")
}

/// The agent's message at a tick: the prompt and the time. The same tick always gives the same message.
pub fn message(prompt: &str, timing: &Timing, tick: DateTime<Utc>) -> String {
    format!("{}\n\nScheduled for {}.", prompt.trim_end(), timing.local(tick))
}

/// An instant in UTC to the second, as it is stored and shown.
pub fn written(instant: DateTime<Utc>) -> String {
    instant.to_rfc3339_opts(SecondsFormat::Secs, true)
}
