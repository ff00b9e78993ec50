//! The folder that an agent's sessions begin with.

use super::look::{self, Limits};
use super::tree::MAX_DEPTH;
use cap_std::fs::{
    Dir, DirBuilder, DirBuilderExt as _, MetadataExt as _, OpenOptions, OpenOptionsExt as _, Permissions,
    PermissionsExt as _,
};
use std::io::{self, Read as _};
use std::time::Instant;

/// What is left to copy.
struct Left<'a> {
    limits: &'a Limits,
    files: u64,
    bytes: u64,
    until: Instant,
}

/// Copies files, folders, links and permissions. A link is copied as it is, and not followed.
///
/// # Errors
/// What is wrong with the folder, without its path.
pub(super) fn copy(from: &Dir, to: &Dir, limits: &Limits) -> Result<(), String> {
    let mut left =
        Left { limits, files: limits.files, bytes: limits.bytes, until: Instant::now() + limits.time };
    left.folder(from, to, 0)
}

impl Left<'_> {
    fn folder(&mut self, from: &Dir, to: &Dir, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("it is deeper than {MAX_DEPTH} folders"));
        }
        for entry in from.entries().map_err(said)? {
            let name = entry.map_err(said)?.file_name();
            let metadata = from.symlink_metadata(&name).map_err(said)?;
            let (kind, mode) = (metadata.file_type(), metadata.mode() & 0o777);
            if Instant::now() > self.until {
                return Err(format!("it was not copied within {} seconds", self.limits.time.as_secs()));
            }
            if kind.is_dir() {
                let mut builder = DirBuilder::new();
                builder.mode(0o700);
                to.create_dir_with(&name, &builder).map_err(said)?;
                let (below, copy) = (from.open_dir(&name).map_err(said)?, to.open_dir(&name).map_err(said)?);
                self.folder(&below, &copy, depth + 1)?;
                to.set_permissions(&name, Permissions::from_mode(mode | 0o700)).map_err(said)?;
                continue;
            }
            let too_many = || format!("it has more than {} files", self.limits.files);
            self.files = self.files.checked_sub(1).ok_or_else(too_many)?;
            if kind.is_symlink() {
                let target = from.read_link_contents(&name).map_err(said)?;
                to.symlink_contents(target, &name).map_err(said)?;
            } else if kind.is_file() {
                let mut options = OpenOptions::new();
                options.write(true).create_new(true).mode(0o600);
                let mut copy = to.open_with(&name, &options).map_err(said)?;
                let source = look::open(from, &name).map_err(said)?;
                // One byte more than is allowed shows that there are too many.
                let copied =
                    io::copy(&mut source.take(self.bytes.saturating_add(1)), &mut copy).map_err(said)?;
                let too_large = || format!("it has more than {} bytes", self.limits.bytes);
                self.bytes = self.bytes.checked_sub(copied).ok_or_else(too_large)?;
                copy.set_permissions(Permissions::from_mode(mode)).map_err(said)?;
            } else {
                return Err(format!("{} is neither a file, a folder nor a link", name.display()));
            }
        }
        Ok(())
    }
}

fn said(error: io::Error) -> String {
    error.to_string()
}
