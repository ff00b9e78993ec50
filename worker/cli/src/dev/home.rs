//! The data directory of `wakeful dev`: the files in it, and the process that runs there.
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use secrecy::SecretString;

use super::account::Account;
use super::{Cluster, directory, postgres};

/// Time that a process gets to end: to drain its steps, and to shut its server down.
const TIMEOUT: Duration = Duration::from_secs(90);

/// The name of the database.
pub const DATABASE: &str = "wakeful";

/// File of the webhook secret.
const WEBHOOK_SECRET: &str = "webhook.secret";
/// File of the key that signs mail addresses.
const THREAD_SECRET: &str = "thread.secret";

/// File with the address on which the process that runs here listens.
const ADDRESS: &str = "dev.address";

/// The directory and the names of the files in it.
#[derive(Clone, Debug)]
pub struct Home {
    dir: PathBuf,
}

/// The right to run in a data directory. The kernel releases it when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Home {
    /// Returns the requested directory, or the default one. The directory may not exist yet.
    pub fn at(data_dir: Option<&Path>) -> Result<Home> {
        let dir = match data_dir {
            Some(dir) => directory::reachable(dir)?,
            None => directory::default_data_dir()?,
        };
        Ok(Home { dir })
    }

    /// Returns the directory of the `wakeful dev` that started the database of this URL. The socket is below the
    /// data directory, or, where that path was too long for a socket, in the default place.
    pub fn of_database(url: &str) -> Option<Home> {
        let place = wakeful_store::diagnosis::address(url).ok()?;
        let below = place.strip_suffix(&format!("/run/{DATABASE}")).map(PathBuf::from);
        [below.as_deref(), None].into_iter().find_map(|dir| {
            let home = Home::at(dir).ok()?;
            (Cluster::future_url(home.dir(), DATABASE).ok()? == url).then_some(home)
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The Maildir.
    pub fn mail(&self) -> PathBuf {
        self.dir.join("mail")
    }

    /// The folder with one workspace per session.
    pub fn workspaces(&self) -> PathBuf {
        self.dir.join("workspaces")
    }

    /// Returns the secret that signs messages of the generic webhook. The first call creates and stores it.
    pub fn webhook_secret(&self) -> Result<SecretString> {
        self.secret(WEBHOOK_SECRET)
    }

    /// Returns the secret that signs the reply addresses of mails. The first call creates and stores it.
    pub fn thread_secret(&self) -> Result<SecretString> {
        self.secret(THREAD_SECRET)
    }

    fn secret(&self, name: &str) -> Result<SecretString> {
        use base64::Engine as _;
        use std::io::{Read, Write};
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.dir.join(name);
        let cannot = || format!("{} cannot be read or written", path.display());
        match std::fs::read_to_string(&path) {
            Ok(secret) if !secret.trim().is_empty() => return Ok(SecretString::from(secret.trim())),
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(cannot);
            }
            Ok(_) | Err(_) => {}
        }
        let mut key = [0; 32];
        File::open("/dev/urandom")
            .and_then(|mut random| random.read_exact(&mut key))
            .context("/dev/urandom")?;
        let secret = format!("whsec_{}", base64::engine::general_purpose::STANDARD.encode(key));
        let file = File::options().create(true).write(true).truncate(true).mode(0o600).open(&path);
        file.and_then(|mut file| writeln!(file, "{secret}")).with_context(cannot)?;
        Ok(SecretString::from(secret))
    }

    pub fn log(&self) -> PathBuf {
        self.dir.join("wakeful.log")
    }

    /// Writes down where the process that holds the lock listens, for the commands beside it.
    pub fn listens(&self, _: &Lock, at: std::net::SocketAddr) -> Result<()> {
        let path = self.dir.join(ADDRESS);
        std::fs::write(&path, format!("{at}\n"))
            .with_context(|| format!("{} cannot be written", path.display()))
    }

    /// Returns where the process that runs here listens, if one does. Another process must ask: see [`Home::lock`].
    pub fn address(&self) -> Option<std::net::SocketAddr> {
        let written = std::fs::read_to_string(self.dir.join(ADDRESS)).ok()?;
        self.holder().ok()??;
        written.trim().parse().ok()
    }

    /// Opens the log for appending.
    pub fn open_log(&self) -> Result<File> {
        postgres::open_log(&self.log())
    }

    /// Creates the directory and locks it. Returns `None` if another process holds the lock.
    pub fn lock(&self) -> Result<Option<Lock>> {
        directory::make(&self.dir, &Account::of_server()?)?;
        let file = self.open_lock()?;
        // Uses fcntl locks, not flock: the kernel tells which process holds one, so no pid file is needed,
        // which could name a dead process. The price: closing any handle of the file in this process releases
        // the lock, so only other processes may call `holder`.
        let mut lock = whole_file();
        // SAFETY: the descriptor is open, and the call reads only `lock`.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw mut lock) } == 0 {
            return Ok(Some(Lock { _file: file }));
        }
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EAGAIN) => Ok(None),
            Some(_) | None => Err(error).context("The data directory cannot be locked"),
        }
    }

    /// Returns the pid of the process that runs here, if one does.
    pub fn holder(&self) -> Result<Option<i32>> {
        if !self.dir.exists() {
            return Ok(None);
        }
        let file = self.open_lock()?;
        let mut lock = whole_file();
        // SAFETY: the descriptor is open, and the call writes only into `lock`.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) } != 0 {
            return Err(std::io::Error::last_os_error()).context("The data directory's lock cannot be read");
        }
        Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid))
    }

    /// Stops the process that runs here, as Ctrl-C would, and returns its pid when it is gone. Blocks.
    pub fn stop(&self) -> Result<Option<i32>> {
        let Some(pid) = self.holder()? else { return Ok(None) };
        if pid <= 0 {
            bail!("the process that runs in {} is in another container: stop it there", self.dir.display());
        }
        // SAFETY: no memory is involved.
        if unsafe { libc::kill(pid, libc::SIGTERM) } != 0 {
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::ESRCH) {
                return Err(error).with_context(|| format!("process {pid} cannot be stopped"));
            }
        }
        let began = Instant::now();
        while self.holder()? == Some(pid) {
            if began.elapsed() > TIMEOUT {
                bail!("process {pid} does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Some(pid))
    }

    /// Deletes the cluster, mail, workspaces, secrets and the log. Other files in the directory stay. Blocks.
    pub fn empty(&self, _: &Lock) -> Result<()> {
        Cluster::remove(&self.dir)?;
        for path in [
            self.mail(),
            self.workspaces(),
            self.log(),
            self.dir.join(WEBHOOK_SECRET),
            self.dir.join(THREAD_SECRET),
            self.dir.join(ADDRESS),
        ] {
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("{} cannot be removed", path.display()));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn open_lock(&self) -> Result<File> {
        let path = self.dir.join("dev.lock");
        File::options()
            .create(true)
            .read(true)
            .write(true)
            .truncate(false)
            .open(&path)
            .with_context(|| format!("{} cannot be opened", path.display()))
    }
}

fn whole_file() -> libc::flock {
    // SAFETY: a flock of zeros is valid: from the beginning to the end, of whatever length.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock
}
