//! Waits for a file that somebody makes, writes or removes. The kernel tells when something in its folder changes (inotify).

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::{Errno, read};
use std::os::fd::OwnedFd;
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// What comes and goes in a folder.
pub struct Changes(pub OwnedFd);

impl Changes {
    /// Of the folder that `path` is in.
    pub fn of(path: impl AsRef<Path>) -> Changes {
        let folder = path.as_ref().parent().expect("a path in the test's folder");
        let changes =
            inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).expect("the kernel has inotify");
        let kinds = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MODIFY
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO;
        inotify::add_watch(&changes, folder, kinds).expect("the test's folder");
        Changes(changes)
    }

    /// Returns when `is_so`, and leaves the thread to others meanwhile.
    pub async fn until(self, is_so: impl Fn() -> bool) {
        // SAFETY: an `OwnedFd` is the same descriptor for as long as it lives.
        let changes = unsafe { AsyncFd::register(self.0) }.expect("inotify can be polled");
        while !is_so() {
            changes.readable().await.expect("inotify can be polled").clear_ready();
            drain(changes.get_ref());
        }
    }
}

/// Reads what is there, so that the next wait is for what comes.
pub fn drain(changes: &OwnedFd) {
    let mut buffer = [0; 4096];
    while matches!(read(changes, &mut buffer), Ok(1..) | Err(Errno::INTR)) {}
}
