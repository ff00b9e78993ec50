//! A cluster: created on first use, started, and stopped with the process that started it.
use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::account::Account;
use super::binaries::Binaries;
use super::child::{self, Child};
use super::directory;

mod pidfile;

/// Time that a start may take, crash recovery included, and a stop.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How long to wait for a server whose owner was killed. Such a server shuts down by itself.
const GRACE: Duration = Duration::from_secs(5);

/// Poll interval for files that other processes write.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

const PORT: u16 = 5432;

/// How to start a [`Cluster`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory of the cluster, its log and its socket; other files may be there too. Created if missing,
    /// and possibly moved by [`reachable`](super::reachable).
    pub data_dir: PathBuf,
    /// False only for data that may be lost: without fsync a crash of the machine corrupts it.
    pub fsync: bool,
    /// More `postgresql.conf` settings, by name.
    pub settings: Vec<(String, String)>,
}

impl Options {
    /// Returns options for a durable server with default settings.
    pub fn new(data_dir: impl Into<PathBuf>) -> Options {
        Options { data_dir: data_dir.into(), fsync: true, settings: Vec::new() }
    }
}

/// A running server on a Unix socket that only its account and root can reach.
///
/// Its data is in `<data_dir>/postgres-<major version>` and is kept. [`Cluster::stop`] or a drop stops the
/// server; on Linux a SIGKILL of the process does too. At most one process starts a server in a data
/// directory. Other processes use the running one and cannot stop it.
#[derive(Debug)]
pub struct Cluster {
    data_dir: PathBuf,
    socket_dir: PathBuf,
    port: u16,
    server: Option<Child>,
    /// Locked while this process owns the data directory. The kernel releases the lock when the process ends,
    /// however it ends.
    _owner: Option<File>,
}

impl Cluster {
    /// Starts the server in `options.data_dir` and returns when it accepts connections. The first start
    /// creates the cluster. Blocks for up to a minute, so async code calls it from `spawn_blocking`.
    ///
    /// If the previous owner crashed, waits for its server to end. A server that keeps running, of another
    /// living process or started by hand, is used as it is, without `fsync` and `settings`.
    pub fn start(options: Options) -> Result<Cluster> {
        let account = Account::of_server()?;
        let data_dir = directory::place(&options.data_dir, &account)?;
        directory::make(&data_dir, &account)?;
        let binaries = choose(Binaries::find_all()?, &data_dir).map_or_else(Binaries::find, Ok)?;
        let pgdata = data_dir.join(format!("postgres-{}", binaries.major));

        let lock_path = pgdata.with_extension("lock");
        let lock =
            File::create(&lock_path).with_context(|| format!("{} cannot be made", lock_path.display()))?;
        let deadline = Instant::now() + TIMEOUT;
        while !try_lock(&lock)? {
            if let Some(running) = pidfile::read(&pgdata).filter(pidfile::Running::answers) {
                return Ok(Cluster::adopted(data_dir, running, None));
            }
            if Instant::now() > deadline {
                bail!("Another process holds {} and its Postgres does not answer", pgdata.display());
            }
            std::thread::sleep(POLL_INTERVAL);
        }

        if !pgdata.exists() {
            make_cluster(&binaries, &pgdata, &account, options.fsync)?;
        }
        if let Some(running) = wait_for_former(&pgdata)? {
            tracing::warn!(
                pid = running.pid,
                "A Postgres already runs in {}: using it as it is",
                pgdata.display()
            );
            return Ok(Cluster::adopted(data_dir, running, Some(lock)));
        }
        let socket_dir = directory::socket_dir(&data_dir, PORT, &account)?;
        let log = pgdata.with_extension("log");
        let mut command = program(&binaries, "postgres", &account);
        command.arg("-D").arg(&pgdata);
        setting(&mut command, "listen_addresses", "");
        setting(&mut command, "unix_socket_directories", quoted(&socket_dir));
        setting(&mut command, "port", PORT.to_string());
        for name in ["fsync", "synchronous_commit", "full_page_writes"] {
            setting(&mut command, name, if options.fsync { "on" } else { "off" });
        }
        for (name, value) in &options.settings {
            setting(&mut command, name, value);
        }
        let log_file = open_log(&log)?;
        command.stdout(log_file.try_clone().context("The log's handle")?).stderr(log_file);
        // Keep the terminal's Ctrl-C from Postgres: the worker needs its database while it drains.
        command.process_group(0);

        let server = Child::spawn(command, libc::SIGINT)?;
        let ready = || pidfile::read(&pgdata).is_some_and(|file| file.pid == server.pid() && file.answers());
        let deadline = Instant::now() + TIMEOUT;
        while !ready() {
            if let Some(status) = server.wait(POLL_INTERVAL) {
                bail!("Postgres ended at once ({status}). {} ends with:\n{}", log.display(), tail(&log));
            }
            if Instant::now() > deadline {
                server.signal(libc::SIGQUIT);
                bail!("Postgres is not ready after a minute. {} ends with:\n{}", log.display(), tail(&log));
            }
        }
        Ok(Cluster { data_dir, socket_dir, port: PORT, server: Some(server), _owner: Some(lock) })
    }

