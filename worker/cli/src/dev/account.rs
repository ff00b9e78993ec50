//! The account that the Postgres server runs as. Postgres refuses to run as root, so root starts it under
//! another account.
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result, bail};

/// The account that runs the server and owns its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    /// True if the process is root and runs the server under this other account.
    pub lent: bool,
}

impl Account {
    /// Returns the process's own account. For root, returns `postgres`, or `nobody` where that user is
    /// missing.
    pub fn of_server() -> Result<Account> {
        // SAFETY: both calls have no preconditions and cannot fail.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        if uid != 0 {
            return Ok(Account { uid, gid, lent: false });
        }
        let accounts = std::fs::read_to_string("/etc/passwd").context("/etc/passwd cannot be read")?;
        let Some((uid, gid)) = ["postgres", "nobody"].iter().find_map(|name| find(&accounts, name)) else {
            bail!(
                "Postgres does not run as root, and /etc/passwd has neither a user postgres nor nobody. \
                 Add one (`useradd --system postgres`), or run as another user"
            );
        };
        Ok(Account { uid, gid, lent: true })
    }

    /// Returns whether the mode bits of this one directory let the account pass through it.
    pub fn may_pass(&self, dir: &Path) -> bool {
        std::fs::metadata(dir).is_ok_and(|meta| {
            let bit = if meta.uid() == self.uid {
                0o100
            } else if meta.gid() == self.gid {
                0o010
            } else {
                0o001
            };
            meta.mode() & bit != 0
        })
    }

    /// Creates `dir` if it is missing and makes it private to this account (mode 0700).
    ///
    /// A symlink, or a directory that another account owns, is an error: in a shared place such as /tmp,
    /// another user may have put it there as a trap.
    pub fn private_dir(&self, dir: &Path) -> Result<()> {
        let shown = dir.display();
        match std::fs::create_dir(dir) {
            Ok(()) if self.lent => chown(dir, Some(self.uid), Some(self.gid))
                .with_context(|| format!("{shown}: chown failed"))?,
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let meta =
                    std::fs::symlink_metadata(dir).with_context(|| format!("{shown} cannot be read"))?;
                if !meta.is_dir() || meta.uid() != self.uid {
                    bail!(
                        "{shown} exists and is not a directory of the server's account (uid {}). Remove it",
                        self.uid
                    );
                }
            }
            Err(error) => return Err(error).with_context(|| format!("{shown} cannot be made")),
        }
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
            .with_context(|| format!("{shown}: chmod failed"))
    }
}

fn find(accounts: &str, name: &str) -> Option<(u32, u32)> {
    let line = accounts.lines().find(|line| line.split(':').next() == Some(name))?;
    let mut fields = line.split(':').skip(2);
    let (uid, gid) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    (uid != 0).then_some((uid, gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_found_by_its_whole_name_and_never_root() {
        let accounts =
            "root:x:0:0::/root:/bin/sh\npostgres2:x:7:7::/:/bin/sh\npostgres:x:101:104:,,,:/:/bin/sh\n";
        assert_eq!(find(accounts, "postgres"), Some((101, 104)));
        assert_eq!(find(accounts, "nobody"), None);
        assert_eq!(find(accounts, "root"), None);
    }

    #[test]
    fn a_symlink_is_no_private_directory() {
        let temp = tempfile::tempdir().unwrap();
        let account = Account::of_server().unwrap();
        std::os::unix::fs::symlink("/tmp", temp.path().join("trap")).unwrap();
        assert!(account.private_dir(&temp.path().join("trap")).is_err());
        let made = temp.path().join("made");
        account.private_dir(&made).unwrap();
        account.private_dir(&made).unwrap();
        assert_eq!(std::fs::metadata(&made).unwrap().mode() & 0o777, 0o700);
    }
}
