//! `[messenger]`: Slack, Telegram, and a signed webhook for everything else.
//!
//! Each works in the direction that its secrets allow: messages come in where there is what they are verified by, and
//! replies go out where there is what they are sent with.

use super::read::Section;
use secrecy::SecretString;
use std::time::Duration;

/// A reply of yesterday is of little use, and many of them at once are none: a receiver may be away for longer than that.
const MAX_AGE_S: u64 = 86_400;

#[derive(Clone, Debug)]
pub struct Messenger {
    pub slack: Slack,
    pub telegram: Telegram,
    pub webhook: Webhook,
    /// A reply that was not sent by this age is not sent unless an operator asks for it.
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
    /// The bot's, `xoxb-…`.
    pub token: Option<SecretString>,
    /// Of the app; several while one is changed.
    pub signing_secrets: Vec<SecretString>,
    pub agent: Option<String>,
    /// Without a slash at its end.
    pub base_url: String,
    pub answers: Answers,
    pub allow: Allowed,
}

/// Which messages of a channel are for the agent. Direct ones always are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// Those that mention it, and whatever is said in a thread in which it has been mentioned.
    Mentions,
    /// All that Slack sends.
    Everything,
}

#[derive(Clone, Debug)]
pub struct Telegram {
    /// `BOT:SECRET`.
    pub token: Option<SecretString>,
    /// What `setWebhook` was given as `secret_token`; several while one is changed.
    pub webhook_secrets: Vec<SecretString>,
    pub agent: Option<String>,
    /// Without a slash at its end.
    pub base_url: String,
    pub allow: Allowed,
}

#[derive(Clone, Debug, Default)]
pub struct Webhook {
    /// `whsec_…`; several while one is changed. What comes in has to be signed with one, what goes out is with each.
    pub secrets: Vec<SecretString>,
    pub agent: Option<String>,
    /// Where replies are posted to. `None`: they are read by the API.
    pub reply_url: Option<url::Url>,
    /// `reply_url` may be a name of an address that is reachable only from within.
    pub private_network: bool,
}

/// Who may write to an agent. Both lists must agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Ids of users; `*` for everybody. `None`: nothing was said about them.
    pub users: Option<Vec<String>>,
    /// Ids of channels, or of chats. `None`: all.
    pub channels: Option<Vec<String>>,
}

impl Allowed {
    /// Whether a message of `user` in `channel` is taken.
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
            base_url: "https://api.telegram.org".to_owned(),
            allow: Allowed::default(),
        }
    }
}

/// Reads it.
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
    let slack = Slack {
        token: section.secret("token", |_| None),
        signing_secrets: section.secrets("signing_secrets"),
        agent: agent(&mut section),
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
    let telegram = Telegram {
        token: section.secret("token", |token| {
            // It becomes part of an address.
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
        agent: agent(&mut section),
        base_url: base_url(&mut section).unwrap_or(Telegram::default().base_url),
        allow: allowed(&mut section),
    };
    section.finish();
    telegram
}

fn webhook(mut section: Section<'_>) -> Webhook {
    let webhook = Webhook {
        secrets: section.secrets("secrets"),
        agent: agent(&mut section),
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

fn agent(section: &mut Section<'_>) -> Option<String> {
    section.text("agent", "must be the name of an agent", |text| (!text.is_empty()).then(|| text.to_owned()))
}

fn allowed(section: &mut Section<'_>) -> Allowed {
    Allowed { users: section.list("allow_users"), channels: section.list("allow_channels") }
}
