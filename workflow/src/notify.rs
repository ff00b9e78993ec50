//! Notifications: which transitions a person is told of, and when.
//!
//! A transition is something that happened and that may need a person: a run that failed, a question, a gate that shut. A rule
//! says which of them it tells. Transitions of one cause are told together:
//!
//! | the group | says |
//! |---|---|
//! | its window is over | one message, with how many there are |
//! | an outage: failures of one kind, a gate, no worker | one message a day until it is over, and then one with the sum; a single failure has no such end |
//! | something that waits for a person: a question, an approval, an uncertain effect | one more message for what is new; the window doubles with each |
//! | nothing new came in the quiet time | it is closed; what comes then is another group |
//!
//! A rule sends at most so many messages an hour. What comes beyond waits in its group and is told with it, so nothing is lost.

use serde::Serialize;
use std::time::Duration;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A run failed for good.
    Failed,
    /// A run reached the limit of its steps or tokens.
    OverBudget,
    /// A session needs an operator: an effect whose end is unknown, or a fault of the database.
    NeedsAttention,
    /// A call waits until a person approves it.
    Approval,
    /// An agent asks a question.
    WaitingInput,
    /// A delivery was not sent, or may not have been.
    DeliveryFailed,
    /// A provider fails, so its gate is shut for all.
    GateShut,
    /// Jobs are ready and no worker lives.
    NoWorker,
    /// A batch stopped because its members failed again.
    BatchStopped,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 9] = [
        Kind::Failed,
        Kind::OverBudget,
        Kind::NeedsAttention,
        Kind::Approval,
        Kind::WaitingInput,
        Kind::DeliveryFailed,
        Kind::GateShut,
        Kind::NoWorker,
        Kind::BatchStopped,
    ];

    /// The word in rules, rows and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Failed => "failed",
            Kind::OverBudget => "over_budget",
            Kind::NeedsAttention => "needs_attention",
            Kind::Approval => "approval",
            Kind::WaitingInput => "waiting_input",
            Kind::DeliveryFailed => "delivery_failed",
            Kind::GateShut => "gate_shut",
            Kind::NoWorker => "no_worker",
            Kind::BatchStopped => "batch_stopped",
        }
    }

    /// Reads the word.
    pub fn parse(word: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.as_str() == word)
    }

    /// How its transitions are told.
    fn course(self) -> Course {
        match self {
            Kind::Failed | Kind::OverBudget | Kind::DeliveryFailed => Course::Outage,
            Kind::GateShut | Kind::NoWorker => Course::UntilItEnds,
            Kind::NeedsAttention | Kind::Approval | Kind::WaitingInput | Kind::BatchStopped => Course::Waits,
        }
    }

    /// What happened to `count` of them, in words.
    pub fn said(self, count: i64) -> String {
        let one = count == 1;
        let counted = |singular: &str, plural: &str| {
            if one { singular.to_owned() } else { format!("{count} {plural}") }
        };
        match self {
            Kind::Failed => counted("A run failed", "runs failed"),
            Kind::OverBudget => counted("A run is over its budget", "runs are over their budget"),
            Kind::NeedsAttention => counted("A session needs attention", "sessions need attention"),
            Kind::Approval => counted("A call waits for approval", "sessions' calls wait for approval"),
            Kind::WaitingInput => counted("An agent asks a question", "agents' questions wait"),
            Kind::DeliveryFailed => counted("A message was not sent", "messages were not sent"),
            Kind::GateShut => "A provider fails, and its gate is shut".to_owned(),
            Kind::NoWorker => "Jobs wait and no worker lives".to_owned(),
            Kind::BatchStopped => counted("A batch stopped", "batches stopped"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// It is over when nothing new came for a while.
    Outage,
    /// Its end is a transition of its own.
    UntilItEnds,
    /// Each one waits for a person.
    Waits,
}

/// Which transitions are told together, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name, by which rows refer to it.
    pub name: String,
    /// Which kinds it tells.
    pub when: Vec<Kind>,
    /// Only those of these agents. `None`: all.
    pub agents: Option<Vec<String>>,
    /// Only those of these spaces. `None`: all, and those of the whole installation.
    pub spaces: Option<Vec<String>>,
    /// How long a group gathers before its first message.
    pub window: Duration,
    /// After how long without anything new a group is over.
    pub quiet: Duration,
    /// The most messages an hour.
    pub per_hour: u32,
}

/// What a rule looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen<'a> {
    /// What happened.
    pub kind: Kind,
    /// `*`: of the whole installation.
    pub space_id: &'a str,
    /// The session's agent.
    pub agent: Option<&'a str>,
}

