//! `[email]`.

use super::mailboxes::{self, Incoming};
use super::read::Section;
use std::path::PathBuf;

#[derive(Clone, Debug, Default)]
pub struct Email {
    pub maildir: Option<PathBuf>,
    /// The sender of outgoing mail.
    pub from: Option<String>,
    /// Mail that was not sent by this age is never sent. `None`: it never grows too old.
    pub max_age_s: Option<u64>,
    pub incoming: Incoming,
}

/// Reads it.
pub(super) fn read(mut section: Section<'_>) -> Email {
    let email = Email {
        maildir: section.path("maildir"),
        from: section.text("from", "must be a mail address, such as agent@example.org", |text| {
            text.parse::<lettre::message::Mailbox>().is_ok().then(|| text.to_owned())
        }),
        max_age_s: section.number("max_age_s", 1..=31_536_000).map(i64::unsigned_abs),
        incoming: mailboxes::read(&mut section),
    };
    section.finish();
    email
}
