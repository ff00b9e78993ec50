//! Folders that are stored and made again, with packs in memory.

use super::folder::{Held, STATE_FOLDER};
use super::index::Index;
use super::look::{Compare, Fault, Limits, look};
use super::pack::Packed;
use super::restore::{Bounds, Spool, Unreadable};
use super::settings::Settings;
use super::snapshot::{Made, make};
use super::{Workspaces, tree};
use cap_std::ambient_authority;
use cap_std::fs::Dir;
use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;
use wakeful_workflow::workspace::Snapshot;

mod bundles;
mod escapes;
mod hostile;

fn limits() -> Limits {
    Limits { files: 1000, bytes: 64 << 20, time: Duration::from_secs(60), leave_out: Vec::new() }
}

fn bounds() -> Bounds {
    Bounds { files: 1000, folders: 1000, bytes: 64 << 20, packs: 1000, time: Duration::from_secs(60) }
}

fn open(path: &Path) -> Dir {
    Dir::open_ambient_dir(path, ambient_authority()).unwrap()
}

/// Blobs in memory.
#[derive(Default)]
struct Blobs {
    packs: HashMap<String, Vec<u8>>,
    put: usize,
    put_bytes: usize,
}

impl Blobs {
    fn snapshot(&mut self, root: &Path, before: Option<&Index>, limits: &Limits) -> Result<Made, Fault> {
        let (sender, mut receiver) = mpsc::channel::<Packed>(1000);
        let made = make(&open(root), "sess_1", before, limits, &sender);
        drop(sender);
        (self.put, self.put_bytes) = (0, 0);
        while let Ok(packed) = receiver.try_recv() {
            (self.put, self.put_bytes) = (self.put + 1, self.put_bytes + packed.bytes.len());
            self.packs.insert(hex::encode(packed.sha256), packed.bytes);
        }
        made
    }

    fn spool(&self, index: &Index) -> Result<Spool, Unreadable> {
        Spool::of(&index.packs, &bounds(), |pack| self.packs[&pack.sha256].clone())
    }
}

struct Host {
    root: tempfile::TempDir,
    settings: Settings,
}

impl Host {
    fn new() -> Host {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("workspaces");
        let settings = Settings { folder, limits: limits(), keep: Duration::ZERO, keep_bytes: 0 };
        Host { root, settings }
    }

    fn take(&self, lease: i64) -> Held {
        Held::take(&self.settings, "sess_1", lease).unwrap()
    }

    fn path(&self) -> PathBuf {
        self.root.path().join("workspaces/sess_1")
    }
}

fn snapshot_of(index: &Index) -> Snapshot {
    let tree_sha256 = hex::encode(index.tree);
    Snapshot { tree_sha256, packs: index.packs.clone(), files: 0, bytes: 0, message_number: 1 }
}

/// Every entry below `root`: path, mode, and content or target.
fn listing(root: &Path) -> Vec<(PathBuf, u32, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        let metadata = fs::symlink_metadata(&path).unwrap();
        let content = if metadata.is_symlink() {
            fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec()
        } else if metadata.is_dir() {
            found.extend(listing(&path));
            Vec::new()
        } else {
            fs::read(&path).unwrap()
        };
        let mode = if metadata.is_symlink() { 0 } else { metadata.permissions().mode() & 0o777 };
        found.push((path, mode, content));
    }
    found.sort();
    found
}

fn relative(root: &Path) -> Vec<(PathBuf, u32, Vec<u8>)> {
    let listed = listing(root).into_iter();
    listed.map(|(path, mode, content)| (path.strip_prefix(root).unwrap().to_owned(), mode, content)).collect()
}

