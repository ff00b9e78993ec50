//! `[web]`: what tools may fetch, and the lists of hosts of agents and mailboxes.

use super::read::{Section, narrow};
use std::time::Duration;
use wakeful_workflow::policy::WebPolicy;

/// What bounds every fetch of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Web {
    /// Hosts that tools may contact though their addresses are private.
    pub private_hosts: Vec<String>,
    /// The largest answer.
    pub max_bytes: usize,
    /// The longest wait for an answer's head.
    pub first_byte: Duration,
    /// The longest duration of a fetch, its redirects included.
    pub total: Duration,
}

impl Default for Web {
    fn default() -> Web {
        Web {
            private_hosts: Vec::new(),
            max_bytes: 4 << 20,
            first_byte: Duration::from_secs(10),
            total: Duration::from_secs(30),
        }
    }
}

/// Reads `[web]`.
pub(super) fn read(mut section: Section<'_>) -> Web {
    let default = Web::default();
    let seconds = |given: Option<i64>, default: Duration| {
        given.map_or(default, |s| Duration::from_secs(narrow(Some(s), 0)))
    };
    let max_kb: usize = narrow(section.number("max_kb", 1..=65_536), default.max_bytes >> 10);
    let web = Web {
        private_hosts: hosts(&mut section, "private_hosts").unwrap_or_default(),
        max_bytes: max_kb << 10,
        first_byte: seconds(section.number("first_byte_s", 1..=600), default.first_byte),
        total: seconds(section.number("total_s", 1..=3600), default.total),
    };
    section.finish();
    web
}

/// Reads `web_allow` and `web_deny`. `None` if neither is given.
pub(super) fn policy(section: &mut Section<'_>) -> Option<WebPolicy> {
    let (allow, deny) = (hosts(section, "web_allow"), hosts(section, "web_deny"));
    (allow.is_some() || deny.is_some()).then(|| WebPolicy { allow, deny: deny.unwrap_or_default() })
}

/// Reads a list of hosts, each as the URL library writes it: names in lower case and in ASCII, and one spelling of
/// each literal address.
fn hosts(section: &mut Section<'_>, key: &str) -> Option<Vec<String>> {
    let origin = section.origin(key);
    let given = section.list(key)?;
    let hosts: Vec<String> = given.iter().filter_map(|one| host(one)).collect();
    if hosts.len() < given.len()
        && let Some(origin) = origin
    {
        let key = section.full(key);
        let text = format!(
            "{key} must have names of hosts only, such as example.org, *.example.org for its subdomains, or * for all"
        );
        section.problem(origin, text);
    }
    Some(hosts)
}

fn host(text: &str) -> Option<String> {
    let (wildcard, name) = text.strip_prefix("*.").map_or(("", text), |name| ("*.", name));
    if text == "*" {
        return Some(text.to_owned());
    }
    let name = name.trim_end_matches('.');
    // Only an address of IPv6 has a colon in it.
    let parsed = match name.parse::<std::net::Ipv6Addr>() {
        Ok(address) => url::Host::Ipv6(address),
        Err(_) => url::Host::parse(name).ok()?,
    };
    match parsed {
        url::Host::Domain(name) if !name.contains('*') => Some(format!("{wildcard}{name}")),
        url::Host::Ipv4(address) if wildcard.is_empty() => Some(address.to_string()),
        url::Host::Ipv6(address) if wildcard.is_empty() => Some(address.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::host;

    #[test]
    fn hosts_are_written_as_urls_write_them() {
        for (given, kept) in [
            ("Example.ORG.", Some("example.org")),
            ("*.bücher.example", Some("*.xn--bcher-kva.example")),
            ("*", Some("*")),
            ("0x7f.1", Some("127.0.0.1")),
            ("2001:DB8::1", Some("2001:db8::1")),
            ("[2001:db8::1]", Some("2001:db8::1")),
            ("*.1.2.3.4", None),
            ("exa*mple.org", None),
            ("https://example.org", None),
            ("example.org/path", None),
            ("example.org:80", None),
            ("", None),
        ] {
            assert_eq!(host(given).as_deref(), kept, "{given:?}");
        }
    }
}
