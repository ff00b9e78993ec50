//! `[retention]`: how long what has ended is kept.

use super::read::{Section, narrow};
use std::collections::BTreeMap;

/// The database deletes nothing from the audit that is younger.
const AUDIT_DAYS: i64 = 30;

/// After how many days it may be deleted. `None`: it is kept without limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Days {
    /// A session that completed, was cancelled, archived or terminated.
    pub ended: Option<i32>,
    /// A session that failed or needs attention.
    pub failed: Option<i32>,
    /// A session that waits for a person, or never began.
    pub waiting: Option<i32>,
    /// A mail that woke no session.
    pub dropped_mails: Option<i32>,
}

impl Days {
    /// Returns whether anything is ever deleted.
    pub fn any(&self) -> bool {
        *self != Days::default()
    }
}

/// The days for each space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// For spaces without a section of their own.
    pub all: Days,
    /// By space. A key that a space's section lacks is taken from `all`.
    spaces: BTreeMap<String, Days>,
    /// A row of the audit, which belongs to no space. At least 30: the database keeps what is younger.
    pub audit: Option<i32>,
}

impl Retention {
    /// The days of a space.
    pub fn of(&self, space: &str) -> Days {
        self.spaces.get(space).copied().unwrap_or(self.all)
    }

    /// Returns whether anything is ever deleted.
    pub fn any(&self) -> bool {
        self.all.any() || self.spaces.values().any(Days::any)
    }
}

/// Reads `[retention]`.
pub(super) fn read(mut section: Section<'_>) -> Retention {
    let spaces = section.sections("spaces");
    let all = days(&mut section, Days::default());
    let spaces = spaces.into_iter().map(|(name, _, mut of_space)| {
        let days = days(&mut of_space, all);
        of_space.finish();
        (name, days)
    });
    let spaces = spaces.collect();
    let audit = match section.number("audit_days", 0..=36_500) {
        Some(0) | None => None,
        Some(days) => Some(narrow(Some(days.max(AUDIT_DAYS)), i32::MAX)),
    };
    let retention = Retention { all, spaces, audit };
    section.finish();
    retention
}

/// 0 keeps without limit, so that a space can say so where `[retention]` says otherwise.
fn days(section: &mut Section<'_>, default: Days) -> Days {
    let mut read = |key: &str, default: Option<i32>| match section.number(key, 0..=36_500) {
        Some(0) => None,
        Some(days) => Some(narrow(Some(days), i32::MAX)),
        None => default,
    };
    Days {
        ended: read("ended_days", default.ended),
        failed: read("failed_days", default.failed),
        waiting: read("waiting_days", default.waiting),
        dropped_mails: read("dropped_mails_days", default.dropped_mails),
    }
}
