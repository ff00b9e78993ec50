//! Reads `postmaster.pid`, the file in which a server describes itself, and finds out whether a server runs.
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The lines of `postmaster.pid` that matter here.
#[derive(Debug, PartialEq, Eq)]
pub struct Running {
    pub pid: i32,
    pub port: u16,
    pub socket_dir: PathBuf,
    /// The server wrote that it accepts connections.
    ready: bool,
}

impl Running {
    pub fn answers(&self) -> bool {
        self.ready && super::connects(&self.socket_dir, self.port)
    }
}

/// Returns `None` if the file is missing or incomplete.
pub fn read(pgdata: &Path) -> Option<Running> {
    parse(&std::fs::read(pgdata.join("postmaster.pid")).ok()?)
}

fn parse(file: &[u8]) -> Option<Running> {
    // pid, data directory, start time, port, socket directory, listen address, shared memory, status
    let lines: Vec<&[u8]> = file.split(|byte| *byte == b'\n').collect();
    let text = |line: usize| std::str::from_utf8(lines.get(line)?).ok().map(str::trim);
    Some(Running {
        pid: text(0)?.parse().ok()?,
        port: text(3)?.parse().ok()?,
        socket_dir: PathBuf::from(OsString::from_vec(lines.get(4)?.to_vec())),
        ready: text(7)? == "ready",
    })
}

/// Returns whether any server process, even a leftover one, works in this cluster.
///
/// Server processes have the cluster as their working directory. The pid in the file is weaker evidence:
/// after a restart of the machine or the container, another process may have that pid.
#[cfg(target_os = "linux")]
pub fn in_use(pgdata: &Path) -> bool {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.parse::<i32>().is_ok()))
        .any(|entry| std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == pgdata))
}

/// Returns whether the process of the pid in `postmaster.pid` is alive.
#[cfg(not(target_os = "linux"))]
pub fn in_use(pgdata: &Path) -> bool {
    let first = std::fs::read_to_string(pgdata.join("postmaster.pid")).unwrap_or_default();
    let pid = first.lines().next().and_then(|line| line.trim().parse::<i32>().ok());
    // SAFETY: signal 0 only asks.
    pid.is_some_and(|pid| unsafe { libc::kill(pid, 0) } == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_when_it_is_whole() {
        let whole = b"123\n/data\n1700000000\n5432\n/run/a b\n\n  5570565  32769\nready   \n";
        let running = Running { pid: 123, port: 5432, socket_dir: PathBuf::from("/run/a b"), ready: true };
        assert_eq!(parse(whole), Some(running));
        assert!(
            !parse(&String::from_utf8_lossy(whole).replace("ready", "stopping").into_bytes()).unwrap().ready
        );
        assert_eq!(parse(b"123\n/data\n17000000"), None);
        assert_eq!(parse(b""), None);
    }
}
