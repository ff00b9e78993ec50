//! A Postgres server that lives as long as one command.
use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::IsTerminal;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt;
use tempfile::TempDir;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

use super::binaries::Binaries;
use super::postgres::{Cluster, Options};

/// The variable in which [`exec()`] passes the server to its command: the URL of a database (`postgres`, or
/// the caller's) whose user may create databases.
const URL_VARIABLE: &str = "WAKEFUL_TEST_DATABASE_URL";

const PREFIX: &str = "wakeful-throwaway-";

/// A cluster without fsync, in memory if there is room, else on disk. Dropping it stops and removes it.
///
/// A killed process leaves its directory behind; the next `start` removes that.
#[derive(Debug)]
pub struct Throwaway {
    // The fields are dropped in this order: the server, then its files, then the lock on them.
    cluster: Cluster,
    dir: TempDir,
    _claim: File,
}

impl Throwaway {
    /// Starts a cluster. Blocks for a few seconds, so async code calls it from `spawn_blocking`.
    pub fn start() -> Result<Throwaway> {
        let parent = parent();
        sweep(&parent);
        let dir = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o711))
            .tempdir_in(&parent)
            .with_context(|| format!("No directory in {}", parent.display()))?;
        let claim = File::create(dir.path().join("claim")).context("The throw-away directory")?;
        claim.lock().context("The throw-away directory cannot be locked")?;
        let mut options = Options::new(dir.path());
        options.fsync = false;
        options.settings = [
            // Many test processes run at once, each with its own pools.
            ("max_connections", "400"),
            // Without replicas and archiving, write as little WAL as possible and keep little of it in
            // memory.
            ("wal_level", "minimal"),
            ("max_wal_senders", "0"),
            ("max_wal_size", "256MB"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
        Ok(Throwaway { cluster: Cluster::start(options)?, dir, _claim: claim })
    }

    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The folder that is removed with the cluster. Callers may put files of their own there.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Runs a command with `WAKEFUL_TEST_DATABASE_URL` set, and returns its exit code (128 + n for signal n).
///
/// Uses the server of `WAKEFUL_TEST_DATABASE_URL` or `DATABASE_URL` if one is set, and leaves it running.
/// Otherwise starts a [`Throwaway`], which is gone when this returns. Forwards SIGTERM, SIGHUP and SIGINT to
/// the command.
pub async fn exec(command: &[OsString]) -> Result<i32> {
    let (name, arguments) = command.split_first().context("Name a command to run")?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let given = [URL_VARIABLE, "DATABASE_URL"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|url| !url.is_empty()));
    let (url, throwaway) = match given {
        Some(url) => (url, None),
        None => {
            let throwaway = tokio::task::spawn_blocking(Throwaway::start).await??;
            (throwaway.cluster().url("postgres"), Some(throwaway))
        }
    };
    // A signal that came during the start did not reach the command, which did not exist yet.
    for (stream, number) in
        [(&mut terminate, libc::SIGTERM), (&mut hang_up, libc::SIGHUP), (&mut interrupt, libc::SIGINT)]
    {
        if stream.recv().now_or_never().flatten().is_some() {
            tokio::task::spawn_blocking(move || drop(throwaway)).await?;
            return Ok(128 + number);
        }
    }
    let mut child = Command::new(name)
        .args(arguments)
        .env(URL_VARIABLE, url)
        .env("PATH", path_with_server())
        .spawn()
        .with_context(|| format!("{} does not run", name.display()))?;
    // A terminal sends Ctrl-C to the command too. Do not forward it: some programs treat a second SIGINT
    // differently.
    let own_terminal = std::io::stdin().is_terminal() || std::io::stderr().is_terminal();
    let status = loop {
        let forward = tokio::select! {
            status = child.wait() => break status?,
            Some(()) = terminate.recv() => libc::SIGTERM,
            Some(()) = hang_up.recv() => libc::SIGHUP,
            Some(()) = interrupt.recv() => if own_terminal { continue } else { libc::SIGINT },
        };
        if let Some(pid) = child.id() {
            // SAFETY: no memory is involved, and `id` is None once the child is reaped.
            unsafe { libc::kill(pid as i32, forward) };
        }
    };
    tokio::task::spawn_blocking(move || drop(throwaway)).await?;
    Ok(status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1))
}

