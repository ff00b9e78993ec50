//! Rules of one session that override the configuration. They are written when the session is created. Only
//! the reply route changes later: a mail that answers a question updates it.
#![deny(missing_docs)]

use crate::agent::Agent;
use crate::id::SessionId;
use crate::trigger;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A session's own rules, which override those of its agent. Empty for a session that an ordinary trigger
/// made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionPolicy {
    /// `provider/model`, in place of the agent's model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Names of the tools that the session may use, in place of the agent's tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
    /// Whether tool calls have real effects.
    #[serde(skip_serializing_if = "ToolMode::is_live")]
    pub tool_mode: ToolMode,
    /// The trigger type whose reply rules apply, for a session that was made from another one: a fork, a replay and an import
    /// reply as their source does. Set when they are made; an import copies it from its bundle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replies_as: Option<String>,
    /// Where replies are sent. Forks, replays and imports have no route: people read the replies where they
    /// made the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply: Option<ReplyRoute>,
    /// Addresses of the people in the message that began the session, in lower case. The word `participants` in an agent's
    /// recipients means them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub participants: Vec<String>,
    /// Addresses that the session may write mail to, in place of the agent's recipients. An empty list allows
    /// none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipients: Option<Vec<String>>,
    /// Which hosts the session's tools may contact, of those that its agent may. `None`: all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub web: Option<WebPolicy>,
    /// Signs that a machine wrote the message that began the session. If there are any, the session sends no
    /// reply.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loop_suspicion: Vec<String>,
    /// Set if the session is a replay of another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<Replay>,
    /// Rules that this version does not know. They are kept unchanged.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Where the replies of a session are sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplyRoute {
    /// The word in `deliveries.channel`.
    pub channel: String,
    /// The address in the channel's own format: a chat, a thread, or the mail to answer.
    pub to: Value,
    /// The longest message that the channel accepts, in UTF-16 units. A longer reply is split. `None`: any
    /// length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split_at: Option<usize>,
}

/// Which hosts tools may contact. The default: all that are public.
///
/// Both lists have names of hosts and literal addresses. `*.example.org` means every subdomain of `example.org`,
/// and `*` means every host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebPolicy {
    /// The only hosts that may be contacted. `None`: every host. An empty list allows none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<Vec<String>>,
    /// Hosts that may not be contacted, even if `allow` has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
}

impl WebPolicy {
    /// Returns whether tools may contact `host`: a name, or a literal address without brackets.
    pub fn allows(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let among = |list: &[String]| list.iter().any(|pattern| fits(pattern, &host));
        !among(&self.deny) && self.allow.as_deref().is_none_or(among)
    }
}

fn fits(pattern: &str, host: &str) -> bool {
    let pattern = pattern.to_ascii_lowercase();
    match pattern.strip_prefix("*.") {
        Some(domain) => host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.') && rest.len() > 1),
        None => pattern == "*" || host == pattern,
    }
}

/// The word that stands for the session's participants in a list of recipients.
pub const PARTICIPANTS: &str = "participants";

/// Returns whether an agent with the recipients `allowed` may write to `address`. `allowed` may contain
/// addresses, `*@example.org` for a whole domain (without its subdomains), `*` for everybody, and
/// [`PARTICIPANTS`].
pub fn may_write_to(allowed: &[String], participants: &[String], address: &str) -> bool {
    // As mail servers do. Other letters may have an ASCII one as their lower case: the Kelvin sign has `k`.
    let address = address.to_ascii_lowercase();
    allowed.iter().any(|allowed| match allowed.as_str() {
        "*" => true,
        PARTICIPANTS => participants.iter().any(|one| one.to_ascii_lowercase() == address),
        allowed => match allowed.strip_prefix("*@") {
            Some(domain) => address.rsplit_once('@').is_some_and(|(_, of)| of == domain.to_ascii_lowercase()),
            None => allowed.to_ascii_lowercase() == address,
        },
    })
}

/// Whether a session's tool calls have real effects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ToolMode {
    /// Tools run, and messages are sent.
    #[default]
    Live,
    /// Pure tools run. Every other tool only says what it would have done, and no message is sent.
    Dry,
    /// Calls get the outcomes that they had in the replayed session.
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

    /// Returns whether tool calls have real effects.
    pub fn is_live(&self) -> bool {
        *self == ToolMode::Live
    }
}

/// The source of a replay, and how the replay uses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replay {
    /// The session that is replayed.
    pub source_session_id: SessionId,
    /// Messages up to this number were copied from the source. The replay runs what follows again.
    pub after_message_number: i64,
    /// The replay also gets the user's messages of the source, each in its place.
    #[serde(default)]
    pub fed: bool,
    /// Where the model's replies come from.
    pub answers: Answers,
}

/// Where the replies of a replay's model come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answers {
    /// The model is called.
    Live,
    /// The source's own replies are used, in their order.
    Recorded,
}

