//! `[chat]`.

use super::read::Section;

#[derive(Clone, Debug, Default)]
pub struct Chat {}

/// Reads it.
pub(super) fn read(section: Section<'_>) -> Chat {
    section.finish();
    Chat {}
}
