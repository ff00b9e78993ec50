//! One cluster: made on first use, started, and gone with the process that started it.
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

/// How long a start may take, crash recovery included, and a stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a server that nobody owns gets to end by itself: the last of a killed process is still shutting down.
const GRACE: Duration = Duration::from_secs(5);

/// Files are not visible as signals, so what others write is looked at this often.
const LOOK: Duration = Duration::from_millis(10);

const PORT: u16 = 5432;

/// How to start a [`Cluster`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Holds the cluster, its log and its socket; others may keep their data beside these. Made if it is missing,
    /// moved by [`reachable`](super::reachable).
    pub data_dir: PathBuf,
    /// False only for data that may be lost: a crash of the machine leaves it broken.
    pub fsync: bool,
    /// More `postgresql.conf` settings, by name.
    pub settings: Vec<(String, String)>,
}

impl Options {
    /// Durable, with the server's own settings.
    pub fn new(data_dir: impl Into<PathBuf>) -> Options {
        Options { data_dir: data_dir.into(), fsync: true, settings: Vec::new() }
    }
}

/// A running server on a Unix socket that only its account and root can reach.
///
/// Its data is in `<data_dir>/postgres-<major version>` and lasts. The server stops with [`Cluster::stop`], on
/// drop, and on Linux also when the process dies of SIGKILL. At most one process starts a server in a data
/// directory; any other gets the running one, which it cannot stop.
#[derive(Debug)]
pub struct Cluster {
    data_dir: PathBuf,
    socket_dir: PathBuf,
    port: u16,
    server: Option<Child>,
    /// Locked as long as this process owns the data directory. The kernel lets it go, however the process ends.
    _owner: Option<File>,
}

