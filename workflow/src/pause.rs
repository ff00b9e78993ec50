//! Pauses: what operators switch off for a while, and what that holds up.
#![deny(missing_docs)]

use std::ops::RangeInclusive;

/// The seconds after which a pause may end by itself: up to a year.
pub const LASTS_S: RangeInclusive<u64> = 1..=366 * 24 * 3600;

/// What may be paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every step of every session.
    Queue,
    /// The sessions of a space.
    Space,
    /// The sessions of an agent.
    Agent,
    /// The sessions that a type of trigger made. Its messages are still accepted.
    Trigger,
    /// The model calls of a provider.
    Provider,
    /// The calls of a tool.
    Tool,
    /// The sessions of a conversation.
    Conversation,
    /// The ticks of a schedule.
    Schedule,
    /// The messages that leave by a channel.
    Channel,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 9] = [
        Kind::Queue,
        Kind::Space,
        Kind::Agent,
        Kind::Trigger,
        Kind::Provider,
        Kind::Tool,
        Kind::Conversation,
        Kind::Schedule,
        Kind::Channel,
    ];

    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Queue => "queue",
            Kind::Space => "space",
            Kind::Agent => "agent",
            Kind::Trigger => "trigger",
            Kind::Provider => "provider",
            Kind::Tool => "tool",
            Kind::Conversation => "conversation",
            Kind::Schedule => "schedule",
            Kind::Channel => "channel",
        }
    }

    /// Reads the word.
    pub fn parse(word: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.as_str() == word)
    }
}

/// One thing that is, or may be, paused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// What it is.
    pub kind: Kind,
    /// Its name. Conversations and schedules have their space before it: `space/name`. Empty for the queue.
    pub name: String,
}

impl Subject {
    /// Returns what a person means by a kind and a name. A conversation or a schedule is one of `space`; the name may have the
    /// space before it already.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn named(kind: Kind, name: Option<&str>, space: &str) -> Result<Subject, String> {
        let name = name.unwrap_or_default();
        match (kind, name.is_empty()) {
            (Kind::Queue, false) => return Err("there is one queue: it has no name".to_owned()),
            (Kind::Queue, true) => {}
            (_, true) => return Err(format!("name the {}", kind.as_str())),
            (_, false) if name.len() > 512 || name.chars().any(char::is_control) => {
                return Err("a name has 1 to 512 bytes and no control characters".to_owned());
            }
            (_, false) => {}
        }
        let name = match kind {
            Kind::Conversation | Kind::Schedule
                if name.strip_prefix(space).is_none_or(|rest| !rest.starts_with('/')) =>
            {
                format!("{space}/{name}")
            }
            _ => name.to_owned(),
        };
        Ok(Subject { kind, name })
    }

    /// Returns what a person may mean who ends a pause: first the name as a list shows it, with its space, then one of `space`.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn shown(kind: Kind, name: Option<&str>, space: &str) -> Result<[Subject; 2], String> {
        let named = Subject::named(kind, name, space)?;
        Ok([Subject { kind, name: name.unwrap_or_default().to_owned() }, named])
    }

    /// The key of its row.
    pub fn id(&self) -> String {
        if self.name.is_empty() {
            self.kind.as_str().to_owned()
        } else {
            format!("{}:{}", self.kind.as_str(), self.name)
        }
    }
}

/// What a step is about to do.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The session's space.
    pub space_id: &'a str,
    /// The session's agent.
    pub agent: &'a str,
    /// The type of trigger that made the session.
    pub trigger_type: &'a str,
    /// As stored: `space/id`.
    pub conversation_id: &'a str,
    /// The provider of the model that it calls.
    pub provider: Option<&'a str>,
    /// The tools that it runs.
    pub tools: &'a [&'a str],
}

impl Step<'_> {
    /// Returns whether a pause of `subject` holds it up.
    pub fn is_held_by(&self, subject: &Subject) -> bool {
        let name = subject.name.as_str();
        match subject.kind {
            Kind::Queue => true,
            Kind::Space => name == self.space_id,
            Kind::Agent => name == self.agent,
            Kind::Trigger => name == self.trigger_type,
            Kind::Provider => self.provider == Some(name),
            Kind::Tool => self.tools.contains(&name),
            Kind::Conversation => name == self.conversation_id,
            // The scheduler asks for itself, and a session that has begun goes on. Messages are no part of a step.
            Kind::Schedule | Kind::Channel => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_held_by_what_it_needs_and_by_nothing_else() {
        let step = Step {
            space_id: "default",
            agent: "support",
            trigger_type: "email",
            conversation_id: "default/c1",
            provider: Some("openai"),
            tools: &["charge"],
        };
        for kind in Kind::ALL {
            assert_eq!(Kind::parse(kind.as_str()), Some(kind));
            let name = match kind {
                Kind::Queue => None,
                Kind::Space => Some("default"),
                Kind::Agent => Some("support"),
                Kind::Trigger => Some("email"),
                Kind::Provider => Some("openai"),
                Kind::Tool => Some("charge"),
                Kind::Conversation => Some("c1"),
                Kind::Schedule => Some("daily"),
                Kind::Channel => Some("email"),
            };
            let subject = Subject::named(kind, name, "default").unwrap();
            assert_eq!(
                step.is_held_by(&subject),
                !matches!(kind, Kind::Schedule | Kind::Channel),
                "{kind:?}"
            );
            if kind != Kind::Queue {
                let other = Subject::named(kind, Some("another"), "default").unwrap();
                assert!(!step.is_held_by(&other), "{kind:?}");
                assert!(Subject::named(kind, None, "default").is_err());
            }
        }
        assert!(Subject::named(Kind::Queue, Some("x"), "default").is_err());
        for (name, space, id) in [
            ("daily", "default", "schedule:default/daily"),
            ("daily", "acme", "schedule:acme/daily"),
            ("acme/daily", "acme", "schedule:acme/daily"),
            ("acmes/daily", "acme", "schedule:acme/acmes/daily"),
        ] {
            assert_eq!(Subject::named(Kind::Schedule, Some(name), space).unwrap().id(), id);
        }
        // A messenger's conversations have slashes in their ids.
        let slack = Subject::named(Kind::Conversation, Some("slack/T1/C2"), "default").unwrap();
        assert_eq!(slack.name, "default/slack/T1/C2");
    }
}
