//! Checks the sender of a mail by the receiving server's `Authentication-Results` (RFC 8601).
//!
//! Anybody can write that header. It counts only if its first word names a trusted server. Only the topmost
//! of those counts, because a server puts its own header above all others. A header that cannot be parsed may
//! be the trusted server's: what a stranger wrote can break it. So it ends the search, and proves nothing.

use super::{MailFacts, domain_of};

/// What DMARC says of a mail's `From`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dmarc {
    Passed,
    /// The domain's own policy says that the mail is forged.
    Failed,
    /// No result counts: none is of a trusted server, or the trusted one cannot be parsed.
    Unknown,
}

impl Dmarc {
    pub fn passed(self) -> bool {
        self == Dmarc::Passed
    }
}

/// What DMARC says of the mail's `From`. `told` is the result reported by the authenticated party that handed
/// over the mail; it overrides the headers.
pub fn dmarc(facts: &MailFacts, told: Option<Dmarc>, trusted: &[String]) -> Dmarc {
    let Some(from) = &facts.from else { return Dmarc::Unknown };
    if let Some(told) = told {
        return told;
    }
    let is_trusted = |results: &Results| trusted.iter().any(|id| id.eq_ignore_ascii_case(&results.server));
    let topmost = facts
        .authentication_results
        .iter()
        .map(|header| parse(header))
        .find(|parsed| parsed.as_ref().is_none_or(is_trusted));
    topmost.flatten().map_or(Dmarc::Unknown, |results| results.verdict(domain_of(&from.address)))
}

/// One parsed header.
#[derive(Debug, PartialEq, Eq)]
struct Results {
    server: String,
    /// Result and `header.from` of each `dmarc`.
    dmarc: Vec<(String, Option<String>)>,
}

impl Results {
    fn verdict(&self, domain: &str) -> Dmarc {
        if self.dmarc.iter().any(|(result, _)| result == "fail") {
            return Dmarc::Failed;
        }
        let passes = !self.dmarc.is_empty()
            && !domain.is_empty()
            && self.dmarc.iter().all(|(result, from)| {
                result == "pass" && from.as_deref().is_some_and(|from| from.eq_ignore_ascii_case(domain))
            });
        if passes { Dmarc::Passed } else { Dmarc::Unknown }
    }
}

fn parse(header: &str) -> Option<Results> {
    let mut clauses = clauses(header)?.into_iter();
    let server = clauses.next()?.split_whitespace().next()?.to_owned();
    let mut dmarc = Vec::new();
    for clause in clauses {
        // `method = result` may have white space around the equals sign, and so may properties.
        let clause = glued(&clause);
        let mut words = clause.split_whitespace();
        let Some((method, result)) = words.next().and_then(|word| word.split_once('=')) else { continue };
        let method = method.split('/').next().unwrap_or_default();
        if !method.eq_ignore_ascii_case("dmarc") {
            continue;
        }
        let mut from = None;
        for (name, value) in words.filter_map(|word| word.split_once('=')) {
            if name.eq_ignore_ascii_case("header.from") {
                // A duplicate `header.from` proves nothing.
                from = match from {
                    None => Some(value.rsplit_once('@').map_or(value, |(_, domain)| domain).to_owned()),
                    Some(_) => Some(String::new()),
                };
            }
        }
        dmarc.push((result.to_ascii_lowercase(), from));
    }
    Some(Results { server, dmarc })
}

/// The header's clauses, without comments and without the quotes of quoted strings. `None` if a comment or a
/// quote does not end.
fn clauses(header: &str) -> Option<Vec<String>> {
    let mut clauses = vec![String::new()];
    let mut characters = header.chars();
    let (mut depth, mut quoted) = (0_usize, false);
    while let Some(character) = characters.next() {
        match character {
            '\\' if depth > 0 || quoted => {
                let escaped = characters.next()?;
                if quoted {
                    push_quoted(clauses.last_mut()?, escaped);
                }
            }
            '"' if depth == 0 => quoted = !quoted,
            _ if quoted => push_quoted(clauses.last_mut()?, character),
            '(' => {
                depth += 1;
                clauses.last_mut()?.push(' ');
            }
            ')' => depth = depth.checked_sub(1)?,
            _ if depth > 0 => {}
            ';' => clauses.push(String::new()),
            _ => clauses.last_mut()?.push(character),
        }
    }
    (depth == 0 && !quoted).then_some(clauses)
}

/// Adds a quoted character. A character that would be syntax outside of quotes becomes one that no name
/// contains.
fn push_quoted(clause: &mut String, character: char) {
    let syntax = character.is_whitespace() || character == '=';
    clause.push(if syntax { '\u{fffd}' } else { character });
}

