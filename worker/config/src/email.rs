//! `[email]`: who sends mail, by which server, and what comes in.

use super::address::is_named_address;
use super::email_providers::{self, EmailProviders};
use super::mail_out::{self, Dkim, Smtp};
use super::mailboxes::{self, Incoming};
use super::read::Section;
use std::path::PathBuf;
use wakeful_workflow::id::DEFAULT_SPACE;

#[derive(Clone, Debug, Default)]
pub struct Email {
    pub maildir: Option<PathBuf>,
    /// The sender of outgoing mail.
    pub from: Option<String>,
    /// The space of mails whose mailbox names none. `None`: the default one.
    pub space: Option<String>,
    /// A mail that was not sent by this age is never sent. `None`: no limit.
    pub max_age_s: Option<u64>,
    /// `[email.smtp]`.
    pub smtp: Option<Smtp>,
    /// `[email.dkim]`.
    pub dkim: Option<Dkim>,
    pub incoming: Incoming,
    /// `[email.postmark]`, `[email.mailgun]`, `[email.ses]`.
    pub providers: EmailProviders,
}

impl Email {
    /// The space of mails if no mailbox is configured.
    pub fn space(&self) -> &str {
        self.space.as_deref().unwrap_or(DEFAULT_SPACE)
    }
}

/// Reads the section.
pub(super) fn read(mut section: Section<'_>) -> Email {
    let smtp_at = section.origin("smtp");
    let (space, route) = super::read::space_of_default_agent(&mut section);
    let email = Email {
        maildir: section.path("maildir"),
        from: section.text("from", "must be a mail address, such as agent@example.org", |text| {
            is_named_address(text).then(|| text.to_owned())
        }),
        max_age_s: section.number("max_age_s", 1..=31_536_000).map(i64::unsigned_abs),
        providers: email_providers::read(&mut section),
        smtp: mail_out::smtp(&mut section),
        dkim: mail_out::dkim(&mut section),
        incoming: mailboxes::read(&mut section, &route),
        space,
    };
    if let (Some(at), Some(_)) = (smtp_at, &email.smtp) {
        if email.maildir.is_some() {
            let text = "email.maildir and email.smtp are both set, but mail goes out one way: remove one";
            section.problem(at.clone(), text.to_owned());
        }
        if email.from.is_none() {
            section.problem(at, "email.smtp needs email.from, the address that mail is sent from".to_owned());
        }
    }
    // With mailboxes, each says where its mail goes.
    if email.incoming.mailboxes.is_empty() {
        super::read::check_later(&section, route);
    }
    section.finish();
    email
}
