//! Makes a folder out of a snapshot: every object is checked by its name, and the folder is whole or not there.
//!
//! A snapshot may come from anywhere (an imported bundle), and a few objects can name each other very often. So what a
//! folder lists is charged before any of it is made, and there is a deadline.

use super::codec::Hash;
use super::index::{Held, Index, Seen, Stat, now_ns};
use super::look::Limits;
use super::pack::{self, Contents, PACK_BYTES, Place};
use super::parts::Parts;
use super::tree::{self, Folder, MAX_DEPTH, Node, PATH_BYTES, PIECE_BYTES};
use cap_std::fs::{
    Dir, DirBuilder, DirBuilderExt as _, OpenOptions, OpenOptionsExt as _, Permissions, PermissionsExt as _,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};
use wakeful_store::Store;
use wakeful_workflow::workspace::{MAX_PACKS, Pack, Snapshot};

/// A pack is read in parts of this size.
const PART_BYTES: usize = 4 << 20;

/// Why a snapshot cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// The store is away, or does not have a pack.
    #[error(transparent)]
    Store(#[from] wakeful_store::Error),
    /// A pack holds other bytes than it should. That cannot be mended.
    #[error("{0}")]
    Broken(String),
    /// It is more than it says, or more than this host keeps.
    #[error("{0}")]
    TooLarge(String),
    /// This host's disk.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// What a restore makes at most: what the snapshot says, and no more than this host keeps.
#[derive(Clone, Debug)]
pub(super) struct Bounds {
    /// Files and links.
    pub files: u64,
    pub folders: u64,
    pub bytes: u64,
    pub packs: usize,
    pub time: Duration,
}

impl Bounds {
    pub fn of(limits: &Limits, snapshot: &Snapshot) -> Bounds {
        Bounds {
            files: limits.files.min(snapshot.files),
            folders: limits.files,
            bytes: limits.bytes.min(snapshot.bytes),
            // A pack with less than a quarter of its bytes in use is joined to others.
            packs: MAX_PACKS.max(limits.bytes as usize / (PACK_BYTES / 4)),
            time: limits.time,
        }
    }
}

/// The packs of a snapshot on this host's disk, one after the other in one file without a name.
pub(super) struct Spool {
    file: File,
    /// Where the next pack begins.
    end: u64,
    places: HashMap<Hash, (u32, Place)>,
    packs: Vec<Pack>,
    /// Those that the file has, by name.
    added: HashSet<String>,
}

/// Reads every pack of `snapshot`, part by part. `folder` is where the spool lies.
pub(super) async fn spool(
    store: &Store,
    session_id: &str,
    snapshot: &Snapshot,
    folder: &Path,
    bounds: &Bounds,
) -> Result<Spool, Unreadable> {
    let mut spool = Spool::new(tempfile::tempfile_in(folder)?, &snapshot.packs, bounds)?;
    let parts = Parts::new(store, session_id);
    for (number, pack) in snapshot.packs.iter().enumerate() {
        if !spool.added.insert(pack.sha256.clone()) {
            continue;
        }
        let mut at = 0;
        while at < pack.bytes {
            let part = parts.read(&pack.sha256, at, PART_BYTES).await?;
            if part.is_empty() {
                return Err(broken(pack));
            }
            // Parts are small, so the write does not hold up the task for long.
            spool.file.write_all_at(&part, spool.end + at)?;
            at += part.len() as u64;
        }
        spool.add(number, pack)?;
    }
    Ok(spool)
}

pub(super) fn broken(pack: &Pack) -> Unreadable {
    Unreadable::Broken(format!("the blob {} holds other bytes than it should", pack.sha256))
}

pub(super) fn missing(hash: &Hash) -> Unreadable {
    Unreadable::Broken(format!("the object {} is missing or has other bytes", hex::encode(hash)))
}

pub(super) fn too_large(what: impl std::fmt::Display) -> Unreadable {
    Unreadable::TooLarge(format!(
        "they have more than {what}, which is what their snapshot says or this host keeps"
    ))
}

impl Spool {
    fn new(file: File, packs: &[Pack], bounds: &Bounds) -> Result<Spool, Unreadable> {
        if packs.len() > bounds.packs {
            return Err(too_large(format_args!("{} packs", bounds.packs)));
        }
        let packs = packs.to_vec();
        Ok(Spool { file, end: 0, places: HashMap::new(), packs, added: HashSet::new() })
    }

    /// Takes in the pack whose bytes stand at the end of the file.
    fn add(&mut self, number: usize, pack: &Pack) -> Result<(), Unreadable> {
        let (number, size) = (number as u32, pack.bytes as usize);
        let mut start = vec![0; 4096.min(size)];
        let places = loop {
            self.file.read_exact_at(&mut start, self.end)?;
            match pack::contents(&start) {
                Contents::Needs(bytes) if start.len() < bytes.min(size) => start.resize(bytes.min(size), 0),
                Contents::Read(places) => break places,
                Contents::Needs(_) | Contents::Broken => return Err(broken(pack)),
            }
        };
        for (hash, mut place) in places {
            if place.offset + u64::from(place.stored) > pack.bytes {
                return Err(broken(pack));
            }
            place.offset += self.end;
            self.places.insert(hash, (number, place));
        }
        self.end += pack.bytes;
        Ok(())
    }

    /// Of packs in memory.
    #[cfg(test)]
    pub(super) fn of(
        packs: &[Pack],
        bounds: &Bounds,
        bytes: impl Fn(&Pack) -> Vec<u8>,
    ) -> Result<Spool, Unreadable> {
        let mut spool = Spool::new(tempfile::tempfile()?, packs, bounds)?;
        for (number, pack) in packs.iter().enumerate() {
            if spool.added.insert(pack.sha256.clone()) {
                spool.file.write_all_at(&bytes(pack), spool.end)?;
                spool.add(number, pack)?;
            }
        }
        Ok(spool)
    }

    fn object(&self, hash: &Hash) -> Result<Vec<u8>, Unreadable> {
        let (_, place) = self.places.get(hash).ok_or_else(|| missing(hash))?;
        let mut stored = vec![0; place.stored as usize];
        self.file.read_exact_at(&mut stored, place.offset)?;
        pack::object(hash, place, &stored).ok_or_else(|| missing(hash))
    }
}

/// Writes the files of a snapshot into the empty folder `root`, and returns its index.
pub(super) fn write(spool: &Spool, tree: Hash, root: &Dir, bounds: &Bounds) -> Result<Index, Unreadable> {
    let left = Left::new(bounds.clone());
    let mut restore = Restore { spool, files: BTreeMap::new(), objects: HashMap::new(), left };
    restore.folder(&tree, root, &mut Vec::new(), 0)?;
    let Restore { files, objects, .. } = restore;
    Ok(Index { tree, packs: spool.packs.clone(), files, objects, looked_ns: now_ns(), ours: true })
}

struct Restore<'a> {
    spool: &'a Spool,
    files: BTreeMap<Vec<u8>, Seen>,
    objects: HashMap<Hash, Held>,
    left: Left,
}

