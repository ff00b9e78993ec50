//! `[[notify]]`: the rules of notifications, and where each is sent.

use super::address::is_address;
use super::problem::Origin;
use super::read::{Section, narrow, spaces};
use super::webhook::webhook_key;
use secrecy::SecretString;
use std::ops::RangeInclusive;
use std::time::Duration;
use wakeful_workflow::notify::{Kind, Rule};
use wakeful_workflow::policy::WebPolicy;

/// One rule.
#[derive(Clone, Debug)]
pub struct Notify {
    pub rule: Rule,
    pub to: To,
    /// The message has links by which its reader may act, once, without a login.
    pub links: bool,
    /// How long they last.
    pub links_last: Duration,
}

/// Where a rule sends its messages.
#[derive(Clone, Debug)]
pub enum To {
    /// A webhook after Standard Webhooks.
    Webhook {
        url: url::Url,
        /// A message is signed with each.
        secrets: Vec<SecretString>,
        /// The hosts that may be contacted.
        web: WebPolicy,
    },
    /// A channel of Slack, by the bot of `[messenger.slack]`.
    Slack {
        channel: String,
        /// The message has buttons, for those whom `allow_users` of `[messenger.slack]` lists.
        buttons: bool,
    },
    /// An address, by the way out of `[email]`.
    Email { address: String },
}

impl To {
    /// The word in the configuration.
    pub fn as_str(&self) -> &'static str {
        match self {
            To::Webhook { .. } => "webhook",
            To::Slack { .. } => "slack",
            To::Email { .. } => "email",
        }
    }
}

/// What `window_s` and `quiet_s` may be.
const TIMES: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(86_400);

/// Reads all rules. `links`: whether `server.public_url` is set, which links need.
pub(super) fn read(root: &mut Section<'_>, links: bool) -> Vec<Notify> {
    let mut rules: Vec<Notify> = Vec::new();
    for (origin, mut section) in root.tables("notify") {
        let Some(one) = rule(&mut section, &origin, links) else {
            section.finish();
            continue;
        };
        if rules.iter().any(|known| known.rule.name == one.rule.name) {
            let text = format!("two rules of [[notify]] have the name {:?}", one.rule.name);
            section.problem(origin, text);
        }
        section.finish();
        rules.push(one);
    }
    rules
}

fn rule(section: &mut Section<'_>, origin: &Origin, may_link: bool) -> Option<Notify> {
    let name = section.text("name", "must be 1 to 64 letters, digits, - and _", |name| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        ((1..=64).contains(&name.len()) && name.bytes().all(plain)).then(|| name.to_owned())
    });
    let (window, quiet) = (section.seconds("window_s", TIMES), section.seconds("quiet_s", TIMES));
    let rule = name.as_ref().map(|name| Rule {
        name: name.clone(),
        when: kinds(section, origin),
        agents: section.list("agents"),
        spaces: spaces(section),
        window: window.unwrap_or(Duration::from_secs(60)),
        quiet: quiet.unwrap_or(Duration::from_secs(600)),
        per_hour: narrow(section.number("per_hour", 1..=3600), 20),
    });
    if name.is_none() {
        section.problem(origin.clone(), "a rule of [[notify]] needs a name".to_owned());
    }
    let links = section.flag("links").unwrap_or(false);
    if links && !may_link {
        let text =
            "notify.links needs server.public_url: the address under which a person reaches the console";
        section.problem(origin.clone(), text.to_owned());
    }
    let lasts = section.seconds("links_last_s", Duration::from_secs(1)..=Duration::from_secs(604_800));
    let to = to(section, origin);
    Some(Notify { rule: rule?, to: to?, links, links_last: lasts.unwrap_or(Duration::from_secs(86_400)) })
}

fn kinds(section: &mut Section<'_>, origin: &Origin) -> Vec<Kind> {
    let at = section.origin("when").unwrap_or_else(|| origin.clone());
    let Some(words) = section.list("when") else { return Kind::ALL.to_vec() };
    let kinds: Vec<Kind> = words.iter().filter_map(|word| Kind::parse(word)).collect();
    if kinds.len() < words.len() || kinds.is_empty() {
        let known = Kind::ALL.map(Kind::as_str).join(", ");
        section.problem(at, format!("notify.when must have some of: {known}"));
    }
    kinds
}

fn to(section: &mut Section<'_>, origin: &Origin) -> Option<To> {
    let word = section.text("to", "must be webhook, slack or email", |word| {
        ["webhook", "slack", "email"].contains(&word).then(|| word.to_owned())
    });
    let url = section.text("url", "must be an http:// or https:// address without a user name", |text| {
        let url: url::Url = text.parse().ok()?;
        let plain =
            matches!(url.scheme(), "http" | "https") && url.username().is_empty() && url.password().is_none();
        plain.then_some(url)
    });
    let secrets = section.secrets("secrets");
    let web = super::web::policy(section).unwrap_or_default();
    let channel =
        section.text("channel", "must be the id of a channel of Slack, such as C024BE91L", |text| {
            (!text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric())).then(|| text.to_owned())
        });
    let address =
        section.text("address", "must be a mail address", |text| is_address(text).then(|| text.to_owned()));
    let buttons = section.flag("buttons").unwrap_or(false);
    let lacks = |text: &str| {
        section.problem(origin.clone(), text.to_owned());
        None
    };
    match word.as_deref() {
        Some("webhook") => {
            let Some(url) = url else { return lacks("a rule of [[notify]] with to = \"webhook\" needs url") };
            if secrets.is_empty() || secrets.iter().any(|secret| webhook_key(secret).is_none()) {
                return lacks(
                    "a rule of [[notify]] with to = \"webhook\" needs secrets of Standard Webhooks: whsec_ and the Base64 of at \
                     least 24 random bytes, such as what `echo whsec_$(head -c 24 /dev/urandom | base64)` prints",
                );
            }
            Some(To::Webhook { url, secrets, web })
        }
        Some("slack") => match channel {
            Some(channel) => Some(To::Slack { channel, buttons }),
            None => lacks("a rule of [[notify]] with to = \"slack\" needs channel"),
        },
        Some(_) => match address {
            Some(address) => Some(To::Email { address }),
            None => lacks("a rule of [[notify]] with to = \"email\" needs address"),
        },
        None => lacks("a rule of [[notify]] needs to: webhook, slack or email"),
    }
}
