//! Sockets to the database give up on a host that vanished.
//!
//! Such a host sends nothing, not even a reset, and by default TCP waits for it for a quarter of an hour. sqlx
//! opens the sockets and has no options for them. So this module finds them among the process's own
//! descriptors. A duplicate of a descriptor stands for the same socket.

use rustix::net::{getpeername, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use sqlx::postgres::PgConnectOptions;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;
use tracing::debug;

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
    if let Err(error) = limit_sockets(options.get_port()) {
        debug!(%error, "The database's sockets have no limit of silence");
    }
}

fn limit_sockets(port: u16) -> std::io::Result<()> {
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    for entry in std::fs::read_dir("/proc/self/fd")?.flatten() {
        let is_socket = std::fs::read_link(entry.path())
            .is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        let Some(descriptor) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if !is_socket {
            continue;
        }
        // The descriptor may be closed by now.
        let Ok(socket) = pidfd_getfd(&this, descriptor, PidfdGetfdFlags::empty()) else { continue };
        let peer = getpeername(&socket).ok().flatten().and_then(|peer| SocketAddr::try_from(peer).ok());
        if peer.is_some_and(|peer| peer.port() == port) {
            limit(&socket)?;
        }
    }
    Ok(())
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
        limit_sockets(port).unwrap();
        assert!(sockopt::socket_keepalive(&to_database).unwrap());
        assert_eq!(sockopt::tcp_user_timeout(&to_database).unwrap(), 5000);
        assert!(!sockopt::socket_keepalive(&to_other).unwrap());
    }

    fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").unwrap()
    }
}
