//! Reads a snapshot without a folder: lists its files, reads one, writes all of them somewhere, compares two.

use super::codec::Hash;
use super::folder::hash_of_hex;
use super::look::Limits;
use super::pack::{self, Contents, Place};
use super::parts::Parts;
use super::restore::{self, Bounds, Left, Unreadable, broken, missing, too_large};
use super::tree::{self, Folder, MAX_DEPTH, Node};
use cap_std::ambient_authority;
use cap_std::fs::Dir;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use wakeful_store::Store;
use wakeful_workflow::workspace::Snapshot;

/// A pack's table of contents is read in parts of this size.
const START_BYTES: usize = 64 << 10;

/// An entry of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// From the workspace's folder. Bytes that are no UTF-8 are shown as U+FFFD.
    pub path: String,
    /// `file`, `link` or `folder`.
    pub kind: &'static str,
    /// Size of a file.
    pub bytes: u64,
    /// Permissions, such as `644`.
    pub mode: String,
    /// Equal contents have equal names. Of a file up to 1 MiB it is the SHA-256 of its bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Where a link points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// How a file differs between two snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// From the workspace's folder.
    pub path: String,
    /// `added`, `removed`, `changed`, or `mode` if only the permissions differ.
    pub how: &'static str,
}

/// A snapshot whose packs have been opened.
pub struct Files {
    parts: Parts,
    snapshot: Snapshot,
    bounds: Bounds,
    places: HashMap<Hash, (usize, Place)>,
}