    /// Returns the server that runs in a data directory, whichever process started it. Starts none.
    pub fn running(data_dir: &Path) -> Result<Option<Cluster>> {
        let data_dir = directory::reachable(data_dir)?;
        let running = clusters(&data_dir)
            .iter()
            .filter_map(|pgdata| pidfile::read(pgdata))
            .find(pidfile::Running::answers);
        Ok(running.map(|running| Cluster::adopted(data_dir, running, None)))
    }

    /// Deletes the clusters of every version in a data directory, and nothing else in it. Blocks until the
    /// server of a killed process has ended; fails if a server keeps running.
    pub fn remove(data_dir: &Path) -> Result<()> {
        for pgdata in clusters(&directory::reachable(data_dir)?) {
            let lock = open_lock(&pgdata)?;
            if !try_lock(&lock)? || wait_for_former(&pgdata)?.is_some() {
                bail!("A Postgres runs in {}. Stop it first", pgdata.display());
            }
            // Rename first: after a kill during the deletion, the next start removes the rest.
            let going = pgdata.with_extension("new");
            std::fs::remove_dir_all(&going).ok();
            std::fs::rename(&pgdata, &going)
                .and_then(|()| std::fs::remove_dir_all(&going))
                .with_context(|| format!("{} cannot be removed", pgdata.display()))?;
        }
        Ok(())
    }

    fn adopted(data_dir: PathBuf, running: pidfile::Running, owner: Option<File>) -> Cluster {
        let (socket_dir, port) = (running.socket_dir, running.port);
        Cluster { data_dir, socket_dir, port, server: None, _owner: owner }
    }

    /// Returns the URL of a database in this cluster, for sqlx and libpq. The user is the superuser
    /// `postgres`; the database `postgres` always exists.
    pub fn url(&self, database: &str) -> String {
        url(&self.socket_dir, self.port, database)
    }

    /// Returns the URL that Wakeful's own server in this data directory has, running or not.
    pub fn future_url(data_dir: &Path, database: &str) -> Result<String> {
        let data_dir = directory::reachable(data_dir)?;
        Ok(url(&directory::socket_path(&data_dir, PORT), PORT, database))
    }

    /// Returns the data directory in use, which may differ from the requested one: see
    /// [`reachable`](super::reachable).
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Returns whether this process started the server and will stop it.
    pub fn is_own(&self) -> bool {
        self.server.is_some()
    }

    /// Returns the server's pid if this process started it.
    pub fn pid(&self) -> Option<i32> {
        self.server.as_ref().map(Child::pid)
    }

    /// Stops the server, closing open connections, and returns when it is gone. Committed data is kept. A
    /// server of another process is left running.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(server) = self.server.take() else { return Ok(()) };
        for (signal, patience) in [(libc::SIGINT, TIMEOUT), (libc::SIGQUIT, GRACE), (libc::SIGKILL, GRACE)] {
            server.signal(signal);
            if server.wait(patience).is_some() {
                if !self.socket_dir.starts_with(&self.data_dir) {
                    // The directory is ours and empty; the next start creates it again.
                    std::fs::remove_dir(&self.socket_dir).ok();
                }
                return Ok(());
            }
        }
        bail!("Postgres (pid {}) does not end", server.pid())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!("{error:#}");
        }
    }
}

/// Returns the installed server whose version matches existing data, else the first server.
fn choose(all: Vec<Binaries>, data_dir: &Path) -> Option<Binaries> {
    let with_data = all.iter().find(|one| data_dir.join(format!("postgres-{}", one.major)).exists());
    with_data.or(all.first()).cloned()
}

/// Returns the directories of all clusters in a data directory, of any version.
fn clusters(data_dir: &Path) -> Vec<PathBuf> {
    let version = |name: &std::ffi::OsStr| name.to_str()?.strip_prefix("postgres-")?.parse::<u32>().ok();
    std::fs::read_dir(data_dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| version(&entry.file_name()).is_some())
        .map(|entry| entry.path())
        .collect()
}

fn open_lock(pgdata: &Path) -> Result<File> {
    let path = pgdata.with_extension("lock");
    File::create(&path).with_context(|| format!("{} cannot be made", path.display()))
}