fn glued(clause: &str) -> String {
    let mut out = String::new();
    for word in clause.split_whitespace() {
        if !out.is_empty() && !out.ends_with('=') && !word.starts_with('=') {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mail::Person;

    fn verdict(headers: &[&str], told: Option<Dmarc>) -> Dmarc {
        let from = Person { name: None, address: "ann@example.com".into() };
        let facts = MailFacts {
            from: Some(from),
            authentication_results: headers.iter().map(|one| (*one).to_owned()).collect(),
            ..MailFacts::default()
        };
        dmarc(&facts, told, &["mx.example.org".to_owned()])
    }

    #[test]
    fn only_the_topmost_result_of_a_trusted_server_for_the_very_domain_counts() {
        let good = "mx.example.org; dmarc=pass header.from=example.com";
        for (headers, passes) in [
            (&[good][..], true),
            (
                &[
                    "MX.example.org 1; spf=pass smtp.mailfrom=x.org; dmarc=pass (p=reject dis=none) header.from=Example.com",
                ],
                true,
            ),
            (&["mx.example.org; dmarc = pass header.from = example.com"], true),
            (&["mx.example.org; dmarc=pass header.from=\"example.com\""], true),
            (&["mx.example.org; dmarc=pass header.from=ann@example.com"], true),
            (&["mx.evil.org; dmarc=pass header.from=example.com", good], true),
            // Forged: below the true header, or by an untrusted server.
            (&["mx.example.org; dmarc=fail header.from=example.com", good], false),
            (&["mx.example.org; none", good], false),
            (&["mx.evil.org; dmarc=pass header.from=example.com"], false),
            (&["mx.example.org.evil.org; dmarc=pass header.from=example.com"], false),
            // The trusted server's header cannot be parsed, and the sender wrote the one below it.
            (&["mx.example.org; spf=pass (a sender's name with one bracket; dmarc=fail", good], false),
            (&["mx.example.org; spf=pass) smtp.mailfrom=x.org", good], false),
            (&["mx.example.org; spf=fail smtp.mailfrom=\"x@evil.org; dmarc=fail", good], false),
            (&["mx.example.org; spf=fail (x\\", good], false),
            (&["; dmarc=fail header.from=example.com", good], false),
            (&["", good], false),
            (&["(mx.example.org); dmarc=fail header.from=example.com", good], false),
            // Another domain, or no domain.
            (&["mx.example.org; dmarc=pass header.from=evil.org"], false),
            (&["mx.example.org; dmarc=pass"], false),
            (&["mx.example.org; dmarc=pass header.from=evil.org header.from=example.com"], false),
            // A pass in a comment, in quotes, in a property of another method, or next to a failure.
            (&["mx.example.org; spf=pass (; dmarc=pass header.from=example.com)"], false),
            (&["mx.example.org; spf=fail reason=\"; dmarc=pass header.from=example.com\""], false),
            (&["mx.example.org; spf=fail reason=\"x\\\"; dmarc=pass header.from=example.com\""], false),
            (&["mx.example.org; spf=pass smtp.mailfrom=\"a dmarc=pass header.from=example.com\""], false),
            (
                &["mx.example.org; dmarc=fail header.from=example.com; dmarc=pass header.from=example.com"],
                false,
            ),
            (&["mx.example.org; xdmarc=pass header.from=example.com"], false),
            (&["mx.example.org; dmarc=pass header.from=example.com (unended"], false),
            (&["(mx.example.org) evil.org; dmarc=pass header.from=example.com"], false),
            (&[], false),
        ] {
            assert_eq!(verdict(headers, None).passed(), passes, "{headers:?}");
        }
    }

    #[test]
    fn whoever_handed_it_over_is_above_every_header() {
        let good = "mx.example.org; dmarc=pass header.from=example.com";
        for told in [Dmarc::Passed, Dmarc::Failed, Dmarc::Unknown] {
            assert_eq!(verdict(&[good], Some(told)), told);
        }
        let nobody = MailFacts { authentication_results: vec![good.to_owned()], ..MailFacts::default() };
        assert_eq!(dmarc(&nobody, Some(Dmarc::Passed), &[]), Dmarc::Unknown, "several senders are none");
    }

    #[test]
    fn a_failure_is_a_failure_only_where_the_trusted_server_says_so() {
        let fail = "mx.example.org; dmarc=FAIL (p=reject) header.from=example.com";
        for (headers, is) in [
            (&[fail][..], Dmarc::Failed),
            (&["mx.example.org; dmarc=fail header.from=evil.org"], Dmarc::Failed),
            (&["mx.example.org; dmarc=pass header.from=example.com; dmarc=fail"], Dmarc::Failed),
            (&["mx.example.org; dmarc=none header.from=example.com"], Dmarc::Unknown),
            (&["mx.example.org; dmarc=temperror"], Dmarc::Unknown),
            (&["mx.example.org; none"], Dmarc::Unknown),
            (&["mx.evil.org; dmarc=fail header.from=example.com"], Dmarc::Unknown),
            (&["mx.example.org; spf=pass (broken", fail], Dmarc::Unknown),
        ] {
            assert_eq!(verdict(headers, None), is, "{headers:?}");
        }
    }
}
