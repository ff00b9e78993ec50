//! Makes a folder out of a snapshot: every object is checked by its name, and the folder is whole or not there.

use super::codec::Hash;
use super::index::{Held, Index, Seen, Stat, now_ns};
use super::pack::{self, Contents, Place};
use super::tree::{self, Folder, MAX_DEPTH, Node};
use cap_std::fs::{
    Dir, DirBuilder, DirBuilderExt as _, OpenOptions, OpenOptionsExt as _, Permissions, PermissionsExt as _,
};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use wakeful_store::Store;
use wakeful_workflow::workspace::{Pack, Snapshot};

/// A pack is read in parts of this size.
const PART_BYTES: usize = 4 << 20;

/// Why a snapshot cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// The store is away, or does not have a pack.
    #[error(transparent)]
    Store(#[from] wakeful_store::Error),
    /// A pack holds other bytes than it should. Nobody can mend that.
    #[error("{0}")]
    Broken(String),
    /// This host's disk.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The packs of a snapshot on this host's disk, in files without a name.
pub(super) struct Spool {
    files: Vec<File>,
    places: HashMap<Hash, (u32, Place)>,
    packs: Vec<Pack>,
}

/// Reads every pack of `snapshot`, part by part. `folder` is where the spool lies.
pub(super) async fn spool(
    store: &Store,
    session_id: &str,
    snapshot: &Snapshot,
    folder: &Path,
) -> Result<Spool, Unreadable> {
    let mut spool = Spool { files: Vec::new(), places: HashMap::new(), packs: snapshot.packs.clone() };
    for pack in &snapshot.packs {
        let file = tempfile::tempfile_in(folder)?;
        let mut at = 0;
        while at < pack.bytes {
            let part = store.pack_part(session_id, &pack.sha256, at, PART_BYTES).await?;
            if part.is_empty() {
                return Err(broken(pack));
            }
            // Parts are small, so the write does not hold up the task for long.
            file.write_all_at(&part, at)?;
            at += part.len() as u64;
        }
        spool.add(file, pack)?;
    }
    Ok(spool)
}

pub(super) fn broken(pack: &Pack) -> Unreadable {
    Unreadable::Broken(format!("the blob {} holds other bytes than it should", pack.sha256))
}

pub(super) fn missing(hash: &Hash) -> Unreadable {
    Unreadable::Broken(format!("the object {} is missing or has other bytes", hex::encode(hash)))
}

impl Spool {
    /// Adds a pack whose bytes are in `file`.
    fn add(&mut self, file: File, pack: &Pack) -> Result<(), Unreadable> {
        let (number, size) = (self.files.len() as u32, pack.bytes as usize);
        let mut start = vec![0; 4096.min(size)];
        let places = loop {
            file.read_exact_at(&mut start, 0)?;
            match pack::contents(&start) {
                Contents::Needs(bytes) if start.len() < bytes.min(size) => start.resize(bytes.min(size), 0),
                Contents::Read(places) => break places,
                Contents::Needs(_) | Contents::Broken => return Err(broken(pack)),
            }
        };
        self.places.extend(places.into_iter().map(|(hash, place)| (hash, (number, place))));
        self.files.push(file);
        Ok(())
    }

    /// Of packs in memory.
    #[cfg(test)]
    pub(super) fn of(packs: &[Pack], bytes: impl Fn(&Pack) -> Vec<u8>) -> Result<Spool, Unreadable> {
        let mut spool = Spool { files: Vec::new(), places: HashMap::new(), packs: packs.to_vec() };
        for pack in packs {
            let file = tempfile::tempfile()?;
            file.write_all_at(&bytes(pack), 0)?;
            spool.add(file, pack)?;
        }
        Ok(spool)
    }

    fn object(&self, hash: &Hash) -> Result<Vec<u8>, Unreadable> {
        let (pack, place) = self.places.get(hash).ok_or_else(|| missing(hash))?;
        let mut stored = vec![0; place.stored as usize];
        self.files[*pack as usize].read_exact_at(&mut stored, place.offset)?;
        pack::object(hash, place, &stored).ok_or_else(|| missing(hash))
    }
}

/// Writes the files of a snapshot into the empty folder `root`, and returns its index.
pub(super) fn write(spool: &Spool, tree: Hash, root: &Dir) -> Result<Index, Unreadable> {
    let mut restore = Restore { spool, files: BTreeMap::new(), objects: HashMap::new() };
    restore.folder(&tree, root, &mut Vec::new(), 0)?;
    let Restore { files, objects, .. } = restore;
    Ok(Index { tree, packs: spool.packs.clone(), files, objects, looked_ns: now_ns(), ours: true })
}

struct Restore<'a> {
    spool: &'a Spool,
    files: BTreeMap<Vec<u8>, Seen>,
    objects: HashMap<Hash, Held>,
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
        for (name, node) in folder {
            let length = at.len();
            if !at.is_empty() {
                at.push(b'/');
            }
            at.extend_from_slice(&name);
            let name = OsStr::from_bytes(&name);
            match node {
                Node::File { mode, pieces, .. } => {
                    let stat = self.file(dir, name, mode, &pieces)?;
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

    fn file(&mut self, dir: &Dir, name: &OsStr, mode: u32, pieces: &[Hash]) -> Result<Stat, Unreadable> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let mut file = dir.open_with(name, &options)?;
        for piece in pieces {
            file.write_all(&self.object(piece)?)?;
        }
        file.set_permissions(Permissions::from_mode(mode))?;
        Ok(Stat::of(&file.metadata()?))
    }
}
