//! A look at a folder: what it holds, and which of its objects are new.
//!
//! Everything is read through handles that do not follow links, so what a running program swaps meanwhile can spoil the
//! look and never lead it out of the folder.

use super::codec::Hash;
use super::index::{Index, Seen, Stat, now_ns};
use super::tree::{self, Folder, MAX_DEPTH, Node, PATH_BYTES, PIECE_BYTES, hash_of};
use cap_std::fs::{Dir, Metadata, MetadataExt as _, OpenOptions, OpenOptionsExt as _};
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io::{self, Read as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

/// The file whose lines name what is not kept.
const IGNORE_FILE: &str = ".wakefulignore";
const IGNORE_BYTES: u64 = 64 * 1024;

/// What a workspace may hold.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of files and links, and again of folders.
    pub files: u64,
    /// Maximum size of all files together.
    pub bytes: u64,
    /// How long a look may take.
    pub time: Duration,
    /// Patterns of names that are never stored, as in a `.gitignore`.
    pub leave_out: Vec<String>,
}

/// Why a folder was not looked at to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// The folder holds something that cannot be kept. In words for the model.
    #[error("{0}")]
    Refused(String),
    /// A file changed while it was read.
    #[error("a file changed while it was read")]
    Changed,
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The other end is gone.
    #[error("the look was given up")]
    GivenUp,
}

/// Takes each object of a look.
pub(super) trait Sink {
    /// Takes the object with this name. `bytes` is called only if they are needed.
    fn object(&mut self, hash: Hash, bytes: &[u8]) -> Result<(), Fault>;
}

/// A look that only compares.
pub(super) struct Compare;

impl Sink for Compare {
    fn object(&mut self, _: Hash, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }
}

/// What a look saw.
pub(super) struct Looked {
    pub tree: Hash,
    pub files: BTreeMap<Vec<u8>, Seen>,
    /// The bytes of every folder, by name.
    pub folders: HashMap<Hash, Vec<u8>>,
    pub count: u64,
    /// How many folders are below the root.
    pub folders_seen: u64,
    pub bytes: u64,
    pub began_ns: i64,
}

struct Look<'a> {
    limits: &'a Limits,
    left_out: Gitignore,
    before: Option<&'a Index>,
    sink: &'a mut dyn Sink,
    deadline: Instant,
    looked: Looked,
}

/// Looks at `root`. Files that look as they did in `before` are not read.
pub(super) fn look(
    root: &Dir,
    before: Option<&Index>,
    limits: &Limits,
    sink: &mut dyn Sink,
) -> Result<Looked, Fault> {
    let looked = Looked {
        tree: tree::nothing(),
        files: BTreeMap::new(),
        folders: HashMap::new(),
        count: 0,
        folders_seen: 0,
        bytes: 0,
        began_ns: now_ns(),
    };
    let left_out = patterns(root, limits)?;
    let deadline = Instant::now() + limits.time;
    let mut look = Look { limits, left_out, before, sink, deadline, looked };
    look.looked.tree = look.folder(root, &mut Vec::new(), 0)?;
    Ok(look.looked)
}

fn patterns(root: &Dir, limits: &Limits) -> Result<Gitignore, Fault> {
    let mut builder = GitignoreBuilder::new("");
    let mut lines = limits.leave_out.clone();
    let is_file = root.symlink_metadata(IGNORE_FILE).is_ok_and(|metadata| metadata.is_file());
    if is_file {
        let mut text = Vec::new();
        root.open(IGNORE_FILE)?.take(IGNORE_BYTES).read_to_end(&mut text)?;
        lines.extend(String::from_utf8_lossy(&text).lines().map(str::to_owned));
    }
    for line in &lines {
        builder.add_line(None, line).map_err(|error| {
            Fault::Refused(format!("The pattern {line:?} of {IGNORE_FILE} is none: {error}."))
        })?;
    }
    builder.build().map_err(|error| Fault::Refused(format!("{IGNORE_FILE} cannot be used: {error}.")))
}

