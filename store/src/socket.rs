//! Sockets to the database give up on a host that vanished.
//!
//! Such a host sends nothing, not even a reset, and by default TCP waits for it for a quarter of an hour. sqlx
//! opens the sockets and has no options for them. So this module finds them among the process's own
//! descriptors. A duplicate of a descriptor stands for the same socket.

use rustix::net::{getpeername, sockopt};
use sqlx::postgres::PgConnectOptions;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Once;
use std::time::Duration;
use tracing::warn;

/// A connection that is silent for this long is asked whether it is alive.
const IDLE: Duration = Duration::from_secs(3);
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// The connection breaks when the other side acknowledges nothing for this long.
const SILENCE: Duration = Duration::from_secs(5);

/// The same limits for the server's side. Without them the server keeps a vanished worker's liveness lock. They
/// mean nothing on a Unix socket.
pub(crate) const SERVER_SETTINGS: [(&str, &str); 4] = [
    ("tcp_keepalives_idle", "3"),
    ("tcp_keepalives_interval", "1"),
    ("tcp_keepalives_count", "5"),
    ("tcp_user_timeout", "5000"),
];

/// Sets the limits on all TCP connections of this process to the database's port. Call it after connecting.
pub(crate) fn limit_silence(options: &PgConnectOptions) {
    if options.get_socket().is_some() || options.get_host().starts_with('/') {
        return;
    }
    let limited = match limit_sockets(options.get_port()) {
        // The connection that was opened a moment ago is among them.
        Ok(0) => Err(io::Error::from(io::ErrorKind::NotFound)),
        other => other,
    };
    if let Err(error) = limited {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            warn!(
                %error,
                "The database's sockets have no limit of silence: if its host vanishes, statements may hang until their deadline"
            );
        });
    }
}

/// Returns how many sockets were limited.
fn limit_sockets(port: u16) -> io::Result<usize> {
    let mut limited = 0;
    for entry in std::fs::read_dir("/proc/self/fd")?.flatten() {
        let is_socket = std::fs::read_link(entry.path())
            .is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        let Some(descriptor) = entry.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()) else {
            continue;
        };
        if !is_socket {
            continue;
        }
        // The descriptor may be closed by now.
        let Ok(socket) = duplicate(descriptor) else { continue };
        let peer = getpeername(&socket).ok().flatten().and_then(|peer| SocketAddr::try_from(peer).ok());
        if peer.is_some_and(|peer| peer.port() == port) {
            limit(&socket)?;
            limited += 1;
        }
    }
    Ok(limited)
}

/// Another descriptor of what `descriptor` stands for. (`pidfd_getfd` would do it without `unsafe`. But the sandboxes of systemd and of
/// Docker keep it for debuggers.)
fn duplicate(descriptor: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call only reads a number. A number that is closed by now is an error, and one that is in use again gives the
    // descriptor of something else, which the caller finds out.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call made it a moment ago, for this process, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

fn limit(socket: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, IDLE)?;
    sockopt::set_tcp_keepintvl(socket, PROBE_EVERY)?;
    sockopt::set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn only_sockets_to_the_port_are_limited() {
        let (database, other) = (listener(), listener());
        let port = database.local_addr().unwrap().port();
        let to_database = TcpStream::connect(database.local_addr().unwrap()).unwrap();
        let to_other = TcpStream::connect(other.local_addr().unwrap()).unwrap();
        assert!(limit_sockets(port).unwrap() >= 1);
        assert!(sockopt::socket_keepalive(&to_database).unwrap());
        assert_eq!(sockopt::tcp_user_timeout(&to_database).unwrap(), 5000);
        assert!(!sockopt::socket_keepalive(&to_other).unwrap());
    }

    /// Forbids this thread a system call, as a sandbox does.
    fn forbid(call: libc::c_long) {
        let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let filter = [
            // The number of the call is the first word of what the filter sees.
            instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
            instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: the program lives until the kernel has copied it.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
        }
    }

    #[test]
    fn sockets_are_limited_in_a_sandbox_that_keeps_some_calls_for_debuggers() {
        // The filter ends with its thread.
        let limited = std::thread::spawn(|| {
            forbid(libc::SYS_pidfd_getfd);
            let database = listener();
            let _connection = TcpStream::connect(database.local_addr().unwrap()).unwrap();
            limit_sockets(database.local_addr().unwrap().port())
        });
        assert!(limited.join().unwrap().unwrap() >= 1);
    }

    fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").unwrap()
    }
}