fn try_lock(lock: &File) -> Result<bool> {
    match lock.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error).context("The data directory cannot be locked"),
    }
}

/// Creates the cluster under another name and renames it, so that a kill leaves no half-made cluster.
fn make_cluster(binaries: &Binaries, pgdata: &Path, account: &Account, fsync: bool) -> Result<()> {
    let unfinished = pgdata.with_extension("new");
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished)
            .with_context(|| format!("{} of an earlier start cannot be removed", unfinished.display()))?;
    }
    account.private_dir(&unfinished)?;
    let mut command = program(binaries, "initdb", account);
    command.arg("-D").arg(&unfinished);
    command.args(["--username=postgres", "--auth=trust", "--locale=C", "--encoding=UTF8"]);
    if !fsync {
        command.arg("--no-sync");
    }
    child::die_with_this_thread(&mut command, libc::SIGKILL);
    let output = command.output().context("initdb does not run")?;
    if !output.status.success() {
        bail!("initdb failed ({}):\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    }
    std::fs::rename(&unfinished, pgdata).with_context(|| format!("{} cannot be made", pgdata.display()))?;
    if fsync {
        let parent = pgdata.parent().context("A cluster has a parent directory")?;
        File::open(parent).and_then(|dir| dir.sync_all()).context("The data directory cannot be synced")?;
    }
    Ok(())
}

/// Waits until no process works in the cluster: after a kill of its owner, a server needs a moment to shut
/// down.
///
/// Returns the server if it keeps running. The caller holds the lock, so no living Wakeful owns that server.
fn wait_for_former(pgdata: &Path) -> Result<Option<pidfile::Running>> {
    let began = Instant::now();
    loop {
        if !pidfile::in_use(pgdata) {
            // Remove a stale pid file: if another program has that pid by now, Postgres refuses to start.
            #[cfg(target_os = "linux")]
            std::fs::remove_file(pgdata.join("postmaster.pid")).ok();
            return Ok(None);
        }
        let staying = || pidfile::read(pgdata).filter(pidfile::Running::answers);
        if began.elapsed() > GRACE
            && let Some(running) = staying()
        {
            return Ok(Some(running));
        }
        if began.elapsed() > TIMEOUT {
            bail!("A Postgres in {} neither ends nor answers", pgdata.display());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Builds a command for a server program under its account, without the caller's PG* environment variables.
fn program(binaries: &Binaries, name: &str, account: &Account) -> Command {
    let mut command = Command::new(binaries.program(name));
    // The account may have no access to the caller's directory.
    command.stdin(Stdio::null()).current_dir("/").env("LC_ALL", "C");
    for (name, _) in std::env::vars_os() {
        if name.as_bytes().starts_with(b"PG") {
            command.env_remove(name);
        }
    }
    if account.lent {
        command.uid(account.uid).gid(account.gid);
    }
    command
}

fn setting(command: &mut Command, name: &str, value: impl Into<OsString>) {
    let mut argument = OsString::from(format!("{name}="));
    argument.push(value.into());
    command.arg("-c").arg(argument);
}

/// Quotes a path as one entry of a list setting, which commas and spaces would split.
fn quoted(path: &Path) -> OsString {
    let mut bytes = vec![b'"'];
    for byte in path.as_os_str().as_bytes() {
        bytes.extend(std::iter::repeat_n(*byte, if *byte == b'"' { 2 } else { 1 }));
    }
    bytes.push(b'"');
    OsString::from_vec(bytes)
}

fn url(socket_dir: &Path, port: u16, database: &str) -> String {
    let database = percent_encoded(database.as_bytes());
    let host = percent_encoded(socket_dir.as_os_str().as_bytes());
    format!("postgres://postgres@localhost:{port}/{database}?host={host}")
}

fn percent_encoded(bytes: &[u8]) -> String {
    let mut encoded = String::new();
    for byte in bytes {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(*byte as char)
            }
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

/// Opens a log for appending; a log larger than 4 MiB is deleted first. Only the owner may read it, because
/// it may quote user data.
pub(super) fn open_log(path: &Path) -> Result<File> {
    if std::fs::metadata(path).is_ok_and(|meta| meta.len() > 4 << 20) {
        std::fs::remove_file(path).ok();
    }
    File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("{} cannot be opened", path.display()))
}

fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Returns whether the server's socket accepts a connection.
fn connects(socket_dir: &Path, port: u16) -> bool {
    UnixStream::connect(socket_dir.join(format!(".s.PGSQL.{port}"))).is_ok()
}

#[cfg(test)]
#[path = "postgres_test.rs"]
mod tests;
