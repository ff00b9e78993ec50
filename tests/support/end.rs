//! The end of a child process, as a signal: a pidfd becomes readable when its process has ended.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::process::Child;
use tokio::io::unix::AsyncFd;

/// The end of a child, which may still be ahead. The owner of the child waits for it afterwards.
pub struct End(Option<AsyncFd<OwnedFd>>);

impl End {
    pub fn of(child: &mut Child) -> End {
        if child.try_wait().expect("it can be waited for").is_some() {
            return End(None);
        }
        // If it ends right now, it stays in the process table until the caller waits for it. So the pid is still its own.
        let pid = Pid::from_child(child);
        let fd = pidfd_open(pid, PidfdFlags::NONBLOCK).expect("the kernel has pidfds");
        // SAFETY: an `OwnedFd` is the same descriptor for as long as it lives.
        let fd = unsafe { AsyncFd::register(fd) };
        End(Some(fd.expect("a pidfd can be polled")))
    }

    /// Returns when the child has ended.
    pub async fn reached(&self) {
        if let Some(fd) = &self.0 {
            fd.readable().await.expect("a pidfd can be polled").retain_ready();
        }
    }
}