impl SessionPolicy {
    /// Returns `agent` with this session's overrides.
    pub fn of(&self, agent: Agent) -> Agent {
        Agent {
            model: self.model.clone().unwrap_or(agent.model),
            tools: self.tools.clone().unwrap_or(agent.tools),
            recipients: self.recipients.clone().unwrap_or(agent.recipients),
            ..agent
        }
    }

    /// Returns this policy with the restrictions of `before`: participants, recipients, web hosts and signs
    /// of a mail loop. So a later session of the same conversation gains no permission.
    pub fn restricted_as(mut self, before: &SessionPolicy) -> SessionPolicy {
        self.participants.clone_from(&before.participants);
        self.recipients.clone_from(&before.recipients);
        self.web.clone_from(&before.web);
        self.loop_suspicion.clone_from(&before.loop_suspicion);
        self
    }

    /// The policy of a restarted conversation, whose latest session replies as `replies_as` and has the policy `before`.
    /// Copies that session's reply route, unless the route is email. Always copies its restrictions, so a restart cannot
    /// widen permissions.
    pub fn restarted(self, replies_as: &str, before: Option<&SessionPolicy>) -> SessionPolicy {
        let answers = trigger::answers_in_place(replies_as);
        let mut own = match before {
            Some(before) => self.restricted_as(before),
            None => self,
        };
        if answers {
            if let Some(before) = before {
                own.reply.clone_from(&before.reply);
            }
            own.replies_as = Some(replies_as.to_owned());
        }
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_ordinary_session_has_an_empty_policy_and_unknown_rules_are_kept() {
        assert_eq!(serde_json::to_value(SessionPolicy::default()).unwrap(), json!({}));
        let written = json!({"tool_mode": "dry", "of_tomorrow": {"allow": ["example.org"]}});
        let policy: SessionPolicy = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(policy.tool_mode, ToolMode::Dry);
        assert_eq!(serde_json::to_value(policy).unwrap(), written);
    }

    #[test]
    fn mail_goes_to_whom_the_list_names_and_to_nobody_else() {
        let allowed = |list: &[&str], address: &str| {
            let list: Vec<String> = list.iter().map(|one| (*one).to_owned()).collect();
            may_write_to(&list, &["ann@example.com".to_owned()], address)
        };
        for (list, address, may) in [
            (&["participants"][..], "Ann@Example.com", true),
            (&["participants"], "bob@example.com", false),
            (&["*"], "bob@example.com", true),
            (&["*@example.com"], "bob@EXAMPLE.com", true),
            (&["*@example.com"], "bob@sub.example.com", false),
            (&["*@example.com"], "\"x@example.com\"@evil.org", false),
            (&["*@example.com"], "bob@evilexample.com", false),
            (&["bob@example.com"], "bob@example.com", true),
            (&["bob@example.com"], "ann@example.com", false),
            (&["bob@example.com"], "bob@example.com.evil.org", false),
            (&["bob@example.com"], "notbob@example.com", false),
            (&["participants"], "ann@example.com.evil.org", false),
            (&["bob@kelvin.example"], "bob@\u{212a}elvin.example", false),
            (&["*@kelvin.example"], "bob@\u{212a}elvin.example", false),
            (&[], "ann@example.com", false),
        ] {
            assert_eq!(allowed(list, address), may, "{list:?} {address}");
        }
    }

    #[test]
    fn a_host_is_asked_only_where_it_is_named() {
        let hosts = |list: &[&str]| list.iter().map(|one| (*one).to_owned()).collect::<Vec<String>>();
        let web = WebPolicy {
            allow: Some(hosts(&["example.org", "*.example.com"])),
            deny: hosts(&["b.example.com"]),
        };
        for (host, may) in [
            ("example.org", true),
            ("EXAMPLE.org.", true),
            ("a.example.org", false),
            ("a.example.com", true),
            ("example.com", false),
            ("evilexample.com", false),
            (".example.com", false),
            ("B.example.com.", false),
        ] {
            assert_eq!(web.allows(host), may, "{host}");
        }
        assert!(WebPolicy::default().allows("example.org"), "without a list every host is allowed");
        assert!(!WebPolicy { allow: Some(Vec::new()), ..WebPolicy::default() }.allows("example.org"));
        assert!(!WebPolicy { deny: hosts(&["*"]), ..WebPolicy::default() }.allows("example.org"));
        // As it stands in sessions of earlier versions.
        let stored: WebPolicy = serde_json::from_value(json!({"allow": ["example.org"]})).unwrap();
        assert!(stored.allows("example.org") && !stored.allows("example.com"));
    }

    #[test]
    fn what_it_names_is_above_the_agents() {
        let agent = Agent {
            name: "a".into(),
            system_prompt: String::new(),
            model: "openai/one".into(),
            fallback: Vec::new(),
            tools: vec!["x".into()],
            limits: crate::agent::Limits::default(),
            on_uncertain: crate::agent::OnUncertain::default(),
            approve: Vec::new(),
            on_empty_reply: crate::agent::OnEmptyReply::default(),
            journal: crate::agent::JournalLevel::default(),
            context: crate::strategy::ContextPolicy::default(),
            recipients: vec![PARTICIPANTS.into()],
            web: WebPolicy::default(),
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
