//! `[messenger]`: Slack, Telegram, and a signed webhook for everything else.
//!
//! Each works in the directions for which it has secrets: with a verification secret messages come in, with a
//! token or a reply address replies go out.

use super::read::Section;
use secrecy::SecretString;
use std::time::Duration;
use wakeful_workflow::id::DEFAULT_SPACE;

/// A day. Older replies are of little use, and a receiver that was down longer would get many at once.
const MAX_AGE_S: u64 = 86_400;

#[derive(Clone, Debug)]
pub struct Messenger {
    pub slack: Slack,
    pub telegram: Telegram,
    pub webhook: Webhook,
    /// A reply that was not sent by this age is sent only if an operator asks for it.
    pub max_age: Duration,
}

impl Default for Messenger {
    fn default() -> Messenger {
        Messenger {
            slack: Slack::default(),
            telegram: Telegram::default(),
            webhook: Webhook::default(),
            max_age: Duration::from_secs(MAX_AGE_S),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Slack {
    /// The bot token, `xoxb-…`.
    pub token: Option<SecretString>,
    /// The app's signing secrets; several during a rotation.
    pub signing_secrets: Vec<SecretString>,
    pub agent: Option<String>,
    /// The space of its conversations. `None`: the default one.
    pub space: Option<String>,
    /// Without a trailing slash.
    pub base_url: String,
    pub answers: Answers,
    pub allow: Allowed,
}

/// Which messages of a channel are for the agent. Direct messages always are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// Messages that mention the agent, and all messages in a thread where it was mentioned.
    Mentions,
    /// Every message that Slack sends.
    Everything,
}

#[derive(Clone, Debug)]
pub struct Telegram {
    /// `BOT:SECRET`.
    pub token: Option<SecretString>,
    /// The values given to `setWebhook` as `secret_token`; several during a rotation.
    pub webhook_secrets: Vec<SecretString>,
    pub agent: Option<String>,
    /// The space of its conversations. `None`: the default one.
    pub space: Option<String>,
    /// Without a trailing slash.
    pub base_url: String,
    pub allow: Allowed,
}

#[derive(Clone, Debug, Default)]
pub struct Webhook {
    /// `whsec_…`; several during a rotation. An incoming message must be signed with one of them; an outgoing
    /// one is signed with each.
    pub secrets: Vec<SecretString>,
    pub agent: Option<String>,
    /// The space of its conversations. `None`: the default one.
    pub space: Option<String>,
    /// The address that replies are posted to. `None`: clients read replies through the API.
    pub reply_url: Option<url::Url>,
    /// Whether the host name in `reply_url` may resolve to a private address.
    pub private_network: bool,
}

/// Who may write to an agent. A message must pass both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Ids of users; `*` for everybody. `None`: not set, which allows everybody, except that Telegram
    /// requires it.
    pub users: Option<Vec<String>>,
    /// Ids of channels or chats. `None`: all.
    pub channels: Option<Vec<String>>,
}

/// The space that a section names, or the default one.
fn space_or_default(space: &Option<String>) -> &str {
    space.as_deref().unwrap_or(DEFAULT_SPACE)
}

impl Slack {
    /// The space of its conversations.
    pub fn space(&self) -> &str {
        space_or_default(&self.space)
    }
}

impl Telegram {
    /// The space of its conversations.
    pub fn space(&self) -> &str {
        space_or_default(&self.space)
    }
}

impl Webhook {
    /// The space of its conversations.
    pub fn space(&self) -> &str {
        space_or_default(&self.space)
    }
}

impl Allowed {
    /// Returns whether a message from `user` in `channel` is accepted.
    pub fn allows(&self, user: &str, channel: &str) -> bool {
        let has = |list: &Option<Vec<String>>, id: &str| {
            list.as_ref().is_none_or(|list| list.iter().any(|allowed| allowed == "*" || allowed == id))
        };
        has(&self.users, user) && has(&self.channels, channel)
    }
}

impl Default for Slack {
    fn default() -> Slack {
        Slack {
            token: None,
            signing_secrets: Vec::new(),
            agent: None,
            space: None,
            base_url: "https://slack.com/api".to_owned(),
            answers: Answers::Mentions,
            allow: Allowed::default(),
        }
    }
}

impl Default for Telegram {
    fn default() -> Telegram {
        Telegram {
            token: None,
            webhook_secrets: Vec::new(),
            agent: None,
            space: None,
            base_url: "https://api.telegram.org".to_owned(),
            allow: Allowed::default(),
        }
    }
}

/// Reads the section.
pub(super) fn read(mut section: Section<'_>) -> Messenger {
    let messenger = Messenger {
        slack: slack(section.section("slack")),
        telegram: telegram(section.section("telegram")),
        webhook: webhook(section.section("webhook")),
        max_age: Duration::from_secs(
            section.number("max_age_s", 1..=31_536_000).map_or(MAX_AGE_S, i64::unsigned_abs),
        ),
    };
    section.finish();
    messenger
}

fn slack(mut section: Section<'_>) -> Slack {
    let default = Slack::default();
    let (agent, space) = super::read::route(&mut section, None);
    let slack = Slack {
        token: section.secret("token", |_| None),
        signing_secrets: section.secrets("signing_secrets"),
        agent,
        space,
        base_url: base_url(&mut section).unwrap_or(default.base_url),
        answers: section
            .text("answers", "must be \"mentions\" or \"everything\"", |text| match text {
                "mentions" => Some(Answers::Mentions),
                "everything" => Some(Answers::Everything),
                _ => None,
            })
            .unwrap_or(default.answers),
        allow: allowed(&mut section),
    };
    section.finish();
    slack
}

fn telegram(mut section: Section<'_>) -> Telegram {
    let rule = "must be the token that BotFather gave, such as 123456:ABC-DEF";
    let (agent, space) = super::read::route(&mut section, None);
    let telegram = Telegram {
        token: section.secret("token", |token| {
            // The token becomes part of a URL.
            let good = token.split_once(':').is_some_and(|(bot, secret)| {
                let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
                !bot.is_empty()
                    && bot.bytes().all(|b| b.is_ascii_digit())
                    && !secret.is_empty()
                    && secret.chars().all(plain)
            });
            (!good).then_some(rule)
        }),
        webhook_secrets: section.secrets("webhook_secrets"),
        agent,
        space,
        base_url: base_url(&mut section).unwrap_or(Telegram::default().base_url),
        allow: allowed(&mut section),
    };
    section.finish();
    telegram
}

fn webhook(mut section: Section<'_>) -> Webhook {
    let (agent, space) = super::read::route(&mut section, None);
    let webhook = Webhook {
        secrets: section.secrets("secrets"),
        agent,
        space,
        reply_url: section.text("reply_url", URL_RULE, url),
        private_network: section.flag("private_network").unwrap_or(false),
    };
    section.finish();
    webhook
}

const URL_RULE: &str = "must be an address, such as https://example.org/path";

fn url(text: &str) -> Option<url::Url> {
    let url: url::Url = text.parse().ok()?;
    (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(url)
}

fn base_url(section: &mut Section<'_>) -> Option<String> {
    section.text("base_url", URL_RULE, |text| url(text).map(|_| text.trim_end_matches('/').to_owned()))
}

fn allowed(section: &mut Section<'_>) -> Allowed {
    Allowed { users: section.list("allow_users"), channels: section.list("allow_channels") }
}
