//! `[email.postmark]`, `[email.mailgun]`, `[email.ses]`: the providers that post mail and bounces.

use super::read::Section;
use secrecy::SecretString;

/// The providers that post mail over HTTP. Each is `None` until it is configured.
#[derive(Clone, Debug, Default)]
pub struct EmailProviders {
    pub postmark: Option<Postmark>,
    pub mailgun: Option<Mailgun>,
    pub ses: Option<Ses>,
}

/// The user and passwords that Postmark's webhooks must send.
#[derive(Clone, Debug)]
pub struct Postmark {
    pub user: String,
    /// Several, for rotation. Never empty.
    pub passwords: Vec<SecretString>,
}

#[derive(Clone, Debug)]
pub struct Mailgun {
    /// Several, for rotation. Never empty.
    pub signing_keys: Vec<SecretString>,
    /// How old a signature may be, in seconds.
    pub max_age_s: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ses {
    /// The SNS topics that may send mail and bounces. If empty, nothing is accepted.
    pub topic_arns: Vec<String>,
    /// Replaces `https://sns.REGION.amazonaws.com` for certificates and confirmations. Loopback only, for
    /// tests.
    pub sns_url: Option<url::Url>,
    /// Whether outgoing mail is sent through SES.
    pub send: bool,
    /// `None`: the region that the SDK finds.
    pub region: Option<String>,
    /// `None`: the address of SES.
    pub endpoint_url: Option<String>,
    pub configuration_set: Option<String>,
}

/// Reads the three sections inside `[email]`.
pub(super) fn read(email: &mut Section<'_>) -> EmailProviders {
    EmailProviders {
        postmark: postmark(email.section("postmark")),
        mailgun: mailgun(email.section("mailgun")),
        ses: ses(email.section("ses")),
    }
}

fn postmark(mut section: Section<'_>) -> Option<Postmark> {
    let origin = section.origin("user");
    let rule = "must be a user name without a colon";
    let user = section.text("user", rule, |text| {
        (!text.is_empty() && !text.contains([':', '\n'])).then(|| text.to_owned())
    });
    let passwords = section.secrets("passwords");
    if let Some(origin) = origin
        && user.is_some()
        && passwords.is_empty()
    {
        let text =
            format!("{} is set and {} is not: set both", section.full("user"), section.full("passwords"));
        section.problem(origin, text);
    }
    section.finish();
    Some(Postmark { user: user?, passwords }).filter(|postmark| !postmark.passwords.is_empty())
}

fn mailgun(mut section: Section<'_>) -> Option<Mailgun> {
    let signing_keys = section.secrets("signing_keys");
    let max_age_s = section.number("max_age_s", 60..=86_400).unwrap_or(43_200).unsigned_abs();
    section.finish();
    Some(Mailgun { signing_keys, max_age_s }).filter(|mailgun| !mailgun.signing_keys.is_empty())
}

fn ses(mut section: Section<'_>) -> Option<Ses> {
    let origin = section.origin("topic_arns");
    let topic_arns = section.list("topic_arns").unwrap_or_default();
    if let (Some(origin), Some(wrong)) = (origin, topic_arns.iter().find(|arn| topic_host(arn).is_none())) {
        let key = section.full("topic_arns");
        let text = format!("{key} has {wrong:?}: it must be arn:aws:sns:REGION:ACCOUNT:NAME");
        section.problem(origin, text);
    }
    let plain = |text: &str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        (!text.is_empty() && text.bytes().all(plain)).then(|| text.to_owned())
    };
    let ses = Ses {
        topic_arns,
        sns_url: section.text("sns_url", "must be http:// and a loopback address: it is for tests", loopback),
        send: section.flag("send").unwrap_or(false),
        region: section.text("region", "must be a region, such as eu-central-1", plain),
        endpoint_url: section.text("endpoint_url", "must be an http:// or https:// address", |text| {
            url::Url::parse(text)
                .is_ok_and(|url| matches!(url.scheme(), "http" | "https"))
                .then(|| text.to_owned())
        }),
        configuration_set: section.text(
            "configuration_set",
            "must be a name of letters, digits, - and _",
            plain,
        ),
    };
    section.finish();
    (ses != Ses::default()).then_some(ses)
}

fn loopback(text: &str) -> Option<url::Url> {
    let url = url::Url::parse(text).ok()?;
    let host = url.host_str()?.trim_start_matches('[').trim_end_matches(']');
    let is_loopback = host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    (url.scheme() == "http" && is_loopback).then_some(url)
}

/// The one host that may sign for a topic: SNS in the topic's region. `None` if this is not a topic's ARN.
pub fn topic_host(arn: &str) -> Option<String> {
    let mut parts = arn.split(':');
    let mut next = || parts.next().filter(|part| !part.is_empty());
    let (scheme, partition, service) = (next()?, next()?, next()?);
    let (region, _account, name) = (next()?, next()?, next()?);
    let plain = region.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    let domain = match partition {
        "aws" | "aws-us-gov" => "amazonaws.com",
        "aws-cn" => "amazonaws.com.cn",
        _ => return None,
    };
    let known = scheme == "arn" && service == "sns" && plain && !name.is_empty() && parts.next().is_none();
    known.then(|| format!("sns.{region}.{domain}"))
}
