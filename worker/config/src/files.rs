//! The files of sessions: what they begin with, and where their packs are stored.

use std::path::PathBuf;
use std::time::Duration;

/// What the workspaces of an agent's sessions begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CloneFrom {
    /// A folder, or a file that is a git bundle.
    Path(PathBuf),
    /// Where a git bundle is fetched from, under the agent's web policy.
    Url(String),
}

impl CloneFrom {
    /// Whether a worker needs git for it. A path that is not there yet may become a folder.
    pub fn needs_git(&self) -> bool {
        match self {
            CloneFrom::Path(path) => path.is_file(),
            CloneFrom::Url(_) => true,
        }
    }
}

/// Where the packs of sessions' files are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blobs {
    /// A folder or a URL. `None`: Postgres.
    pub store: Option<String>,
    /// Other stores, from which packs are read.
    pub also: Vec<String>,
    /// How long one call of a store outside of Postgres may take, its own retries included.
    pub timeout: Duration,
}

impl Default for Blobs {
    fn default() -> Self {
        Blobs { store: None, also: Vec::new(), timeout: Duration::from_secs(25) }
    }
}
