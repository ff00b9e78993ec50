//! `[email.smtp]` and `[email.dkim]`: outgoing mail.

use super::read::Section;
use secrecy::SecretString;
use std::net::IpAddr;
use std::path::PathBuf;

/// The server that delivers outgoing mail.
#[derive(Clone, Debug)]
pub struct Smtp {
    pub host: String,
    pub port: u16,
    pub security: Security,
    pub user: Option<String>,
    pub password: Option<SecretString>,
    /// PEM of a certificate to trust in addition to the host's.
    pub ca_file: Option<PathBuf>,
    /// The limit for connecting, and for everything before the message itself.
    pub timeout_s: u64,
    /// Maximum number of connections of one process.
    pub max_connections: usize,
}

/// How the connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// Starts unencrypted and switches to TLS before anything is sent.
    Starttls,
    /// TLS from the first byte.
    Tls,
    None,
}

impl Security {
    fn port(self) -> u16 {
        match self {
            Security::Starttls => 587,
            Security::Tls => 465,
            Security::None => 25,
        }
    }
}

/// The key that signs outgoing mail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dkim {
    pub domain: String,
    pub selector: String,
    /// PEM of the private key.
    pub key_file: PathBuf,
}

/// Reads `[email.smtp]`, if present.
pub(super) fn smtp(email: &mut Section<'_>) -> Option<Smtp> {
    let origin = email.origin("smtp");
    let mut section = email.section("smtp");
    let name = "must be a host's name or address, such as smtp.example.org";
    let host = section.text("host", name, |text| {
        let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '_');
        (!text.is_empty() && text.chars().all(sound)).then(|| text.to_owned())
    });
    let plain_at = section.origin("security");
    let security = section
        .text("security", "must be starttls, tls or none", |word| match word {
            "starttls" => Some(Security::Starttls),
            "tls" => Some(Security::Tls),
            "none" => Some(Security::None),
            _ => None,
        })
        .unwrap_or(Security::Starttls);
    let port = section.number("port", 1..=65_535).and_then(|port| u16::try_from(port).ok());
    let allow_plain = section.flag("allow_plain").unwrap_or(false);
    let user_at = section.origin("user");
    let user = section.text("user", "must not be empty", |text| (!text.is_empty()).then(|| text.to_owned()));
    let password = section.secret("password", |_| None);
    let ca_file = section.path("ca_file");
    let timeout_s = section.number("timeout_s", 1..=45).unwrap_or(20).unsigned_abs();
    let connections = section.number("max_connections", 1..=100).unwrap_or(4);
    if let Some(host) = &host {
        let near = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        if let (Security::None, false, false, Some(at)) = (security, near, allow_plain, plain_at) {
            let text = "email.smtp.security = \"none\" sends mail that anybody on the way can read: use \"starttls\" or \"tls\", \
                        or set email.smtp.allow_plain = true for a server on a network that you trust";
            section.problem(at, text.to_owned());
        }
    }
    if let (Some(at), true) = (user_at, user.is_some() != password.is_some()) {
        section.problem(at, "email.smtp.user needs email.smtp.password, or password_file".to_owned());
    }
    section.finish();
    let origin = origin?;
    let Some(host) = host else {
        email.problem(origin, "email.smtp needs host, the mail server's name".to_owned());
        return None;
    };
    Some(Smtp {
        port: port.unwrap_or(security.port()),
        host,
        security,
        user,
        password,
        ca_file,
        timeout_s,
        max_connections: usize::try_from(connections).unwrap_or(4),
    })
}

/// Reads `[email.dkim]`, if present.
pub(super) fn dkim(email: &mut Section<'_>) -> Option<Dkim> {
    let origin = email.origin("dkim");
    let mut section = email.section("dkim");
    let label = |text: &str| {
        let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        (!text.is_empty() && text.chars().all(sound)).then(|| text.to_owned())
    };
    let domain = section.text("domain", "must be a domain, such as example.org", label);
    let selector = section.text("selector", "must be a selector, such as wakeful1", label);
    let key_file = section.path("key_file");
    section.finish();
    let origin = origin?;
    match (domain, selector, key_file) {
        (Some(domain), Some(selector), Some(key_file)) => Some(Dkim { domain, selector, key_file }),
        _ => {
            email.problem(origin, "email.dkim needs domain, selector and key_file".to_owned());
            None
        }
    }
}
