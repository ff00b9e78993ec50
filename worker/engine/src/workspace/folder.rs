//! One claim's folder: its lock, its index, and how it is replaced.

use super::NotReady;
use super::codec::Hash;
use super::index::{Index, boot_id};
use super::lock::{self, Lock};
use super::look::{Compare, Fault, Limits, look};
use super::pack::Packed;
use super::restore::{self, Bounds, Spool, Unreadable};
use super::settings::Settings;
use super::snapshot::{self, Made};
use super::tree;
use cap_std::ambient_authority;
use cap_std::fs::Dir;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use wakeful_workflow::workspace::Snapshot;

/// Beside the sessions' folders: locks, indexes, and folders that are being made or thrown away.
pub(super) const STATE_FOLDER: &str = ".state";

/// How long a claim waits for the threads of the one before it.
const LOCK_WAIT: Duration = Duration::from_millis(500);

/// Folders that one claim makes at most. Each but the newest is in the hands of a call that timed out and still runs.
const OWN_FOLDERS: usize = 8;

/// A session's folder on this host, in the hands of one claim. The lock is given back when this is dropped.
#[derive(Debug)]
pub struct Held {
    pub(super) session_id: String,
    pub(super) lease: i64,
    /// Where the files are.
    pub path: PathBuf,
    root: PathBuf,
    /// The name of its files in the state folder: the session's id, or that, the lease and, after a lost call, a number.
    name: String,
    /// Only this claim will ever use the folder.
    own: bool,
    _lock: Lock,
    pub(super) state: tokio::sync::Mutex<State>,
}

/// What is known of the folder.
#[derive(Debug, Default)]
pub(super) struct State {
    pub index: Option<Index>,
    /// Nothing was written since the index was made.
    pub clean: bool,
}

impl State {
    /// Returns whether the folder is known to be what `target` says.
    pub fn is(&self, target: Option<&Snapshot>) -> bool {
        self.clean
            && match (&self.index, target) {
                (Some(index), Some(target)) => is_of(index, target),
                (Some(index), None) => index.packs.is_empty(),
                // Whatever the folder holds, nothing is known of it but what a transcript says.
                (None, None) => true,
                (None, Some(_)) => false,
            }
    }
}

fn is_of(index: &Index, target: &Snapshot) -> bool {
    hash_of_hex(&target.tree_sha256) == Some(index.tree) && index.packs == target.packs
}

pub(super) fn hash_of_hex(text: &str) -> Option<Hash> {
    let mut hash = [0; 32];
    hex::decode_to_slice(text, &mut hash).ok().map(|()| hash)
}

impl Held {
    /// Takes the lock of the session's folder, or makes a folder of the claim's own if another claim still has it.
    pub(super) fn take(settings: &Settings, session_id: &str, lease: i64) -> Result<Held, NotReady> {
        let root = settings.folder.clone();
        // The files of the session have no part in this, so every failure is the host's.
        let lock = |name: &str| lock::take(&root.join(STATE_FOLDER), name).map_err(|error| of_host(&error));
        let began = Instant::now();
        loop {
            if let Some(lock) = lock(session_id)? {
                return Ok(Held::new(root, session_id, session_id.to_owned(), lease, false, lock));
            }
            if began.elapsed() >= LOCK_WAIT {
                break;
            }
            std::thread::sleep(LOCK_WAIT / 10);
        }
        for number in 0..OWN_FOLDERS {
            let name = match number {
                0 => format!("{session_id}.{lease}"),
                _ => format!("{session_id}.{lease}.{number}"),
            };
            if let Some(lock) = lock(&name)? {
                return Ok(Held::new(root, session_id, name, lease, true, lock));
            }
        }
        Err(NotReady::Refused("The workspace is in use by calls that do not end.".to_owned()))
    }

    fn new(root: PathBuf, session_id: &str, name: String, lease: i64, own: bool, lock: Lock) -> Held {
        let state = tokio::sync::Mutex::default();
        Held {
            session_id: session_id.to_owned(),
            lease,
            path: root.join(&name),
            root,
            name,
            own,
            _lock: lock,
            state,
        }
    }

