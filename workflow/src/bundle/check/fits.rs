//! What the parts of the check share: its verdict, bounds, and comparisons.

use crate::bundle::scan;
use sha2::{Digest, Sha256};

/// `Err` holds a text for people that says why a row does not fit.
pub(super) type CheckResult = Result<(), String>;

/// Maximum of any number in a bundle, so that sums cannot overflow.
pub(super) const MOST_NUMBER: i64 = 1 << 40;

pub(super) fn times(times: &[(&str, Option<&String>)]) -> CheckResult {
    match times.iter().find(|(_, time)| time.is_some_and(|time| !scan::is_time(time))) {
        Some((name, _)) => Err(format!("{name}: a time looks like 2026-01-31T12:00:00.000000Z")),
        None => Ok(()),
    }
}

/// A short key in place of an id. The author of a bundle cannot make two of them collide.
pub(super) type Key = [u8; 16];

pub(super) fn key(text: &str) -> Key {
    let digest: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    let mut key = [0; 16];
    key.copy_from_slice(&digest[..16]);
    key
}