/// What the folders so far list, and how long this may go on.
pub(super) struct Left {
    bounds: Bounds,
    files: u64,
    folders: u64,
    bytes: u64,
    until: Instant,
}

impl Left {
    pub fn new(bounds: Bounds) -> Left {
        let until = Instant::now() + bounds.time;
        Left { bounds, files: 0, folders: 0, bytes: 0, until }
    }

    /// Charges everything that `folder` lists. Folders that wait for the end of those below them hold no more than that.
    pub fn charge(&mut self, folder: &Folder) -> Result<(), Unreadable> {
        for node in folder.values() {
            match node {
                Node::File { size, .. } => {
                    self.files += 1;
                    self.bytes = self.bytes.saturating_add(*size);
                }
                Node::Link { .. } => self.files += 1,
                Node::Folder { .. } => self.folders += 1,
            }
        }
        let bounds = &self.bounds;
        if self.files > bounds.files {
            return Err(too_large(format_args!("{} files", bounds.files)));
        }
        if self.folders > bounds.folders {
            return Err(too_large(format_args!("{} folders", bounds.folders)));
        }
        if self.bytes > bounds.bytes {
            return Err(too_large(format_args!("{} bytes", bounds.bytes)));
        }
        Ok(())
    }

    pub fn is_in_time(&self) -> Result<(), Unreadable> {
        if Instant::now() < self.until {
            return Ok(());
        }
        let seconds = self.bounds.time.as_secs();
        Err(Unreadable::TooLarge(format!("they were not written within {seconds} seconds")))
    }
}

impl Restore<'_> {
    fn object(&mut self, hash: &Hash) -> Result<Vec<u8>, Unreadable> {
        let bytes = self.spool.object(hash)?;
        if let Some((pack, place)) = self.spool.places.get(hash) {
            self.objects.insert(*hash, Held { pack: *pack, stored: place.stored });
        }
        Ok(bytes)
    }

    fn folder(&mut self, hash: &Hash, dir: &Dir, at: &mut Vec<u8>, depth: usize) -> Result<(), Unreadable> {
        let folder: Folder =
            tree::decode(&self.object(hash)?).filter(|_| depth <= MAX_DEPTH).ok_or_else(|| missing(hash))?;
        self.left.charge(&folder)?;
        for (name, node) in folder {
            let length = at.len();
            if !at.is_empty() {
                at.push(b'/');
            }
            at.extend_from_slice(&name);
            if at.len() > PATH_BYTES {
                return Err(too_large(format_args!("{PATH_BYTES} bytes in a path")));
            }
            self.left.is_in_time()?;
            let name = OsStr::from_bytes(&name);
            match node {
                Node::File { mode, size, pieces } => {
                    let stat = self.file(dir, name, mode, size, &pieces)?;
                    self.files.insert(at.clone(), Seen { stat, pieces });
                }
                Node::Folder { mode, hash } => {
                    let mut builder = DirBuilder::new();
                    builder.mode(0o700);
                    dir.create_dir_with(name, &builder)?;
                    self.folder(&hash, &dir.open_dir(name)?, at, depth + 1)?;
                    // The owner keeps the right to look into it.
                    dir.set_permissions(name, Permissions::from_mode(mode | 0o700))?;
                }
                Node::Link { target } => dir.symlink_contents(Path::new(OsStr::from_bytes(&target)), name)?,
            }
            at.truncate(length);
            wakeful_store::failpoint!("K31");
        }
        Ok(())
    }

    fn file(
        &mut self,
        dir: &Dir,
        name: &OsStr,
        mode: u32,
        size: u64,
        pieces: &[Hash],
    ) -> Result<Stat, Unreadable> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let mut file = dir.open_with(name, &options)?;
        let mut rest = size;
        for piece in pieces {
            self.left.is_in_time()?;
            let bytes = self.object(piece)?;
            // All but the last are whole, and together they are as long as the folder says.
            if bytes.len() as u64 != rest.min(PIECE_BYTES as u64) {
                return Err(missing(piece));
            }
            rest -= bytes.len() as u64;
            file.write_all(&bytes)?;
        }
        if rest > 0 {
            return Err(Unreadable::Broken("a file has fewer pieces than it should".to_owned()));
        }
        file.set_permissions(Permissions::from_mode(mode))?;
        Ok(Stat::of(&file.metadata()?))
    }
}
