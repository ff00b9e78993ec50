//! What a tool does with files, and where and how they are kept.

use super::look::Limits;
use std::path::PathBuf;

/// What a tool does with the session's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileUse {
    /// It does not touch them. They are not brought to this host for it.
    #[default]
    None,
    /// It reads them.
    Reads,
    /// It may change them, so a snapshot follows.
    Writes,
}

/// Where sessions' files are kept on this host, and what they may be.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Has one folder per session.
    pub folder: PathBuf,
    pub limits: Limits,
    /// How long the files of a session that rests stay on this host.
    pub keep: std::time::Duration,
    /// The files of sessions that rest longest are removed if all take more than this.
    pub keep_bytes: u64,
}

impl Limits {
    /// Those of a configuration.
    pub fn of(config: &wakeful_config::Workspace) -> Limits {
        Limits {
            files: config.max_files,
            bytes: config.max_bytes,
            time: config.snapshot,
            leave_out: config.leave_out.clone(),
        }
    }
}

impl Settings {
    /// Those of a configuration.
    pub fn of(config: &wakeful_config::Workspace) -> Settings {
        Settings {
            folder: config.folder().to_owned(),
            limits: Limits::of(config),
            keep: config.keep,
            keep_bytes: config.keep_bytes,
        }
    }
}
