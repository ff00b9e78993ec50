//! A session's files at one moment: the tree of a snapshot, and the packs that hold it.
//!
//! A file is cut into pieces, and a folder is the list of what it holds. Each piece and each folder is an object with
//! the SHA-256 of its bytes for its name, so the name of the root folder stands for every byte below it. A pack is a
//! blob with objects. A snapshot names each pack that holds one of its objects, so it needs no earlier snapshot.
#![deny(missing_docs)]

use serde::{Deserialize, Serialize};

/// The most packs of a snapshot in a bundle. Small ones are joined, so that a snapshot names few.
pub const MAX_PACKS: usize = 1000;

/// The files of a session after a step that changed them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The name of the root folder. Two snapshots with the same name have the same files.
    pub tree_sha256: String,
    /// The blobs that hold the tree's objects.
    pub packs: Vec<Pack>,
    /// Number of files and links.
    pub files: u64,
    /// Size of all files together.
    pub bytes: u64,
    /// The newest message of the commit that made it. A fork that contains this message has these files.
    pub message_number: i64,
}

/// A blob with objects of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pack {
    /// The blob's name.
    pub sha256: String,
    /// Its size.
    pub bytes: u64,
}