    pub(super) fn state_folder(&self) -> PathBuf {
        self.root.join(STATE_FOLDER)
    }

    fn index_file(&self) -> PathBuf {
        index_file(&self.root, &self.name)
    }

    fn open(&self) -> io::Result<Option<Dir>> {
        match Dir::open_ambient_dir(&self.path, ambient_authority()) {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Compares the folder with `target`. Returns its index if they are the same, `None` if the folder must be made anew.
    pub(super) fn compare(
        &self,
        index: Option<Index>,
        target: Option<&Snapshot>,
        limits: &Limits,
    ) -> Result<Option<Option<Index>>, NotReady> {
        let index = index.or_else(|| Index::decode(&fs::read(self.index_file()).ok()?, &boot_id()));
        let Some(dir) = self.open().map_err(|error| fault(&error))? else {
            // Without a snapshot, a missing folder is a folder without files, or its files are elsewhere.
            return Ok(target.is_none().then_some(None));
        };
        let Some(mut index) = index else {
            // A folder without an index is from before snapshots, or a person put it there. It is left as it is.
            return Ok(target.is_none().then_some(None));
        };
        let expected = match target {
            Some(target) if is_of(&index, target) => index.tree,
            Some(_) => return Ok(None),
            // Nothing that was written in it was ever committed.
            None if index.ours => tree::nothing(),
            None => return Ok(Some(None)),
        };
        match look(&dir, Some(&index), limits, &mut Compare) {
            Ok(looked) if looked.tree == expected => {
                (index.files, index.looked_ns) = (looked.files, looked.began_ns);
                Ok(Some(Some(index)))
            }
            Ok(_) | Err(Fault::Refused(_) | Fault::Changed | Fault::GivenUp) => Ok(None),
            Err(Fault::Io(error)) => Err(fault(&error)),
        }
    }

    /// Looks at the folder and packs what is new. `None`: there is no folder.
    pub(super) fn look(
        &self,
        before: Option<&Index>,
        limits: &Limits,
        packs: &mpsc::Sender<Packed>,
    ) -> Result<Option<Made>, Fault> {
        match self.open()? {
            Some(dir) => snapshot::make(&dir, &self.session_id, before, limits, packs).map(Some),
            None => Ok(None),
        }
    }

    /// Makes the folder, with nothing in it.
    pub(super) fn make_empty(&self) -> Result<Index, NotReady> {
        let index = Index::empty();
        // The index first: a folder with an index is one that Wakeful made, so what a dead step leaves in it goes away.
        self.save(Some(&index));
        private(&self.path).map_err(|error| fault(&error))?;
        Ok(index)
    }

    /// Makes an empty folder under another name, for what the session begins with, and says where a bundle can lie meanwhile.
    pub(super) fn begin_seed(&self) -> io::Result<(PathBuf, PathBuf)> {
        let state = self.state_folder();
        self.remove_parts(&state);
        let part = state.join(format!("{}.part", self.name));
        private(&part)?;
        Ok((part, state.join(format!("{}.bundle", self.name))))
    }

    /// Puts that folder in its place, whole.
    pub(super) fn end_seed(&self, part: &Path) -> io::Result<Index> {
        // Nothing of it is stored yet, so a step that dies leaves a folder that is made anew.
        let index = Index::empty();
        self.save(Some(&index));
        fs::rename(part, &self.path)?;
        self.remove_parts(&self.state_folder());
        Ok(index)
    }

    /// Removes what an attempt has left.
    pub(super) fn give_up_seed(&self) {
        self.remove_parts(&self.state_folder());
    }

    /// Writes the index for the next claim on this host. Without it, that claim restores the files.
    pub(super) fn save(&self, index: Option<&Index>) {
        let Some(index) = index.filter(|_| !self.own) else { return };
        let part = self.index_file().with_extension("part");
        let written = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part);
        let written = written.and_then(|mut file| io::Write::write_all(&mut file, &index.encode(&boot_id())));
        if written.and_then(|()| fs::rename(&part, self.index_file())).is_err() {
            let _ = fs::remove_file(part);
        }
    }

    /// Makes the folder out of a snapshot, under another name, and puts it in its place whole.
    pub(super) fn restore(&self, spool: &Spool, tree: Hash, bounds: &Bounds) -> Result<Index, Unreadable> {
        let state = self.state_folder();
        self.remove_parts(&state);
        let part = state.join(format!("{}.part", self.name));
        private(&part)?;
        let dir = Dir::open_ambient_dir(&part, ambient_authority())?;
        let made = restore::write(spool, tree, &dir, bounds);
        drop(dir);
        let index = match made {
            Ok(index) => index,
            Err(error) => {
                let _ = fs::remove_dir_all(&part);
                return Err(error);
            }
        };
        wakeful_store::failpoint!("K31_rename");
        self.move_away()?;
        fs::rename(&part, &self.path)?;
        self.save(Some(&index));
        Ok(index)
    }

    /// Removes the folder.
    pub(super) fn remove(&self) -> Result<(), NotReady> {
        self.move_away().map_err(|error| fault(&error))?;
        self.remove_parts(&self.state_folder());
        Ok(())
    }

    /// Takes the folder out of its place at once, and then removes it.
    fn move_away(&self) -> io::Result<()> {
        let away = self.state_folder().join(format!("{}.away", self.name));
        let _ = remove_all(&away);
        match fs::rename(&self.path, &away) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // The folder has no place any more, so its index says nothing.
        let _ = fs::remove_file(self.index_file());
        let _ = remove_all(&away);
        Ok(())
    }

    /// Removes what attempts that died have left.
    fn remove_parts(&self, state: &Path) {
        for left in ["part", "away"] {
            let _ = remove_all(&state.join(format!("{}.{left}", self.name)));
        }
        let _ = fs::remove_file(state.join(format!("{}.bundle", self.name)));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.own {
            let _ = remove_all(&self.path);
            self.remove_parts(&self.state_folder());
        }
    }
}

/// Removes a folder, also one whose folders were made read-only.
pub(super) fn remove_all(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            make_writable(path);
            fs::remove_dir_all(path)
        }
        removed => removed,
    }
}

