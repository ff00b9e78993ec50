//! `[herald]`.

use super::read::Section;

#[derive(Clone, Debug, Default)]
pub struct Herald {}

/// Reads it.
pub(super) fn read(section: Section<'_>) -> Herald {
    section.finish();
    Herald {}
}