impl Rule {
    /// Returns whether the rule tells this.
    pub fn wants(&self, seen: Seen<'_>) -> bool {
        let agent = match (&self.agents, seen.agent) {
            (None, _) => true,
            (Some(agents), Some(agent)) => agents.iter().any(|one| one == agent),
            // What has no agent is for rules without a list of them.
            (Some(_), None) => false,
        };
        let space = self.spaces.as_ref().is_none_or(|spaces| spaces.iter().any(|one| one == seen.space_id));
        self.when.contains(&seen.kind) && agent && space
    }

    /// The space of its messages: its one space, or `*`.
    pub fn space(&self) -> &str {
        match self.spaces.as_deref() {
            Some([one]) => one,
            Some(_) | None => "*",
        }
    }
}

/// The group of one cause, so far. Times are milliseconds of one clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Its transitions, and how many of them were told.
    pub count: i64,
    pub told: i64,
    /// The messages that told them.
    pub messages: u32,
    pub first_ms: i64,
    pub last_ms: i64,
    /// When the last message was made.
    pub told_ms: Option<i64>,
    /// The cause has said that it is over.
    pub ended: bool,
}

/// Which message of a group it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The first one.
    Began,
    /// What is new since the one before.
    More,
    /// It is over.
    Over,
}

impl Phase {
    /// The word in rows and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Began => "began",
            Phase::More => "more",
            Phase::Over => "over",
        }
    }
}

/// What to do with a group now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing.
    Wait,
    /// Make a message of everything that is not told yet. `closes`: then the group is over.
    Tell { phase: Phase, closes: bool },
    /// It is over, and everything was told.
    Close,
}

const DAY_MS: i64 = 86_400_000;

/// Decides what to do with a group.
pub fn next(kind: Kind, rule: &Rule, group: &Group, now_ms: i64) -> Next {
    let (window, quiet) = (millis(rule.window), millis(rule.quiet));
    let course = kind.course();
    let is_new = group.count > group.told;
    if group.messages == 0 {
        // What is over within its window is told once, with its end.
        let closes = group.ended && course == Course::UntilItEnds;
        let due = now_ms >= group.first_ms.saturating_add(window);
        return if due { Next::Tell { phase: Phase::Began, closes } } else { Next::Wait };
    }
    let is_quiet = now_ms >= group.last_ms.saturating_add(quiet);
    match course {
        Course::UntilItEnds if group.ended => Next::Tell { phase: Phase::Over, closes: true },
        Course::UntilItEnds => Next::Wait,
        // A single failure that was told has no end worth a message.
        Course::Outage if is_quiet && (is_new || group.count > 1) => {
            Next::Tell { phase: Phase::Over, closes: true }
        }
        Course::Outage | Course::Waits if is_quiet && !is_new => Next::Close,
        // One that does not end is told again each day.
        Course::Outage
            if is_new && now_ms >= group.told_ms.unwrap_or(group.first_ms).saturating_add(DAY_MS) =>
        {
            Next::Tell { phase: Phase::More, closes: false }
        }
        Course::Outage => Next::Wait,
        Course::Waits => {
            let doubled = window.saturating_mul(1_i64 << group.messages.min(30)).min(quiet.max(window));
            let due = group.told_ms.unwrap_or(group.first_ms).saturating_add(doubled);
            if is_new && now_ms >= due {
                Next::Tell { phase: Phase::More, closes: false }
            } else {
                Next::Wait
            }
        }
    }
}

/// Whether a link that lets a person act once can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum LinkState {
    Open,
    Used,
    Expired,
    /// What it was about is not so any more.
    Changed,
}

