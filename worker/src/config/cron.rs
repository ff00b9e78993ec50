//! `[schedules.NAME]`.

use super::read::Section;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub struct Schedule {}

/// Reads them.
pub(super) fn read(root: &mut Section<'_>) -> BTreeMap<String, Schedule> {
    let mut schedules = BTreeMap::new();
    for (name, _, section) in root.sections("schedules") {
        section.finish();
        schedules.insert(name, Schedule {});
    }
    schedules
}