fn make_writable(path: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o700));
    if let Ok(dir) = Dir::open_ambient_dir(path, ambient_authority()) {
        make_folders_writable(&dir);
    }
}

/// Works through handles, which no link can lead elsewhere: a program that a tool has left running may put a link in the place
/// of a folder meanwhile.
fn make_folders_writable(dir: &Dir) {
    use cap_std::fs::PermissionsExt as _;
    for entry in dir.entries().into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let _ = dir.set_permissions(entry.file_name(), cap_std::fs::Permissions::from_mode(0o700));
            if let Ok(below) = dir.open_dir(entry.file_name()) {
                make_folders_writable(&below);
            }
        }
    }
}

pub(super) fn index_file(root: &Path, name: &str) -> PathBuf {
    root.join(STATE_FOLDER).join(format!("{name}.index"))
}

pub(super) fn private(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Leaves out the workspace's path: the model has no use for a path of the host.
fn fault(error: &io::Error) -> NotReady {
    match is_of_host(error) {
        true => of_host(error),
        false => NotReady::Refused(format!("The workspace could not be opened: {error}.")),
    }
}

/// Whether this host is at fault, and not what the files are: the host of another worker may well take them.
pub(crate) fn is_of_host(error: &io::Error) -> bool {
    let out_of_a_resource = [libc::EIO, libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    matches!(
        error.kind(),
        ErrorKind::StorageFull
            | ErrorKind::QuotaExceeded
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::OutOfMemory
    ) || error.raw_os_error().is_some_and(|code| out_of_a_resource.contains(&code))
}

/// For operators: the model is not told, because the step is tried again.
pub(super) fn of_host(error: &io::Error) -> NotReady {
    NotReady::Host(format!("this host cannot keep the session's files: {error}. See its [workspace] dir"))
}