impl Look<'_> {
    fn folder(&mut self, dir: &Dir, at: &mut Vec<u8>, depth: usize) -> Result<Hash, Fault> {
        if depth > MAX_DEPTH {
            return Err(refused(at, &format!("lies below more than {MAX_DEPTH} folders")));
        }
        let mut folder = Folder::new();
        // In order, so that a repeated snapshot gives the same packs.
        let mut names =
            dir.entries()?.map(|entry| Ok(entry?.file_name().into_vec())).collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        for name in names {
            if Instant::now() > self.deadline {
                let seconds = self.limits.time.as_secs();
                return Err(Fault::Refused(format!("The workspace was not read within {seconds} seconds.")));
            }
            let length = at.len();
            if !at.is_empty() {
                at.push(b'/');
            }
            at.extend_from_slice(&name);
            if let Some(node) = self.entry(dir, OsStr::from_bytes(&name), at, depth)? {
                folder.insert(name, node);
            }
            at.truncate(length);
        }
        let bytes = tree::encode(&folder);
        let hash = hash_of(&bytes);
        self.sink.object(hash, &bytes)?;
        self.looked.folders.insert(hash, bytes);
        Ok(hash)
    }

    /// `None`: it is left out.
    fn entry(
        &mut self,
        dir: &Dir,
        name: &OsStr,
        at: &mut Vec<u8>,
        depth: usize,
    ) -> Result<Option<Node>, Fault> {
        let metadata = match dir.symlink_metadata(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Fault::Changed),
            metadata => metadata?,
        };
        let kind = metadata.file_type();
        let path = Path::new(OsStr::from_bytes(at));
        if self.left_out.matched(path, kind.is_dir()).is_ignore() {
            return Ok(None);
        }
        if at.len() > PATH_BYTES {
            return Err(refused(at, &format!("has a path of more than {PATH_BYTES} bytes")));
        }
        let mode = metadata.mode() & 0o777;
        if kind.is_dir() {
            self.looked.folders_seen += 1;
            if self.looked.folders_seen > self.limits.files {
                let most = self.limits.files;
                return Err(Fault::Refused(format!(
                    "The workspace has more than {most} folders, which is the most that is kept."
                )));
            }
            let below = dir.open_dir(name).map_err(|error| unreadable(at, error))?;
            if below.dir_metadata()?.ino() != metadata.ino() {
                return Err(Fault::Changed);
            }
            return Ok(Some(Node::Folder { mode, hash: self.folder(&below, at, depth + 1)? }));
        }
        self.looked.count += 1;
        if self.looked.count > self.limits.files {
            let most = self.limits.files;
            return Err(Fault::Refused(format!(
                "The workspace has more than {most} files, which is the most that is kept."
            )));
        }
        if kind.is_symlink() {
            let target = dir.read_link_contents(name)?.into_os_string().into_vec();
            return Ok(Some(Node::Link { target }));
        }
        if !kind.is_file() {
            return Err(refused(at, "is neither a file, a folder nor a link, and cannot be kept"));
        }
        self.looked.bytes += metadata.len();
        if self.looked.bytes > self.limits.bytes {
            let most = self.limits.bytes;
            return Err(Fault::Refused(format!(
                "The workspace has more than {most} bytes, which is the most that is kept."
            )));
        }
        let stat = Stat::of(&metadata);
        let pieces = match self.before.and_then(|before| before.unchanged(at, &stat)) {
            Some(seen) => seen.pieces.clone(),
            None => self.read(dir, name, at, &metadata)?,
        };
        self.looked.files.insert(at.clone(), Seen { stat, pieces: pieces.clone() });
        Ok(Some(Node::File { mode, size: metadata.len(), pieces }))
    }

    fn read(&mut self, dir: &Dir, name: &OsStr, at: &[u8], before: &Metadata) -> Result<Vec<Hash>, Fault> {
        let mut file = open(dir, name).map_err(|error| unreadable(at, error))?;
        if Stat::of(&file.metadata()?) != Stat::of(before) {
            return Err(Fault::Changed);
        }
        let (mut pieces, mut rest) = (Vec::new(), before.len());
        let mut piece = Vec::with_capacity((rest as usize).min(PIECE_BYTES));
        while rest > 0 {
            piece.clear();
            (&mut file).take(PIECE_BYTES as u64).read_to_end(&mut piece)?;
            if piece.len() as u64 != rest.min(PIECE_BYTES as u64) {
                return Err(Fault::Changed);
            }
            rest -= piece.len() as u64;
            let hash = hash_of(&piece);
            self.sink.object(hash, &piece)?;
            pieces.push(hash);
        }
        if Stat::of(&file.metadata()?) != Stat::of(before) {
            return Err(Fault::Changed);
        }
        Ok(pieces)
    }
}

/// Opens a file of `dir` itself: neither through a link, nor waiting for the other end of a pipe.
pub(super) fn open(dir: &Dir, name: &OsStr) -> io::Result<cap_std::fs::File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
    dir.open_with(name, &options)
}

fn refused(path: &[u8], why: &str) -> Fault {
    let shown: String = String::from_utf8_lossy(path).chars().take(200).collect();
    Fault::Refused(format!("{shown:?} {why}."))
}

fn unreadable(path: &[u8], error: io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::PermissionDenied => refused(path, "cannot be read, so it cannot be kept"),
        io::ErrorKind::NotFound => Fault::Changed,
        _ => Fault::Io(error),
    }
}
