//! `[herald]`: which agent gets the notices of other systems.

use super::read::Section;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Herald {
    /// The agent for notices that name none. `None`: the agent `default`.
    pub agent: Option<String>,
}

/// Reads the section.
pub(super) fn read(mut section: Section<'_>) -> Herald {
    let herald = Herald {
        agent: section.text("agent", "must be the name of an agent", |name| {
            (!name.is_empty()).then(|| name.to_owned())
        }),
    };
    section.finish();
    herald
}