impl Files {
    /// Reads the tables of contents of a snapshot's packs.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub async fn open(
        store: &Store,
        session_id: &str,
        snapshot: Snapshot,
        limits: &Limits,
    ) -> Result<Files, Unreadable> {
        let bounds = Bounds::of(limits, &snapshot);
        if snapshot.packs.len() > bounds.packs {
            return Err(too_large(format_args!("{} packs", bounds.packs)));
        }
        let (mut places, parts) = (HashMap::new(), Parts::new(store, session_id));
        for (number, pack) in snapshot.packs.iter().enumerate() {
            let mut start = parts.read(&pack.sha256, 0, START_BYTES).await?;
            let contents = loop {
                match pack::contents(&start) {
                    Contents::Read(contents) => break contents,
                    Contents::Needs(bytes) if (start.len() as u64) < pack.bytes && bytes > start.len() => {
                        let part = parts.read(&pack.sha256, start.len() as u64, bytes - start.len()).await?;
                        if part.is_empty() {
                            return Err(broken(pack));
                        }
                        start.extend(part);
                    }
                    Contents::Needs(_) | Contents::Broken => return Err(broken(pack)),
                }
            };
            places.extend(contents.into_iter().map(|(hash, place)| (hash, (number, place))));
        }
        Ok(Files { parts, snapshot, bounds, places })
    }

    async fn object(&self, hash: &Hash) -> Result<Vec<u8>, Unreadable> {
        let (number, place) = self.places.get(hash).ok_or_else(|| missing(hash))?;
        let pack = &self.snapshot.packs[*number];
        let length = place.stored as usize;
        let stored = self.parts.read(&pack.sha256, place.offset, length).await?;
        pack::object(hash, place, &stored).ok_or_else(|| missing(hash))
    }

    async fn folder(&self, hash: &Hash) -> Result<Folder, Unreadable> {
        tree::decode(&self.object(hash).await?).ok_or_else(|| missing(hash))
    }

    fn root(&self) -> Result<Hash, Unreadable> {
        let name = &self.snapshot.tree_sha256;
        hash_of_hex(name).ok_or_else(|| Unreadable::Broken(format!("{name:?} names no tree")))
    }

    /// Returns every entry, sorted by path.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub async fn list(&self) -> Result<Vec<Listed>, Unreadable> {
        let (mut found, mut left) = (Vec::new(), Left::new(self.bounds.clone()));
        let mut folders = vec![(self.root()?, String::new(), 0)];
        while let Some((hash, at, depth)) = folders.pop() {
            if depth > MAX_DEPTH {
                return Err(missing(&hash));
            }
            let folder = self.folder(&hash).await?;
            // A few objects can name each other very often.
            left.charge(&folder)?;
            left.is_in_time()?;
            for (name, node) in folder {
                let path = format!("{at}{}", String::from_utf8_lossy(&name));
                if let Node::Folder { hash, .. } = &node {
                    folders.push((*hash, format!("{path}/"), depth + 1));
                }
                found.push(listed(path, &node));
            }
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// Finds a file by its path: its size, and the names of its pieces. `None` if there is no such file.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub async fn find(&self, path: &str) -> Result<Option<Found>, Unreadable> {
        let mut hash = self.root()?;
        let mut names = path.split('/').peekable();
        while let Some(name) = names.next() {
            match self.folder(&hash).await?.remove(name.as_bytes()) {
                Some(Node::Folder { hash: below, .. }) if names.peek().is_some() => hash = below,
                Some(Node::File { size, pieces, .. }) if names.peek().is_none() => {
                    return Ok(Some(Found { bytes: size, pieces }));
                }
                Some(_) | None => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Reads the piece of a file with this number. `None` after the last one.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub async fn piece(&self, file: &Found, number: usize) -> Result<Option<Vec<u8>>, Unreadable> {
        match file.pieces.get(number) {
            Some(hash) => self.object(hash).await.map(Some),
            None => Ok(None),
        }
    }
}

/// A file of a snapshot.
pub struct Found {
    /// Its size.
    pub bytes: u64,
    pieces: Vec<Hash>,
}

fn listed(path: String, node: &Node) -> Listed {
    let entry = Listed { path, kind: "file", bytes: 0, mode: String::new(), content: None, target: None };
    match node {
        Node::File { mode, size, pieces } => {
            let content = match pieces.as_slice() {
                [one] => *one,
                many => tree::hash_of(&many.concat()),
            };
            Listed { bytes: *size, mode: format!("{mode:o}"), content: Some(hex::encode(content)), ..entry }
        }
        Node::Folder { mode, .. } => Listed { kind: "folder", mode: format!("{mode:o}"), ..entry },
        Node::Link { target } => {
            let target = Some(String::from_utf8_lossy(target).into_owned());
            Listed { kind: "link", mode: "777".to_owned(), target, ..entry }
        }
    }
}

/// Compares two listings. Folders count only where they are empty on one side and missing on the other.
pub fn changes(left: &[Listed], right: &[Listed]) -> Vec<Changed> {
    let of = |side: &[Listed]| -> BTreeMap<String, Listed> {
        side.iter().map(|entry| (entry.path.clone(), entry.clone())).collect()
    };
    let (left, right) = (of(left), of(right));
    let mut paths: Vec<&String> = left.keys().chain(right.keys()).collect();
    paths.sort();
    paths.dedup();
    let how = |path: &String| match (left.get(path), right.get(path)) {
        (None, Some(_)) => Some("added"),
        (Some(_), None) => Some("removed"),
        (Some(one), Some(other)) if one == other => None,
        (Some(one), Some(other)) => {
            let same = Listed { mode: other.mode.clone(), ..one.clone() } == *other;
            Some(if same { "mode" } else { "changed" })
        }
        (None, None) => None,
    };
    paths.iter().filter_map(|path| how(path).map(|how| Changed { path: (*path).clone(), how })).collect()
}

/// The files of a session at a message, or now. Empty before the first snapshot.
///
/// # Errors
/// [`Unreadable`].
pub async fn list_at(
    store: &Store,
    session_id: &str,
    message_number: Option<i64>,
    limits: &Limits,
) -> Result<(Option<Snapshot>, Vec<Listed>), Unreadable> {
    let Some(snapshot) = store.workspace_at(session_id, message_number).await? else {
        return Ok((None, Vec::new()));
    };
    let listed = Files::open(store, session_id, snapshot.clone(), limits).await?.list().await?;
    Ok((Some(snapshot), listed))
}

/// Writes the files of a session's snapshot into the new folder `to`: all of them or none.
///
/// # Errors
/// [`Unreadable`]: also if something is at `to` already.
pub async fn checkout(
    store: &Store,
    session_id: &str,
    snapshot: &Snapshot,
    to: &Path,
    limits: &Limits,
) -> Result<(), Unreadable> {
    let taken = || std::io::Error::new(std::io::ErrorKind::AlreadyExists, format!("{} exists", to.display()));
    if to.symlink_metadata().is_ok() {
        return Err(taken().into());
    }
    let tree = hash_of_hex(&snapshot.tree_sha256)
        .ok_or_else(|| Unreadable::Broken("its name is not a hash".to_owned()))?;
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let bounds = Bounds::of(limits, snapshot);
    let spool = restore::spool(store, session_id, snapshot, parent, &bounds).await?;
    let part = tempfile::Builder::new().prefix(".wakeful-checkout-").tempdir_in(parent)?;
    let (root, to) = (part.path().join("files"), to.to_owned());
    let written = tokio::task::spawn_blocking(move || {
        fs::DirBuilder::new().mode(0o700).create(&root)?;
        restore::write(&spool, tree, &Dir::open_ambient_dir(&root, ambient_authority())?, &bounds)?;
        fs::rename(&root, &to)?;
        drop(part);
        Ok(())
    });
    written.await.map_err(|error| Unreadable::Broken(error.to_string()))?
}