impl LinkState {
    /// A sentence without its full stop. `by`: who used it.
    pub fn said(self, by: Option<&str>) -> String {
        match (self, by) {
            (LinkState::Open, _) => "this link can be used once".to_owned(),
            (LinkState::Used, Some(by)) => format!("this link was used by {by}"),
            (LinkState::Used, None) => "this link was used".to_owned(),
            (LinkState::Expired, _) => "this link has expired".to_owned(),
            (LinkState::Changed, _) => {
                "what this link was about has changed meanwhile, so it does nothing any more".to_owned()
            }
        }
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule() -> Rule {
        Rule {
            name: "ops".to_owned(),
            when: Kind::ALL.to_vec(),
            agents: None,
            spaces: None,
            window: Duration::from_secs(60),
            quiet: Duration::from_secs(600),
            per_hour: 20,
        }
    }

    /// What a rule makes of transitions at these times, looking every second for an hour: the messages' times, phases and counts.
    fn told(kind: Kind, at_s: &[i64], end_s: Option<i64>) -> Vec<(i64, Phase, i64)> {
        let (mut messages, mut open): (Vec<_>, Option<Group>) = (Vec::new(), None);
        for now_s in 0..7200 {
            let now_ms = now_s * 1000;
            for _ in at_s.iter().filter(|at| **at == now_s) {
                let group = open.get_or_insert(Group { first_ms: now_ms, ..Group::default() });
                (group.count, group.last_ms, group.ended) = (group.count + 1, now_ms, false);
            }
            let Some(group) = &mut open else { continue };
            group.ended |= end_s == Some(now_s);
            match next(kind, &rule(), group, now_ms) {
                Next::Wait => {}
                Next::Close => open = None,
                Next::Tell { phase, closes } => {
                    messages.push((now_s, phase, group.count - group.told));
                    (group.told, group.told_ms, group.messages) =
                        (group.count, Some(now_ms), group.messages + 1);
                    if closes {
                        open = None;
                    }
                }
            }
        }
        messages
    }

    #[test]
    fn an_outage_is_one_message_and_one_when_it_is_over() {
        let at: Vec<i64> = (0..1000).map(|n| n / 2).collect();
        assert_eq!(told(Kind::Failed, &at, None), [(60, Phase::Began, 122), (1099, Phase::Over, 878)]);
        assert_eq!(told(Kind::Failed, &[5, 6], None), [(65, Phase::Began, 2), (606, Phase::Over, 0)]);
        assert_eq!(told(Kind::Failed, &[5], None), [(65, Phase::Began, 1)], "one failure is not an outage");
        assert_eq!(told(Kind::GateShut, &[0], Some(3000)), [(60, Phase::Began, 1), (3000, Phase::Over, 0)]);
        assert_eq!(told(Kind::GateShut, &[0], None), [(60, Phase::Began, 1)]);
        assert_eq!(told(Kind::NoWorker, &[0], Some(20)), [(60, Phase::Began, 1)], "told once, with its end");
    }

    #[test]
    fn an_outage_that_does_not_end_is_told_again_after_a_day() {
        let now_ms = 10 * DAY_MS;
        let told = |told_ms| Group {
            count: 9,
            told: 2,
            messages: 1,
            first_ms: 0,
            last_ms: now_ms,
            told_ms,
            ended: false,
        };
        let more = Next::Tell { phase: Phase::More, closes: false };
        assert_eq!(next(Kind::Failed, &rule(), &told(Some(9 * DAY_MS)), now_ms), more);
        assert_eq!(next(Kind::Failed, &rule(), &told(Some(9 * DAY_MS + 1)), now_ms), Next::Wait);
    }

    #[test]
    fn what_waits_for_a_person_is_told_ever_more_rarely_and_never_not_at_all() {
        let each_minute: Vec<i64> = (0..30).map(|n| n * 60).collect();
        let messages = told(Kind::WaitingInput, &each_minute, None);
        assert_eq!(messages.iter().map(|(at, ..)| *at).collect::<Vec<_>>(), [60, 180, 420, 900, 1500, 2100]);
        assert_eq!(messages.iter().map(|(_, _, count)| count).sum::<i64>(), 30);
        assert!(messages[1..].iter().all(|(_, phase, _)| *phase == Phase::More));
    }

    #[test]
    fn a_rule_tells_its_kinds_of_its_agents_and_spaces() {
        let seen = |kind, space_id, agent| Seen { kind, space_id, agent };
        let narrow = Rule {
            when: vec![Kind::Failed, Kind::GateShut],
            agents: Some(vec!["desk".to_owned()]),
            spaces: Some(vec!["acme".to_owned()]),
            ..rule()
        };
        assert!(narrow.wants(seen(Kind::Failed, "acme", Some("desk"))));
        assert!(!narrow.wants(seen(Kind::Failed, "acme", Some("other"))));
        assert!(!narrow.wants(seen(Kind::Failed, "other", Some("desk"))));
        assert!(!narrow.wants(seen(Kind::WaitingInput, "acme", Some("desk"))));
        assert!(!narrow.wants(seen(Kind::GateShut, "*", None)));
        assert!(rule().wants(seen(Kind::GateShut, "*", None)));
        assert_eq!((narrow.space(), rule().space()), ("acme", "*"));
    }

    #[test]
    fn every_kind_has_its_word() {
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.as_str()), Some(kind));
            assert!(!kind.said(1).is_empty() && !kind.said(7).is_empty());
        }
        assert_eq!(Kind::parse("fine"), None);
    }

    proptest! {
        #[test]
        fn each_transition_is_told_once(
            kind in proptest::sample::select(vec![Kind::Failed, Kind::WaitingInput, Kind::NeedsAttention]),
            mut at in proptest::collection::vec(0_i64..3000, 1..60),
        ) {
            at.sort_unstable();
            let messages = told(kind, &at, None);
            prop_assert_eq!(messages.iter().map(|(_, _, count)| count).sum::<i64>(), at.len() as i64);
            prop_assert!(messages.iter().all(|(_, phase, count)| *count > 0 || *phase == Phase::Over));
        }
    }
}
