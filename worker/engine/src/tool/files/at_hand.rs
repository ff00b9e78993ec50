//! Reads a small file without a thread, if the kernel has it at hand.
//!
//! A file that has to be fetched keeps its thread: for long on a slow disk, and without an end on a network that is away. So files
//! are read on threads that may block. To hand a call over to one and back costs more than to read a small file that was
//! just used. So this asks the kernel only for what it has in memory: the path comes out of its cache of names
//! (`RESOLVE_CACHED`), the file's type and size are what it knows (`AT_STATX_DONT_SYNC`), and the bytes come out of its cache of
//! pages (`RWF_NOWAIT`). None of these calls waits for a disk, for a server, or for the other end of a pipe.
//!
//! Anything else is left to the thread: a file that is not at hand, a large one, a pipe or a device (it is not even opened), a
//! path that leads out of the workspace, and whatever goes wrong. The thread also has the words for it.

use std::path::Path;

/// Copying this much takes less time than handing the call over.
const MOST: usize = 64 << 10;

/// Returns the whole content of the regular file at `path` below `folder`, if that is small and at hand.
#[cfg(target_os = "linux")]
pub(super) fn read(folder: &Path, path: &Path) -> Option<Vec<u8>> {
    use rustix::io::Errno;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// This kernel, or the file system of the workspaces, does not say what it has at hand.
    static NEVER: AtomicBool = AtomicBool::new(false);
    if NEVER.load(Ordering::Relaxed) {
        return None;
    }
    match linux::read(folder, path) {
        Ok(bytes) => bytes,
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::TOOBIG | Errno::PERM) => {
            NEVER.store(true, Ordering::Relaxed);
            None
        }
        Err(_) => None,
    }
}

/// Other systems do not say what they have at hand.
#[cfg(not(target_os = "linux"))]
pub(super) fn read(_: &Path, _: &Path) -> Option<Vec<u8>> {
    None
}

#[cfg(target_os = "linux")]
mod linux {
    use super::MOST;
    use rustix::fd::{AsFd, OwnedFd};
    use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
    use rustix::io::{ReadWriteFlags, Result, preadv2};
    use std::io::IoSliceMut;
    use std::path::Path;

    pub(super) fn read(folder: &Path, path: &Path) -> Result<Option<Vec<u8>>> {
        let look = OFlags::PATH | OFlags::CLOEXEC;
        let folder = openat2(CWD, folder, look | OFlags::DIRECTORY, Mode::empty(), ResolveFlags::CACHED)?;
        let below = ResolveFlags::CACHED | ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        // A look opens nothing, so a pipe or a device does not notice it.
        if small_file(&openat2(&folder, path, look, Mode::empty(), below)?)?.is_none() {
            return Ok(None);
        }
        // It may be another file by now. Without O_NONBLOCK, opening a pipe would wait for its other end.
        let open = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file: OwnedFd = openat2(&folder, path, open, Mode::empty(), below)?;
        let Some(size) = small_file(&file)? else { return Ok(None) };
        // One byte more shows that the file has grown.
        let mut bytes = vec![0; size + 1];
        let read = preadv2(&file, &mut [IoSliceMut::new(&mut bytes)], 0, ReadWriteFlags::NOWAIT)?;
        bytes.truncate(read);
        // Less was read if a part of the file is not at hand.
        Ok((read == size).then_some(bytes))
    }

    /// The size of a small regular file.
    fn small_file(file: impl AsFd) -> Result<Option<usize>> {
        let known = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let file = statx(file, c"", known, StatxFlags::TYPE | StatxFlags::SIZE)?;
        let is_file = FileType::from_raw_mode(file.stx_mode.into()).is_file();
        Ok(usize::try_from(file.stx_size).ok().filter(|size| is_file && *size <= MOST))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use rustix::io::Errno;
    use std::fs::{self, File};
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    /// A folder, and a file beside it.
    fn folders() -> (tempfile::TempDir, PathBuf) {
        let outer = tempfile::tempdir().expect("a folder");
        let folder = outer.path().join("workspace");
        fs::create_dir_all(folder.join("inside")).expect("a folder");
        fs::write(outer.path().join("secret"), "secret").expect("a file");
        (outer, folder)
    }

    /// `text`, if the file system on which the tests run says what it has at hand.
    fn if_it_says(text: &str) -> Option<Vec<u8>> {
        let (outer, _) = folders();
        at_hand(outer.path(), "secret").map(|_| text.as_bytes().to_vec())
    }

    /// What is read in one of many tries: while other processes rename files or write pages back, the kernel may say for a moment
    /// that nothing is at hand.
    fn at_hand(folder: &Path, path: &str) -> Option<Vec<u8>> {
        (0..1000).find_map(|_| {
            let bytes = read(folder, Path::new(path));
            if bytes.is_none() {
                std::thread::yield_now();
            }
            bytes
        })
    }

    #[test]
    fn a_small_file_that_was_just_written_is_read() {
        let (_outer, folder) = folders();
        let large = "x".repeat(MOST);
        for text in ["", "hello", &large] {
            fs::write(folder.join("inside/text"), text).expect("a file");
            let read = at_hand(&folder, "inside/text");
            assert!(read == if_it_says(text), "{} bytes", text.len());
        }
        symlink("inside/text", folder.join("link")).expect("a link");
        assert!(at_hand(&folder, "link") == if_it_says(&large), "by a link");
    }

    #[test]
    fn everything_else_is_left_to_the_thread_and_nothing_waits() {
        let (outer, folder) = folders();
        fs::write(folder.join("large"), "x".repeat(MOST + 1)).expect("a file");
        for (to, link) in [
            (outer.path().join("secret").as_path(), "absolute"),
            (Path::new("../secret"), "out"),
            (Path::new("../.."), "inside/up"),
            (Path::new("itself"), "itself"),
            (Path::new("/proc/self/environ"), "magic"),
        ] {
            symlink(to, folder.join(link)).expect("a link");
        }
        let (mode, kind) = (Mode::RUSR | Mode::WUSR, FileType::Fifo);
        mknodat(CWD, folder.join("pipe"), kind, mode, 0).expect("a pipe");
        for path in [
            "large",
            "absolute",
            "out",
            "inside/up/secret",
            "itself",
            "magic",
            "pipe",
            "inside",
            "nothing",
            "../secret",
        ] {
            assert_eq!(read(&folder, Path::new(path)), None, "{path}");
        }
        assert_eq!(read(&folder.join("nowhere"), Path::new("large")), None);
    }

    #[test]
    fn a_file_that_only_the_disk_has_is_left_to_the_thread() {
        let (_outer, folder) = folders();
        let path = folder.join("cold");
        fs::write(&path, "x".repeat(MOST)).expect("a file");
        let file = File::open(&path).expect("the file");
        file.sync_all().expect("it is on the disk");
        // SAFETY: the descriptor is open, and the call takes no pointer.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        // Some file systems have everything in memory.
        if linux::read(&folder, Path::new("cold")) == Err(Errno::AGAIN) {
            fs::read(&path).expect("the file");
            assert!(read(&folder, Path::new("cold")).is_some(), "now it is at hand");
        }
    }
}
