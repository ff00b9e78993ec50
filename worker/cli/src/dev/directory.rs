//! Chooses and creates the directories of a cluster.
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::account::Account;

/// Returns the default data directory of `wakeful dev`: `$XDG_DATA_HOME/wakeful/dev`, or
/// `~/.local/share/wakeful/dev`, made [`reachable`] for the server's account. The directory may not exist
/// yet.
pub fn default_data_dir() -> Result<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")));
    let data = data
        .context("Neither HOME nor XDG_DATA_HOME says where data goes. Set one, or name a data directory")?;
    reachable(&data.join("wakeful/dev"))
}

/// Returns `requested` as an absolute path if the server's account can reach it, else `/var/tmp/wakeful-<hash
/// of the path>`, always the same one. Root needs this: its server runs as another user, and root's home is
/// closed to that user.
pub fn reachable(requested: &Path) -> Result<PathBuf> {
    place(requested, &Account::of_server()?)
}

pub(super) fn place(requested: &Path, account: &Account) -> Result<PathBuf> {
    let shown = requested.display();
    let path = std::path::absolute(requested).with_context(|| format!("{shown} is no path"))?;
    let existing = path.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    let rest = path.strip_prefix(existing).with_context(|| format!("{shown} is no path"))?;
    let existing = existing.canonicalize().with_context(|| format!("{shown} cannot be resolved"))?;
    // Joining an empty path would add a slash at the end, and this path is later compared with the server's
    // own.
    let path = if rest.as_os_str().is_empty() { existing.clone() } else { existing.join(rest) };
    if !account.lent || existing.ancestors().all(|dir| account.may_pass(dir)) {
        return Ok(path);
    }
    Ok(PathBuf::from(format!("/var/tmp/wakeful-{}", hash(&path))))
}

/// Creates a data directory and its parents. The directories below it are private; the server's account may
/// pass through the directory itself.
pub(super) fn make(data_dir: &Path, account: &Account) -> Result<()> {
    let missing: Vec<&Path> = data_dir.ancestors().take_while(|dir| !dir.exists()).collect();
    let mode = if account.lent { 0o711 } else { 0o700 };
    for dir in missing.into_iter().rev() {
        match std::fs::create_dir(dir) {
            // Another first start runs at the same time.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
            made => made.with_context(|| format!("{} cannot be made", dir.display()))?,
        }
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode))
            .with_context(|| format!("{}: chmod failed", dir.display()))?;
    }
    let meta = std::fs::symlink_metadata(data_dir).with_context(|| format!("{}", data_dir.display()))?;
    // Any user could have created a directory of this name in /var/tmp before us.
    if account.lent && data_dir.parent() == Some(Path::new("/var/tmp")) && (meta.uid() != 0 || !meta.is_dir())
    {
        bail!("{} exists and is not a directory of root. Remove it", data_dir.display());
    }
    Ok(())
}

/// Longest path that fits into a socket address. `sun_path` with its final NUL is 108 bytes on Linux and 104
/// on macOS.
const SOCKET_PATH_MAX: usize = if cfg!(target_os = "linux") { 107 } else { 103 };

/// Creates the private directory of the cluster's socket: in the data directory, or in /tmp if that path is
/// too long for a socket. Always the same one, so that a URL stays valid after a restart.
pub(super) fn socket_dir(data_dir: &Path, port: u16, account: &Account) -> Result<PathBuf> {
    let dir = socket_path(data_dir, port);
    account.private_dir(&dir)?;
    Ok(dir)
}

/// Returns the directory that [`socket_dir`] creates.
pub(super) fn socket_path(data_dir: &Path, port: u16) -> PathBuf {
    let dir = data_dir.join("run");
    if dir.as_os_str().len() + format!("/.s.PGSQL.{port}").len() > SOCKET_PATH_MAX {
        return PathBuf::from(format!("/tmp/wakeful-{}", hash(data_dir)));
    }
    dir
}

/// FNV-1a. Later versions must find the same directory names, and std's hasher does not promise stable
/// hashes.
fn hash(path: &Path) -> String {
    let hash = path.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_parent_sends_a_lent_account_to_var_tmp_and_always_to_the_same_place() {
        let temp = tempfile::tempdir().unwrap();
        let closed = temp.path().join("closed");
        std::fs::create_dir(&closed).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
        let lent = Account { uid: 4242, gid: 4242, lent: true };
        let placed = place(&closed.join("a/b"), &lent).unwrap();
        assert!(placed.starts_with("/var/tmp"), "{}", placed.display());
        assert_eq!(placed, place(&closed.join("a/b"), &lent).unwrap());
        assert_ne!(placed, place(&closed.join("a/c"), &lent).unwrap());
        assert_eq!(placed, place(&placed, &lent).unwrap());
        let own = Account { lent: false, ..lent };
        assert_eq!(place(&closed.join("a/b"), &own).unwrap(), closed.canonicalize().unwrap().join("a/b"));
    }

    #[test]
    fn a_hash_stays_what_it_was() {
        assert_eq!(hash(Path::new("")), "cbf29ce484222325");
        assert_eq!(hash(Path::new("a")), "af63dc4c8601ec8c");
    }
}
