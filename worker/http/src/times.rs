//! Times that callers give.

use chrono::{DateTime, Datelike as _, Utc};
use serde::{Deserialize as _, Deserializer, de::Error as _};

/// Reads a time that Postgres has, and that hours can be added to.
///
/// # Errors
/// For a text that is no time of RFC 3339, and for years before 0 and after 9999.
pub(crate) fn usual<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let time = Option::<DateTime<Utc>>::deserialize(deserializer)?;
    match time {
        Some(time) if !(0..=9999).contains(&time.year()) => {
            Err(D::Error::custom("a time is within the years 0000 to 9999"))
        }
        _ => Ok(time),
    }
}