fn fill(root: &Path) {
    fs::create_dir_all(root.join(".git/refs/empty")).unwrap();
    fs::create_dir_all(root.join("src/deep")).unwrap();
    fs::write(root.join(".git/index"), [0, 1, 2, 255]).unwrap();
    fs::write(root.join("src/deep/untracked.txt"), "not added").unwrap();
    fs::write(root.join("empty"), "").unwrap();
    fs::write(root.join("large"), vec![7; (3 << 20) + 17]).unwrap();
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"\xff name")), "not UTF-8").unwrap();
    fs::write(root.join("run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(root.join("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(root.join("src"), fs::Permissions::from_mode(0o750)).unwrap();
    symlink("../elsewhere", root.join("src/link")).unwrap();
    symlink("/etc/passwd", root.join("absolute")).unwrap();
}

#[test]
fn a_folder_is_the_same_on_another_host() {
    let (here, there, mut blobs) = (Host::new(), Host::new(), Blobs::default());
    fs::create_dir_all(here.path()).unwrap();
    fill(&here.path());
    let made = blobs.snapshot(&here.path(), None, &limits()).unwrap();
    assert_eq!((made.files, made.bytes), (8, 4 + 9 + (3 << 20) + 17 + 9 + 10));

    let held = there.take(1);
    let spool = blobs.spool(&made.index).unwrap();
    let restored = held.restore(&spool, made.index.tree, &bounds()).unwrap();
    assert_eq!(relative(&there.path()), relative(&here.path()));
    assert_eq!(restored.packs, made.index.packs);
    assert_eq!(restored.objects, made.index.objects);

    // What a claim finds there is used as it is, without its bytes.
    drop(held);
    let held = there.take(2);
    let warm = held.compare(None, Some(&snapshot_of(&made.index)), &limits()).unwrap();
    assert_eq!(warm.flatten().map(|index| index.tree), Some(made.index.tree));
    // And what it changes is a snapshot as on the first host.
    for host in [&here, &there] {
        fs::write(host.path().join("src/new"), "new").unwrap();
    }
    let second = blobs.snapshot(&there.path(), Some(&restored), &limits()).unwrap();
    let first = blobs.snapshot(&here.path(), Some(&made.index), &limits()).unwrap();
    assert_eq!((first.index.tree, first.index.packs), (second.index.tree, second.index.packs));
}

#[test]
fn a_change_costs_the_change() {
    let (here, mut blobs) = (Host::new(), Blobs::default());
    for n in 0..500 {
        let folder = here.path().join(format!("{}", n % 10));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(n.to_string()), format!("file {n}").repeat(200)).unwrap();
    }
    let mut made = blobs.snapshot(&here.path(), None, &limits()).unwrap();
    let whole = blobs.put_bytes;
    let again = blobs.snapshot(&here.path(), Some(&made.index), &limits()).unwrap();
    assert_eq!((blobs.put, again.index.tree), (0, made.index.tree), "nothing changed");
    let mut trees = vec![made.index.tree];
    for n in 0..30 {
        fs::write(here.path().join("3/13"), format!("changed {n}").repeat(200)).unwrap();
        made = blobs.snapshot(&here.path(), Some(&made.index), &limits()).unwrap();
        assert!(blobs.put_bytes * 10 < whole, "{} of {whole} bytes", blobs.put_bytes);
        assert!(made.index.packs.len() <= 8, "{} packs", made.index.packs.len());
        trees.push(made.index.tree);
    }
    trees.dedup();
    assert_eq!(trees.len(), 31, "each has a tree of its own");
    // The newest can be read without those that count no more.
    let there = Host::new();
    there.take(1).restore(&blobs.spool(&made.index).unwrap(), made.index.tree, &bounds()).unwrap();
    assert_eq!(relative(&there.path()), relative(&here.path()));
}

#[test]
fn what_a_step_left_that_was_not_committed_is_seen() {
    let (here, mut blobs) = (Host::new(), Blobs::default());
    let held = here.take(1);
    held.make_empty().unwrap();
    fs::write(here.path().join("a"), "one").unwrap();
    let made = blobs.snapshot(&here.path(), Some(&Index::empty()), &limits()).unwrap();
    held.save(Some(&made.index));
    drop(held);
    let committed = snapshot_of(&made.index);
    let same = |target: Option<&Snapshot>| here.take(2).compare(None, target, &limits()).unwrap().is_some();
    assert!(same(Some(&committed)));
    assert!(!same(None), "no row names it, so it does not count");
    // The same length and, as far as a copy tool cares, the same time.
    let modified = fs::metadata(here.path().join("a")).unwrap().modified().unwrap();
    fs::write(here.path().join("a"), "two").unwrap();
    fs::File::options().write(true).open(here.path().join("a")).unwrap().set_modified(modified).unwrap();
    assert!(!same(Some(&committed)));
}

#[test]
fn a_folder_that_wakeful_did_not_make_is_left_as_it_is_until_it_is_stored() {
    let here = Host::new();
    fs::create_dir_all(here.path()).unwrap();
    fs::write(here.path().join("a"), "one").unwrap();
    let held = here.take(1);
    assert_eq!(held.compare(None, None, &limits()).unwrap(), Some(None));
    super::sweep::sweep(&here.settings);
    assert!(here.path().join("a").exists(), "and it is never swept away");
}

#[test]
fn what_cannot_be_kept_is_refused_in_words() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("a"), "0123456789").unwrap();
    let refused = |limits: &Limits| match look(&open(root.path()), None, limits, &mut Compare) {
        Err(Fault::Refused(why)) => why,
        other => panic!("{:?}", other.map(|looked| looked.tree)),
    };
    assert!(refused(&Limits { bytes: 9, ..limits() }).contains("more than 9 bytes"));
    assert!(refused(&Limits { files: 0, ..limits() }).contains("more than 0 files"));
    assert!(refused(&Limits { time: Duration::ZERO, ..limits() }).contains("not read within 0 seconds"));
    fs::create_dir_all(root.path().join("b/c")).unwrap();
    assert!(refused(&Limits { files: 1, ..limits() }).contains("more than 1 folders"));
    let _socket = std::os::unix::net::UnixListener::bind(root.path().join("socket")).unwrap();
    let why = refused(&limits());
    assert!(why.contains("\"socket\" is neither a file, a folder nor a link"), "{why}");
}

