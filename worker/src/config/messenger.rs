//! `[messenger]`.

use super::read::Section;

#[derive(Clone, Debug, Default)]
pub struct Messenger {}

/// Reads it.
pub(super) fn read(section: Section<'_>) -> Messenger {
    section.finish();
    Messenger {}
}
