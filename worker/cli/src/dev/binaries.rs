//! Finds the programs of an installed Postgres server.
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The directory that holds `initdb`, `postgres` and `pg_ctl` of one installed server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binaries {
    pub dir: PathBuf,
    /// Major version according to `postgres --version`: 15, 16, …
    pub major: u32,
}

const PROGRAMS: [&str; 3] = ["initdb", "postgres", "pg_ctl"];

const INSTALL: &str = "Install the server: `apt-get install postgresql` (Debian, Ubuntu), `dnf install \
     postgresql-server` (Fedora), `apk add postgresql` (Alpine), `brew install postgresql@17` (macOS); \
     or set PG_BIN to the directory of its programs, or DATABASE_URL to a server that runs";

impl Binaries {
    /// Returns the server to use. If `PG_BIN` is set, it is the only candidate. Otherwise searches `PATH`,
    /// then the places where distributions and Homebrew install servers, newest first. Skips installations
    /// without server programs. The error tells how to install a server.
    pub fn find() -> Result<Binaries> {
        Binaries::find_all()?
            .into_iter()
            .next()
            .with_context(|| format!("No Postgres server found. {INSTALL}"))
    }

    /// Returns every server of the machine, in the order of [`Binaries::find`]. Fails only on a wrong
    /// `PG_BIN`.
    pub fn find_all() -> Result<Vec<Binaries>> {
        let named = std::env::var_os("PG_BIN").filter(|dir| !dir.is_empty());
        let path = std::env::var_os("PATH").unwrap_or_default();
        find_in(named.as_deref(), std::env::split_paths(&path).collect(), installed())
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

fn find_in(named: Option<&OsStr>, path: Vec<PathBuf>, installed: Vec<PathBuf>) -> Result<Vec<Binaries>> {
    if let Some(dir) = named.map(Path::new) {
        if let Some(missing) = PROGRAMS.iter().find(|name| !dir.join(name).is_file()) {
            bail!("PG_BIN is {}, and there is no {missing} in it. {INSTALL}", dir.display());
        }
        return Ok(vec![Binaries { dir: dir.to_owned(), major: major_version(dir)? }]);
    }
    let mut found = Vec::<Binaries>::new();
    for dir in path.into_iter().chain(installed) {
        // A directory may hold links to a server installed elsewhere. Follow them, because the server's other
        // programs are only there.
        let dir = dir
            .join("postgres")
            .canonicalize()
            .ok()
            .and_then(|file| Some(file.parent()?.to_owned()))
            .unwrap_or(dir);
        if found.iter().any(|one| one.dir == dir) || !PROGRAMS.iter().all(|name| dir.join(name).is_file()) {
            continue;
        }
        // Skip a broken installation: a good one may follow.
        match major_version(&dir) {
            Ok(major) => found.push(Binaries { dir, major }),
            Err(error) => tracing::debug!(dir = %dir.display(), "Passed over a Postgres: {error:#}"),
        }
    }
    Ok(found)
}

/// Returns the known `bin` directories outside `PATH`, newest version first.
fn installed() -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    for (parent, prefix) in [
        ("/usr/lib/postgresql", ""),
        ("/usr", "pgsql-"),
        ("/usr/libexec", "postgresql"),
        ("/opt/homebrew/opt", "postgresql@"),
        ("/usr/local/opt", "postgresql@"),
        ("/home/linuxbrew/.linuxbrew/opt", "postgresql@"),
    ] {
        for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if let Some(version) = name.to_str().and_then(|name| name.strip_prefix(prefix)) {
                let version = leading_number(version).unwrap_or(0);
                dirs.extend([(version, entry.path().join("bin")), (version, entry.path())]);
            }
        }
    }
    dirs.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    dirs.into_iter().map(|(_, dir)| dir).filter(|dir| dir.join("postgres").is_file()).collect()
}

fn major_version(dir: &Path) -> Result<u32> {
    let program = dir.join("postgres");
    let output = Command::new(&program)
        .arg("--version")
        .output()
        .with_context(|| format!("{} does not run", program.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    // "postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)"
    said.split_once(") ")
        .and_then(|(_, version)| leading_number(version))
        .with_context(|| format!("{} --version says {:?}", program.display(), said.trim()))
}

fn leading_number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn server(parent: &Path, name: &str, programs: &[&str], version: &str) -> PathBuf {
        let dir = parent.join(name);
        std::fs::create_dir(&dir).unwrap();
        for program in programs {
            let file = dir.join(program);
            std::fs::write(&file, format!("#!/bin/sh\necho 'postgres (PostgreSQL) {version}'\n")).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        dir
    }

    #[test]
    fn a_client_only_installation_is_passed_over() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        let client = server(&root, "client", &["psql", "pg_ctl"], "18.1");
        let old = server(&root, "old", &PROGRAMS, "15.14 (Debian 15.14-0+deb12u1)");
        let beta = server(&root, "beta", &PROGRAMS, "19beta1");
        let found = find_in(None, vec![client, old.clone()], vec![beta.clone(), old.clone()]).unwrap();
        assert_eq!(found, [Binaries { dir: old, major: 15 }, Binaries { dir: beta, major: 19 }]);
    }

    #[test]
    fn a_link_to_a_server_stands_for_the_servers_own_directory() {
        let temp = tempfile::tempdir().unwrap();
        let real = server(&temp.path().canonicalize().unwrap(), "real", &PROGRAMS, "16.1");
        let links = temp.path().join("links");
        std::fs::create_dir(&links).unwrap();
        for program in PROGRAMS {
            std::os::unix::fs::symlink(real.join(program), links.join(program)).unwrap();
        }
        let found = find_in(None, vec![links], vec![real.clone()]).unwrap();
        assert_eq!(found, [Binaries { dir: real, major: 16 }]);
    }

    #[test]
    fn a_wrong_pg_bin_is_an_error_that_names_what_is_missing() {
        let temp = tempfile::tempdir().unwrap();
        let client = server(temp.path(), "client", &["initdb", "pg_ctl"], "18.1");
        let good = server(temp.path(), "good", &PROGRAMS, "17.2");
        let error = find_in(Some(client.as_os_str()), vec![good.clone()], vec![]).unwrap_err().to_string();
        assert!(error.contains("no postgres in it") && error.contains("apt-get install"), "{error}");
        let found = find_in(Some(good.as_os_str()), vec![], vec![]).unwrap();
        assert_eq!(found, [Binaries { dir: good, major: 17 }]);
    }
}
