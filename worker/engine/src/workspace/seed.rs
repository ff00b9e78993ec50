//! What an agent's sessions begin with: a copy of a folder, or the checkout of a git bundle, which may come from a URL.

use super::folder::{Held, is_of_host};
use super::git::Git;
use super::index::Index;
use super::look::{self, Limits};
use super::tree::MAX_DEPTH;
use crate::web::{Unsaved, Web};
use cap_std::ambient_authority;
use cap_std::fs::{
    Dir, DirBuilder, DirBuilderExt as _, MetadataExt as _, OpenOptions, OpenOptionsExt as _, Permissions,
    PermissionsExt as _,
};
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use wakeful_config::CloneFrom;

/// What a session begins with.
#[derive(Clone, Copy, Debug)]
pub struct Seed<'a> {
    /// Where it is.
    pub from: &'a CloneFrom,
    /// What a URL is fetched through.
    pub web: &'a Web,
}

/// Why a session's files could not begin with their seed.
#[derive(Debug)]
pub(super) enum NotPlanted {
    /// Its URL does not answer now.
    Away(String),
    /// This host's disk does not take it.
    Host(io::Error),
    /// It cannot be copied.
    Refused(String),
}

impl From<String> for NotPlanted {
    fn from(why: String) -> NotPlanted {
        NotPlanted::Refused(why)
    }
}

impl From<Unsaved> for NotPlanted {
    fn from(unsaved: Unsaved) -> NotPlanted {
        match unsaved {
            Unsaved::Away(why) => NotPlanted::Away(why),
            Unsaved::Refused(why) => NotPlanted::Refused(why),
        }
    }
}

impl Seed<'_> {
    /// Makes the session's folder a copy of it, whole or not at all.
    pub(super) async fn plant(
        self,
        held: &Arc<Held>,
        git: Option<&Git>,
        limits: &Limits,
    ) -> Result<Index, NotPlanted> {
        let on_host = Arc::clone(held);
        let (part, bundle) = on_disk(move || on_host.begin_seed().map_err(said)).await?;
        let copied = self.copy(&part, &bundle, git, limits).await;
        let on_host = Arc::clone(held);
        match copied {
            Ok(()) => Ok(on_disk(move || on_host.end_seed(&part).map_err(said)).await?),
            Err(why) => {
                on_disk(move || {
                    on_host.give_up_seed();
                    Ok(())
                })
                .await?;
                Err(why)
            }
        }
    }

    async fn copy(
        self,
        to: &Path,
        bundle: &Path,
        git: Option<&Git>,
        limits: &Limits,
    ) -> Result<(), NotPlanted> {
        let bundle = match self.from {
            CloneFrom::Path(from) => {
                let (from, to, most) = (from.clone(), to.to_owned(), limits.clone());
                let copied = on_disk(move || {
                    if !fs::metadata(&from).map_err(said)?.is_dir() {
                        return Ok(false);
                    }
                    let from = Dir::open_ambient_dir(&from, ambient_authority()).map_err(said)?;
                    copy(&from, &Dir::open_ambient_dir(&to, ambient_authority()).map_err(said)?, &most)?;
                    Ok(true)
                });
                if copied.await? {
                    return Ok(());
                }
                std::path::absolute(self.path()).map_err(said)?
            }
            CloneFrom::Url(url) => {
                let file =
                    fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(bundle);
                let file = file.map_err(said)?;
                self.web.save(url, &file, limits.bytes, limits.time).await?;
                bundle.to_owned()
            }
        };
        let without = || "it is a git bundle, and this host has no git".to_owned();
        Ok(git.ok_or_else(without)?.unbundle(&bundle, to, limits).await?)
    }

    fn path(&self) -> &Path {
        match self.from {
            CloneFrom::Path(path) => path,
            CloneFrom::Url(_) => Path::new(""),
        }
    }
}

async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NotPlanted> + Send + 'static,
) -> Result<T, NotPlanted> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(error.to_string().into()))
}

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
fn copy(from: &Dir, to: &Dir, limits: &Limits) -> Result<(), NotPlanted> {
    let mut left =
        Left { limits, files: limits.files, bytes: limits.bytes, until: Instant::now() + limits.time };
    left.folder(from, to, 0)
}

impl Left<'_> {
    fn folder(&mut self, from: &Dir, to: &Dir, depth: usize) -> Result<(), NotPlanted> {
        if depth > MAX_DEPTH {
            return Err(format!("it is deeper than {MAX_DEPTH} folders").into());
        }
        for entry in from.entries().map_err(said)? {
            let name = entry.map_err(said)?.file_name();
            let metadata = from.symlink_metadata(&name).map_err(said)?;
            let (kind, mode) = (metadata.file_type(), metadata.mode() & 0o777);
            if Instant::now() > self.until {
                let seconds = self.limits.time.as_secs();
                return Err(format!("it was not copied within {seconds} seconds").into());
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
                return Err(format!("{} is neither a file, a folder nor a link", name.display()).into());
            }
        }
        Ok(())
    }
}

fn said(error: io::Error) -> NotPlanted {
    if is_of_host(&error) { NotPlanted::Host(error) } else { NotPlanted::Refused(error.to_string()) }
}
