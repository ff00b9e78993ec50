//! Finds which of our mailboxes a mail is addressed to.

use lettre::message::Mailbox as Named;
use wakeful_config::email::Email;
use wakeful_workflow::policy::WebPolicy;

/// The `mailbox_id` when no mailbox is configured.
const DEFAULT: &str = "default";

/// One of our mailboxes that a mail is addressed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Addressed<'a> {
    pub mailbox_id: String,
    pub space_id: String,
    /// `None` if neither a mailbox nor `email.from` is configured.
    pub address: Option<String>,
    /// The part after the plus sign in the recipient's address.
    pub token: Option<&'a str>,
    pub agent: Option<String>,
    pub recipients: Option<Vec<String>>,
    pub web: Option<WebPolicy>,
}

impl Addressed<'_> {
    /// The `From` of mail that the mailbox sends: its own address, with the name of `email.from`.
    pub(super) fn from(&self, email: &Email) -> String {
        let named: Option<Named> = email.from.as_deref().and_then(|from| from.parse().ok());
        let own = self.address.as_deref().and_then(|address| address.parse().ok());
        match (named, own) {
            (Some(named), Some(own)) => Named::new(named.name, own).to_string(),
            (Some(named), None) => named.to_string(),
            (None, Some(own)) => Named::new(None, own).to_string(),
            (None, None) => "Wakeful <wakeful@localhost>".to_owned(),
        }
    }
}

/// The mailboxes that `recipients` name, each once. If none is configured, always the default mailbox.
pub(super) fn mailboxes_of<'a>(email: &Email, recipients: &[&'a str]) -> Vec<Addressed<'a>> {
    let mut found: Vec<Addressed<'a>> = Vec::new();
    let mailboxes = &email.incoming.mailboxes;
    if mailboxes.is_empty() {
        let address = sender(email);
        let token = address
            .as_deref()
            .and_then(|own| recipients.iter().find_map(|recipient| match_address(own, recipient)?.token()));
        return vec![Addressed {
            mailbox_id: DEFAULT.to_owned(),
            space_id: email.space().to_owned(),
            address,
            token,
            agent: None,
            recipients: None,
            web: None,
        }];
    }
    for recipient in recipients {
        // Try the exact address first: a mailbox's own address may contain a plus sign.
        let exact = mailboxes.iter().find(|mailbox| mailbox.address.eq_ignore_ascii_case(recipient));
        let named = exact.map(|mailbox| (mailbox, None)).or_else(|| {
            mailboxes
                .iter()
                .find_map(|mailbox| Some((mailbox, match_address(&mailbox.address, recipient)?.token())))
        });
        let Some((mailbox, token)) = named else { continue };
        if let Some(before) = found.iter_mut().find(|before| before.mailbox_id == mailbox.address) {
            before.token = before.token.or(token);
            continue;
        }
        found.push(Addressed {
            mailbox_id: mailbox.address.clone(),
            space_id: mailbox.space().to_owned(),
            address: Some(mailbox.address.clone()),
            token,
            agent: mailbox.agent.clone(),
            recipients: mailbox.recipients.clone(),
            web: mailbox.web.clone(),
        });
    }
    found
}

/// All our own addresses.
pub(super) fn own_addresses(email: &Email) -> Vec<String> {
    let mailboxes = email.incoming.mailboxes.iter().map(|mailbox| mailbox.address.clone());
    mailboxes.chain(sender(email)).collect()
}

fn sender(email: &Email) -> Option<String> {
    let named: Named = email.from.as_deref()?.parse().ok()?;
    Some(named.email.to_string().to_ascii_lowercase())
}

/// How a recipient's address names one of our mailboxes.
enum Match<'a> {
    Exact,
    /// The recipient's address has a plus sign. Contains the part between it and the `@`.
    Plus(&'a str),
}

impl<'a> Match<'a> {
    fn token(self) -> Option<&'a str> {
        match self {
            Match::Exact => None,
            Match::Plus(token) => Some(token),
        }
    }
}

/// Compares `recipient` with the mailbox `own`. `None` if it is another address.
fn match_address<'a>(own: &str, recipient: &'a str) -> Option<Match<'a>> {
    let (own_local, own_domain) = own.rsplit_once('@')?;
    let (local, domain) = recipient.rsplit_once('@')?;
    if !domain.eq_ignore_ascii_case(own_domain) {
        return None;
    }
    if local.eq_ignore_ascii_case(own_local) {
        return Some(Match::Exact);
    }
    let (before, after) = (local.get(..own_local.len())?, local.get(own_local.len()..)?);
    let after = after.strip_prefix('+')?;
    before.eq_ignore_ascii_case(own_local).then_some(Match::Plus(after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wakeful_config::mailboxes::{Incoming, Mailbox};

    fn email(addresses: &[&str]) -> Email {
        let mailboxes = addresses
            .iter()
            .map(|address| Mailbox { address: (*address).to_owned(), ..Mailbox::default() })
            .collect();
        let from = Some("Help <agent@example.org>".to_owned());
        Email { from, incoming: Incoming { mailboxes, ..Incoming::default() }, ..Email::default() }
    }

    #[test]
    fn a_mail_is_for_the_mailboxes_that_it_names_each_once() {
        let email = email(&["support@example.org", "a+b@example.org", "a@example.org"]);
        for (recipients, expected) in [
            (&["Support@Example.org"][..], &[("support@example.org", None)][..]),
            (&["support+t@example.org", "support@example.org"], &[("support@example.org", Some("t"))]),
            (&["a+b@example.org"], &[("a+b@example.org", None)]),
            (&["a+b+c@example.org"], &[("a+b@example.org", Some("c"))]),
            (&["a+c@example.org"], &[("a@example.org", Some("c"))]),
            (&["x@example.org", "support@evil.org", "support", "éé@example.org", ""], &[]),
        ] {
            let found = mailboxes_of(&email, recipients);
            let found: Vec<_> = found.iter().map(|one| (one.mailbox_id.as_str(), one.token)).collect();
            assert_eq!(found, expected, "{recipients:?}");
        }
    }

    #[test]
    fn without_a_mailbox_all_mail_is_for_the_default_one() {
        let email = email(&[]);
        let found = mailboxes_of(&email, &["x@y.de", "agent+t@example.org"]);
        assert_eq!((found[0].mailbox_id.as_str(), found[0].token), ("default", Some("t")));
        assert_eq!(found[0].from(&email), "Help <agent@example.org>");
        assert_eq!(mailboxes_of(&Email::default(), &[])[0].address, None);
    }
}