/// Returns `PATH` with the server's programs appended, so that pgbench and psql are found even if `PATH`
/// lacks them.
fn path_with_server() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let server = Binaries::find().map(|server| server.dir);
    let dirs = std::env::split_paths(&path).chain(server);
    std::env::join_paths(dirs).unwrap_or(path)
}

/// Returns /dev/shm if it has room for one database per test, else the directory of temporary files.
fn parent() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if free_bytes(memory).is_some_and(|free| free >= 2 << 30) {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    }
}

#[cfg(target_os = "linux")]
fn free_bytes(dir: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let dir = std::ffi::CString::new(dir.as_os_str().as_bytes()).ok()?;
    // SAFETY: a statvfs of zeros is valid, the path ends with NUL, and the call writes only into `room`.
    let room = unsafe {
        let mut room: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(dir.as_ptr(), &mut room) == 0).then_some(room)
    }?;
    Some(room.f_bavail.saturating_mul(room.f_frsize))
}

#[cfg(not(target_os = "linux"))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// Removes the directories of killed processes: those whose lock file nothing holds. Skips fresh ones, which
/// may not be locked yet.
fn sweep(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let claim = entry.path().join("claim");
        let old = |file: &File| {
            let changed = file.metadata().and_then(|meta| meta.modified()).ok();
            changed.and_then(|at| at.elapsed().ok()).is_some_and(|age| age > Duration::from_secs(60))
        };
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX))
            && open_claim(&claim).is_some_and(|file| old(&file) && file.try_lock().is_ok())
        {
            std::fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// Opens a lock file of ours. Every user may write to the folder around it, so another thing may stand in its
/// place: to open a named pipe would wait for its other end.
fn open_claim(path: &Path) -> Option<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().is_ok_and(|meta| meta.is_file()).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_exit_status_of_the_command_comes_back() {
        let run = async |script: &str| exec(&["sh".into(), "-c".into(), script.into()]).await.unwrap();
        assert_eq!(run("exit 7").await, 7);
        assert_eq!(run("kill -TERM $$").await, 143);
        assert_eq!(run("case $WAKEFUL_TEST_DATABASE_URL in postgres*) exit 0;; *) exit 9;; esac").await, 0);
        assert!(exec(&["/nowhere/nothing".into()]).await.is_err());
        assert!(exec(&[]).await.is_err());
    }

    #[test]
    fn a_throwaway_leaves_no_file_and_sweeps_only_what_nobody_holds() {
        let throwaway = Throwaway::start().unwrap();
        let dir = throwaway.dir.path().to_owned();
        let abandoned = dir.with_file_name(format!("{PREFIX}abandoned-{}", std::process::id()));
        std::fs::create_dir(&abandoned).unwrap();
        let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
        for held in [&dir, &abandoned] {
            File::create(held.join("claim")).unwrap().set_modified(hour_ago).unwrap();
        }
        sweep(dir.parent().unwrap());
        assert!(!abandoned.exists());
        assert!(dir.exists());
        drop(throwaway);
        assert!(!dir.exists());
    }

    #[test]
    fn a_named_pipe_in_the_place_of_a_lock_holds_nothing_up() {
        let parent = TempDir::new().unwrap();
        let planted = parent.path().join(format!("{PREFIX}planted"));
        std::fs::create_dir(&planted).unwrap();
        let pipe = planted.join("claim");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let (done, swept) = std::sync::mpsc::channel();
        let path = parent.path().to_owned();
        std::thread::spawn(move || {
            sweep(&path);
            done.send(()).unwrap();
        });
        swept.recv_timeout(Duration::from_secs(30)).expect("it waits for the other end of the pipe");
        assert!(planted.exists());
    }
}
