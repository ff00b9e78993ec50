//! Mail addresses, as far as a configuration and a tool check them. The rules are those of the mail crate that sends, so
//! that what is accepted here can be sent to.

use email_address::EmailAddress;
use std::net::IpAddr;

/// Returns true for a mail address by itself, such as `ann@example.org`.
pub fn is_address(text: &str) -> bool {
    text.rsplit_once('@').is_some_and(|(user, domain)| {
        EmailAddress::is_valid_local_part(user)
            && (is_ascii_domain(domain)
                || idna::domain_to_ascii(domain).is_ok_and(|domain| is_ascii_domain(&domain)))
    })
}

/// Returns true for an address by itself and for one after a name: `Ann <ann@example.org>`. The mail crate
/// parses the name again when it sends, and may still refuse it.
pub fn is_named_address(text: &str) -> bool {
    let text = text.trim();
    let Some((name, address)) = text.strip_suffix('>').and_then(|text| text.rsplit_once('<')) else {
        return is_address(text);
    };
    let name = name.trim();
    let is_quoted = name.len() > 1 && name.starts_with('"') && name.ends_with('"');
    let is_name = is_quoted || !name.contains(|c: char| c.is_control() || "()<>[]:;@\\,\"".contains(c));
    is_name && is_address(address)
}

fn is_ascii_domain(domain: &str) -> bool {
    let ip = domain.strip_prefix('[').and_then(|ip| ip.strip_suffix(']')).unwrap_or(domain);
    EmailAddress::is_valid_domain(domain) || ip.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_told_from_what_is_none() {
        for good in ["ann@example.org", "a.b+c@localhost", "ann@[127.0.0.1]", "ann@bücher.example"] {
            assert!(is_address(good) && is_named_address(good), "{good}");
        }
        for bad in ["ann", "@example.org", "ann@", "Ann <ann@example.org>", "ann@exa mple.org", ""] {
            assert!(!is_address(bad), "{bad}");
        }
        for good in
            ["Ann <ann@example.org>", "<ann@example.org>", "\"Ann, B.\" <ann@example.org>", " a@b.example "]
        {
            assert!(is_named_address(good), "{good}");
        }
        for bad in [
            "Ann, B. <ann@example.org>",
            "Ann ann@example.org",
            "Ann <ann@example.org",
            "a\r\nb <a@b.example>",
        ] {
            assert!(!is_named_address(bad), "{bad}");
        }
    }
}