#[test]
fn what_is_to_be_left_out_is_not_stored() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("target/debug")).unwrap();
    fs::write(root.path().join("target/debug/big"), "x").unwrap();
    fs::write(root.path().join("deep.pem"), "secret").unwrap();
    fs::write(root.path().join("kept"), "x").unwrap();
    fs::write(root.path().join(".wakefulignore"), "/target\n").unwrap();
    let limits = Limits { leave_out: vec!["*.pem".to_owned()], ..limits() };
    let looked = look(&open(root.path()), None, &limits, &mut Compare).unwrap();
    let names: Vec<&[u8]> = looked.files.keys().map(Vec::as_slice).collect();
    assert_eq!(names, [&b".wakefulignore"[..], b"kept"]);
}

#[test]
fn a_broken_pack_leaves_the_folder_that_was_there() {
    let (here, mut blobs) = (Host::new(), Blobs::default());
    fs::create_dir_all(here.path()).unwrap();
    fs::write(here.path().join("a"), "one ".repeat(500)).unwrap();
    let made = blobs.snapshot(&here.path(), None, &limits()).unwrap();
    let pack = blobs.packs.values_mut().next().unwrap();
    let whole = pack.clone();
    let held = here.take(1);
    let mut harmless = 0;
    for at in 0..whole.len() {
        let mut broken = whole.clone();
        broken[at] ^= 0x10;
        blobs.packs.insert(made.index.packs[0].sha256.clone(), broken);
        let restored =
            blobs.spool(&made.index).and_then(|spool| held.restore(&spool, made.index.tree, &bounds()));
        // Six bytes are the session's id, and some bits of a compressed object do not count.
        harmless += usize::from(restored.is_ok());
        assert_eq!(fs::read_to_string(here.path().join("a")).unwrap(), "one ".repeat(500), "byte {at}");
    }
    assert!(harmless < 12, "{harmless} of {} bytes", whole.len());
    let left: Vec<_> = fs::read_dir(here.settings.folder.join(STATE_FOLDER)).unwrap().flatten().collect();
    assert!(left.iter().all(|one| !one.file_type().unwrap().is_dir()), "{left:?}");
}

#[test]
fn a_claim_that_still_has_the_folder_keeps_it_to_itself() {
    let here = Host::new();
    let stopped = here.take(1);
    stopped.make_empty().unwrap();
    let next = here.take(2);
    assert_eq!(next.path, here.settings.folder.join("sess_1.2"));
    next.make_empty().unwrap();
    fs::write(stopped.path.join("late"), "x").unwrap();
    assert!(!next.path.join("late").exists());
    let path = next.path.clone();
    drop(next);
    assert!(!path.exists(), "nothing of it stays");
    drop(stopped);
    assert_eq!(here.take(3).path, here.path());
}

#[test]
fn files_that_were_not_used_for_long_go_away() {
    let here = Host::new();
    let held = here.take(1);
    held.make_empty().unwrap();
    super::sweep::sweep(&here.settings);
    assert!(here.path().exists(), "a claim uses it");
    drop(held);
    super::sweep::sweep(&here.settings);
    assert!(!here.path().exists());
    let left = fs::read_dir(here.settings.folder.join(STATE_FOLDER)).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["locks"], "one file, whatever was swept");
    // An empty tree has no packs, so it takes no blob.
    assert_eq!(Index::empty().tree, tree::nothing());
}

#[tokio::test]
async fn a_folder_in_which_a_lost_call_may_still_write_is_left_to_it() {
    let host = Host::new();
    let workspaces = Workspaces::new(host.settings.clone());
    let taken = async || workspaces.hold("sess_1", 1).await.unwrap_or_else(|why| panic!("{why:?}"));
    let first = taken().await;
    assert_eq!(taken().await.path, first.path, "each turn of a claim uses the same folder");
    fs::create_dir_all(&first.path).unwrap();
    workspaces.leave(&first);
    let second = taken().await;
    workspaces.leave(&first);
    assert_eq!(taken().await.path, second.path, "it was left before");
    fs::create_dir_all(&second.path).unwrap();
    workspaces.leave(&second);
    let third = taken().await;
    // The lost calls write.
    fs::write(first.path.join("a"), "late").unwrap();
    fs::write(second.path.join("a"), "late").unwrap();
    assert!(first.path != second.path && !third.path.exists());
    // When the calls have ended, the session's own folder can be taken again, and nothing is known of it.
    drop((first, second));
    workspaces.leave(&third);
    let again = taken().await;
    assert_eq!(again.path, host.path());
    let state = again.state.lock().await;
    assert!(state.index.is_none() && !state.clean);
}
