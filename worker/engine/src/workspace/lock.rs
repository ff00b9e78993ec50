//! The locks of the folders: one byte of one file for each.
//!
//! A file for each session costs an inode each, and they stay. (On an ext4 without a journal, from which many files had just
//! gone, a worker with many small sessions spent a third of its CPU in making them.) These are locks of open file descriptions
//! (`F_OFD_SETLK` in fcntl(2)): each lock opens the file anew, so two claims of one process exclude each other as two processes
//! do. The system gives a lock back when the process dies.

use super::folder::private;
use sha2::{Digest as _, Sha256};
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

const FILE: &str = "locks";

/// A lock that is held until this is dropped.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    byte: i64,
    _earlier: Option<File>,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file is not enough if a child that is being started still has its descriptor, or on some FUSE filesystems.
        let _ = set(&self.file, libc::F_UNLCK, self.byte);
    }
}

/// Takes the lock of `name` in the state folder, which it makes if need be. `None`: somebody has it.
///
/// # Errors
/// The folder or the file cannot be made or opened.
pub(super) fn take(state: &Path, name: &str) -> io::Result<Option<Lock>> {
    let file = match open(state) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            private(state)?;
            open(state)
        }
        opened => opened,
    }?;
    let byte = byte_of(name);
    match set(&file, libc::F_WRLCK, byte) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
        Err(error) => return Err(error),
    }
    Ok(match of_earlier_build(state, name)? {
        Earlier::Free(earlier) => Some(Lock { file, byte, _earlier: earlier }),
        Earlier::Held => None,
    })
}

fn open(state: &Path) -> io::Result<File> {
    File::options().write(true).create(true).truncate(false).mode(0o600).open(state.join(FILE))
}

/// Two names with one byte would exclude each other, and the second claim would make a folder of its own.
fn byte_of(name: &str) -> i64 {
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(Sha256::digest(name));
    i64::from_be_bytes([a, b, c, d, e, f, g, h]) & (i64::MAX >> 1)
}

/// Locks or unlocks the byte. `WouldBlock`: another one has it.
fn set(file: &File, kind: libc::c_int, byte: i64) -> io::Result<()> {
    // SAFETY: all fields of `flock` are integers. The kernel demands that the pid is 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte;
    lock.l_len = 1;
    // SAFETY: the descriptor is open for as long as `file`, and the kernel only reads `lock`.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

enum Earlier {
    Free(Option<File>),
    Held,
}

/// Earlier builds had a file for each session. One of them may still have a session in hand, so a file that is there is locked too.
/// It does not see our byte: the two kinds of builds may run on one host one after the other, but not side by side for long.
fn of_earlier_build(state: &Path, name: &str) -> io::Result<Earlier> {
    let file = match File::options().write(true).open(state.join(format!("{name}.lock"))) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Earlier::Free(None)),
        Err(error) => return Err(error),
    };
    match file.try_lock() {
        Ok(()) => Ok(Earlier::Free(Some(file))),
        Err(TryLockError::WouldBlock) => Ok(Earlier::Held),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_claims_of_one_process_one_has_the_lock_until_it_is_dropped() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path().join("workspaces/.state");
        let first = take(&state, "a").unwrap().expect("nobody has it");
        assert!(take(&state, "a").unwrap().is_none());
        let other = take(&state, "b").unwrap();
        assert!(other.is_some(), "another session's lock is another byte");
        drop(first);
        assert!(take(&state, "a").unwrap().is_some());
        assert!(take(&state, "b").unwrap().is_none());
    }

    #[test]
    fn a_dropped_lock_is_free_though_a_child_has_its_descriptor_still() {
        let state = tempfile::tempdir().unwrap();
        let first = take(state.path(), "a").unwrap().expect("nobody has it");
        let _of_a_child = first.file.try_clone().unwrap();
        drop(first);
        assert!(take(state.path(), "a").unwrap().is_some());
    }

    #[test]
    fn no_number_of_sessions_leaves_more_than_one_file() {
        let state = tempfile::tempdir().unwrap();
        for number in 0..100 {
            assert!(take(state.path(), &format!("session-{number}")).unwrap().is_some());
        }
        assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_lock_of_an_earlier_build_is_respected() {
        let state = tempfile::tempdir().unwrap();
        let earlier = File::create(state.path().join("a.lock")).unwrap();
        earlier.try_lock().unwrap();
        assert!(take(state.path(), "a").unwrap().is_none());
        drop(earlier);
        let ours = take(state.path(), "a").unwrap();
        assert!(ours.is_some());
        let earlier = File::options().write(true).open(state.path().join("a.lock")).unwrap();
        assert!(
            matches!(earlier.try_lock(), Err(TryLockError::WouldBlock)),
            "an earlier build sees a file that was there"
        );
    }
}