impl Cluster {
    /// Starts the server in `options.data_dir` and returns when it takes connections; a first start makes the
    /// cluster. Blocks for up to a minute: call it from `spawn_blocking` in async code.
    ///
    /// After a crash of the former process this waits for its server to end. A server that runs on there, of
    /// another living process or started by hand, is used as it is, without `fsync` and `settings`.
    pub fn start(options: Options) -> Result<Cluster> {
        let account = Account::of_server()?;
        let data_dir = directory::place(&options.data_dir, &account)?;
        directory::make(&data_dir, &account)?;
        let binaries = choose(Binaries::find_all()?, &data_dir).map_or_else(Binaries::find, Ok)?;
        let pgdata = data_dir.join(format!("postgres-{}", binaries.major));

        let lock_path = pgdata.with_extension("lock");
        let lock =
            File::create(&lock_path).with_context(|| format!("{} cannot be made", lock_path.display()))?;
        let deadline = Instant::now() + PATIENCE;
        while !try_lock(&lock)? {
            if let Some(running) = pidfile::read(&pgdata).filter(pidfile::Running::answers) {
                return Ok(Cluster::adopted(data_dir, running, None));
            }
            if Instant::now() > deadline {
                bail!("Another process holds {} and its Postgres does not answer", pgdata.display());
            }
            std::thread::sleep(LOOK);
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
        // The terminal's Ctrl-C is for the worker, which still needs its database to drain.
        command.process_group(0);

        let server = Child::spawn(command, libc::SIGINT)?;
        let ready = || pidfile::read(&pgdata).is_some_and(|file| file.pid == server.pid() && file.answers());
        let deadline = Instant::now() + PATIENCE;
        while !ready() {
            if let Some(status) = server.wait(LOOK) {
                bail!("Postgres ended at once ({status}). {} ends with:\n{}", log.display(), tail(&log));
            }
            if Instant::now() > deadline {
                server.signal(libc::SIGQUIT);
                bail!("Postgres is not ready after a minute. {} ends with:\n{}", log.display(), tail(&log));
            }
        }
        Ok(Cluster { data_dir, socket_dir, port: PORT, server: Some(server), _owner: Some(lock) })
    }

    /// The server that runs in a data directory, of whichever process; none is started.
    pub fn running(data_dir: &Path) -> Result<Option<Cluster>> {
        let data_dir = directory::reachable(data_dir)?;
        let running = clusters(&data_dir)
            .iter()
            .filter_map(|pgdata| pidfile::read(pgdata))
            .find(pidfile::Running::answers);
        Ok(running.map(|running| Cluster::adopted(data_dir, running, None)))
    }

    /// Deletes the clusters of a data directory, of every version, and nothing else in it. Blocks while the server
    /// of a killed process ends; fails if a server stays.
    pub fn remove(data_dir: &Path) -> Result<()> {
        for pgdata in clusters(&directory::reachable(data_dir)?) {
            let lock = open_lock(&pgdata)?;
            if !try_lock(&lock)? || wait_for_former(&pgdata)?.is_some() {
                bail!("A Postgres runs in {}. Stop it first", pgdata.display());
            }
            // Renamed first: a kill on the way leaves what the next start removes.
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

    /// The URL of a database in this cluster, for sqlx and for libpq. The user is the superuser `postgres`;
    /// the database `postgres` exists from the start.
    pub fn url(&self, database: &str) -> String {
        url(&self.socket_dir, self.port, database)
    }

    /// The URL that a server of Wakeful's own in this data directory has, whether one runs or not.
    pub fn future_url(data_dir: &Path, database: &str) -> Result<String> {
        let data_dir = directory::reachable(data_dir)?;
        Ok(url(&directory::socket_path(&data_dir, PORT), PORT, database))
    }

    /// The data directory that is really used: see [`reachable`](super::reachable).
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Whether this process started the server, and so ends it.
    pub fn is_own(&self) -> bool {
        self.server.is_some()
    }

    /// The process id of the server if this process started it.
    pub fn pid(&self) -> Option<i32> {
        self.server.as_ref().map(Child::pid)
    }

    /// Ends the server, open connections included, and returns when it is gone; what was committed is kept. A
    /// server of another process is left alone.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(server) = self.server.take() else { return Ok(()) };
        for (signal, patience) in [(libc::SIGINT, PATIENCE), (libc::SIGQUIT, GRACE), (libc::SIGKILL, GRACE)] {
            server.signal(signal);
            if server.wait(patience).is_some() {
                if !self.socket_dir.starts_with(&self.data_dir) {
                    // Ours alone, empty now, and made anew by the next start.
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

/// The server of the version that the data was made with, if it is still installed, else the first.
fn choose(all: Vec<Binaries>, data_dir: &Path) -> Option<Binaries> {
    let with_data = all.iter().find(|one| data_dir.join(format!("postgres-{}", one.major)).exists());
    with_data.or(all.first()).cloned()
}

/// The clusters in a data directory, of whichever versions.
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

/// Makes the cluster beside its place and moves it there: a kill on the way leaves no half of one.
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

/// Waits until nobody works in the cluster: the server of a killed process shuts down for a moment.
///
/// Returns the server that stays. The caller holds the lock, so no living Wakeful owns that one.
fn wait_for_former(pgdata: &Path) -> Result<Option<pidfile::Running>> {
    let began = Instant::now();
    loop {
        if !pidfile::in_use(pgdata) {
            // A stale file whose pid is some other program's by now would stop the server from starting.
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
        if began.elapsed() > PATIENCE {
            bail!("A Postgres in {} neither ends nor answers", pgdata.display());
        }
        std::thread::sleep(LOOK);
    }
}

/// A server program under its account, without what the caller's environment says to Postgres.
fn program(binaries: &Binaries, name: &str, account: &Account) -> Command {
    let mut command = Command::new(binaries.program(name));
    // The caller's directory may be closed to the account.
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

/// A path as one entry of a list setting, which commas and spaces would split.
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

/// A log is private, for it may quote what failed. It is appended to, and begins anew when it has grown over 4 MiB.
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

/// Whether a socket takes a connection.
fn connects(socket_dir: &Path, port: u16) -> bool {
    UnixStream::connect(socket_dir.join(format!(".s.PGSQL.{port}"))).is_ok()
}

#[cfg(test)]
#[path = "postgres_test.rs"]
mod tests;
