//! Which directories a cluster lives in.
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::account::Account;

/// Where `wakeful dev` keeps its data unless told: `$XDG_DATA_HOME/wakeful/dev`, or
/// `~/.local/share/wakeful/dev`, as [`reachable`] from the server's account. It may not exist yet.
pub fn default_data_dir() -> Result<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")));
    let data = data
        .context("Neither HOME nor XDG_DATA_HOME says where data goes. Set one, or name a data directory")?;
    reachable(&data.join("wakeful/dev"))
}

/// `requested` made absolute, or the same `/var/tmp/wakeful-<hash of it>` each time where the server's account
/// cannot get to it: root's server runs as another user, and root's home is closed to that one.
pub fn reachable(requested: &Path) -> Result<PathBuf> {
    place(requested, &Account::of_server()?)
}

pub(super) fn place(requested: &Path, account: &Account) -> Result<PathBuf> {
    let shown = requested.display();
    let path = std::path::absolute(requested).with_context(|| format!("{shown} is no path"))?;
    let existing = path.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    let rest = path.strip_prefix(existing).with_context(|| format!("{shown} is no path"))?;
    let existing = existing.canonicalize().with_context(|| format!("{shown} cannot be resolved"))?;
    // join of an empty path would leave a slash at the end, and the server's own directory is compared to this.
    let path = if rest.as_os_str().is_empty() { existing.clone() } else { existing.join(rest) };
    if !account.lent || existing.ancestors().all(|dir| account.may_pass(dir)) {
        return Ok(path);
    }
    Ok(PathBuf::from(format!("/var/tmp/wakeful-{}", hash(&path))))
}

/// Makes a data directory and its parents. Below it others are made private, itself it may be passed through
/// by the server's account.
pub(super) fn make(data_dir: &Path, account: &Account) -> Result<()> {
    let missing: Vec<&Path> = data_dir.ancestors().take_while(|dir| !dir.exists()).collect();
    let mode = if account.lent { 0o711 } else { 0o700 };
    for dir in missing.into_iter().rev() {
        match std::fs::create_dir(dir) {
            // Two first starts at once.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
            made => made.with_context(|| format!("{} cannot be made", dir.display()))?,
        }
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode))
            .with_context(|| format!("{}: chmod failed", dir.display()))?;
    }
    let meta = std::fs::symlink_metadata(data_dir).with_context(|| format!("{}", data_dir.display()))?;
    // Anybody may put a directory of this name into /var/tmp before us.
    if account.lent && data_dir.parent() == Some(Path::new("/var/tmp")) && (meta.uid() != 0 || !meta.is_dir())
    {
        bail!("{} exists and is not a directory of root. Remove it", data_dir.display());
    }
    Ok(())
}

/// The longest path that fits into a socket's address (`sun_path` with its end mark is 108 bytes on Linux, 104 on
/// macOS).
const SOCKET_PATH_MAX: usize = if cfg!(target_os = "linux") { 107 } else { 103 };

/// Makes the private directory of the cluster's socket: in the data directory, or in /tmp if that path is too
/// long for a socket. The same one each time, so that a URL outlives a restart.
pub(super) fn socket_dir(data_dir: &Path, port: u16, account: &Account) -> Result<PathBuf> {
    let dir = socket_path(data_dir, port);
    account.private_dir(&dir)?;
    Ok(dir)
}

/// Where [`socket_dir`] makes it.
pub(super) fn socket_path(data_dir: &Path, port: u16) -> PathBuf {
    let dir = data_dir.join("run");
    if dir.as_os_str().len() + format!("/.s.PGSQL.{port}").len() > SOCKET_PATH_MAX {
        return PathBuf::from(format!("/tmp/wakeful-{}", hash(data_dir)));
    }
    dir
}

/// FNV-1a: it names directories that must be found again by later versions, which std's hasher does not promise.
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
