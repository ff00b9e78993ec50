//! Makes a snapshot: looks at the folder, and packs the objects that no earlier pack holds.
//!
//! Small packs are joined as a counter carries: a new pack takes in those before it that are not larger than twice itself.
//! So a snapshot names few packs, and each object is written again only a few times.

use super::codec::Hash;
use super::index::{Held, Index, Seen};
use super::look::{Fault, Limits, Looked, Sink, look, open};
use super::pack::{PACK_BYTES, Packed, Writer};
use super::tree::{PIECE_BYTES, hash_of};
use cap_std::fs::Dir;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use tokio::sync::mpsc;
use wakeful_workflow::workspace::Pack;

/// How often a look is begun anew if files change under it.
const LOOKS: usize = 5;

/// Joining packs never makes one larger than this.
const JOINED_BYTES: u64 = PACK_BYTES as u64;

/// What a snapshot found.
pub(super) struct Made {
    pub index: Index,
    pub files: u64,
    pub bytes: u64,
}

/// Sends the packs that it fills to a task that stores them.
struct Packer<'a> {
    known: &'a HashMap<Hash, Held>,
    added: HashSet<Hash>,
    writer: Writer,
    done: Vec<Sent>,
    packs: &'a mpsc::Sender<Packed>,
}

/// A pack that is on its way, and its objects.
struct Sent {
    pack: Pack,
    objects: Vec<(Hash, u32)>,
}

impl Sink for Packer<'_> {
    fn object(&mut self, hash: Hash, bytes: &[u8]) -> Result<(), Fault> {
        if self.known.contains_key(&hash) || !self.added.insert(hash) {
            return Ok(());
        }
        self.pack(hash, bytes)
    }
}

impl Packer<'_> {
    fn pack(&mut self, hash: Hash, bytes: &[u8]) -> Result<(), Fault> {
        self.writer.add(hash, bytes);
        if self.writer.bytes() >= PACK_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Fault> {
        let Some(packed) = self.writer.finish() else { return Ok(()) };
        let pack = Pack { sha256: hex::encode(packed.sha256), bytes: packed.bytes.len() as u64 };
        self.done.push(Sent { pack, objects: packed.objects.clone() });
        self.packs.blocking_send(packed).map_err(|_| Fault::GivenUp)
    }
}

/// Looks at `root` and sends what is new to `packs`. `before` is what the session's newest snapshot holds.
pub(super) fn make(
    root: &Dir,
    session_id: &str,
    before: Option<&Index>,
    limits: &Limits,
    packs: &mpsc::Sender<Packed>,
) -> Result<Made, Fault> {
    let none = HashMap::new();
    let known = before.map_or(&none, |before| &before.objects);
    let mut tries = 0;
    loop {
        let writer = Writer::new(session_id);
        let mut packer = Packer { known, added: HashSet::new(), writer, done: Vec::new(), packs };
        let made =
            look(root, before, limits, &mut packer).and_then(|looked| finish(root, before, looked, packer));
        match made {
            Err(Fault::Changed) if tries < LOOKS => tries += 1,
            Err(Fault::Changed) => {
                return Err(Fault::Refused(
                    "Its files change all the time, so they cannot be kept.".to_owned(),
                ));
            }
            made => return made,
        }
    }
}

/// Joins small packs, and lists where each object is.
fn finish(root: &Dir, before: Option<&Index>, looked: Looked, mut packer: Packer<'_>) -> Result<Made, Fault> {
    let live = live(&looked);
    let old = before.map(|before| before.packs.as_slice()).unwrap_or_default();
    let mut live_bytes = vec![0; old.len()];
    for (_, held) in packer.known.iter().filter(|(hash, _)| live.contains(*hash)) {
        if let Some(bytes) = live_bytes.get_mut(held.pack as usize) {
            *bytes += u64::from(held.stored);
        }
    }
    let is_new = !packer.added.is_empty();
    if is_new {
        let joined = joined(old, &live_bytes, packer.writer.bytes() as u64);
        let moved: HashSet<Hash> = packer
            .known
            .iter()
            .filter(|(hash, held)| joined.contains(&held.pack) && live.contains(*hash))
            .map(|(hash, _)| *hash)
            .collect();
        move_objects(root, &looked, moved, &mut packer)?;
        for pack in joined {
            live_bytes[pack as usize] = 0;
        }
        packer.flush()?;
    }
    // Packs without an object that still counts are not named any more.
    let (mut packs, mut numbers) = (Vec::new(), HashMap::new());
    for (number, pack) in old.iter().enumerate().filter(|(number, _)| live_bytes[*number] > 0) {
        numbers.insert(number as u32, packs.len() as u32);
        packs.push(pack.clone());
    }
    let mut objects: HashMap<Hash, Held> = packer
        .known
        .iter()
        .filter(|(hash, _)| live.contains(*hash))
        .filter_map(|(hash, held)| {
            Some((*hash, Held { pack: *numbers.get(&held.pack)?, stored: held.stored }))
        })
        .collect();
    for Sent { pack, objects: sent } in packer.done {
        let number = packs.len() as u32;
        packs.push(pack);
        objects.extend(sent.into_iter().map(|(hash, stored)| (hash, Held { pack: number, stored })));
    }
    let ours = before.is_some_and(|before| before.ours);
    let index =
        Index { tree: looked.tree, packs, files: looked.files, objects, looked_ns: looked.began_ns, ours };
    Ok(Made { index, files: looked.count, bytes: looked.bytes })
}

/// Every object of the tree.
fn live(looked: &Looked) -> HashSet<Hash> {
    let pieces = looked.files.values().flat_map(|seen| &seen.pieces);
    pieces.chain(looked.folders.keys()).copied().collect()
}

/// The packs that a new one of `size` takes in: from the newest on, those that are not much larger; and any that holds
/// almost nothing that still counts.
fn joined(old: &[Pack], live_bytes: &[u64], size: u64) -> HashSet<u32> {
    let (mut joined, mut size) = (HashSet::new(), size);
    let mut carries = true;
    for (number, pack) in old.iter().enumerate().rev() {
        let live = live_bytes[number];
        carries &= pack.bytes <= 2 * size;
        let is_dead = live < pack.bytes / 4;
        if live > 0 && (carries || is_dead) && size + live <= JOINED_BYTES {
            size += live;
            joined.insert(number as u32);
        }
    }
    joined
}

/// Writes objects of earlier packs again, out of the folder.
fn move_objects(
    root: &Dir,
    looked: &Looked,
    mut moved: HashSet<Hash>,
    packer: &mut Packer<'_>,
) -> Result<(), Fault> {
    // In order, so that a repeated snapshot gives the same packs.
    let mut folders: Vec<(&Hash, &Vec<u8>)> = looked.folders.iter().collect();
    folders.sort_unstable();
    for (hash, bytes) in folders {
        if moved.remove(hash) {
            packer.pack(*hash, bytes)?;
        }
    }
    if moved.is_empty() {
        return Ok(());
    }
    for (path, Seen { pieces, .. }) in files_with(&looked.files, &moved) {
        let path = Path::new(std::ffi::OsStr::from_bytes(path));
        let mut file = open_below(root, path)?;
        for (number, hash) in
            pieces.iter().enumerate().filter(|(_, hash)| moved.contains(*hash)).collect::<Vec<_>>()
        {
            let mut piece = Vec::new();
            file.seek(SeekFrom::Start((number * PIECE_BYTES) as u64))?;
            (&mut file).take(PIECE_BYTES as u64).read_to_end(&mut piece)?;
            if hash_of(&piece) != *hash {
                return Err(Fault::Changed);
            }
            if moved.remove(hash) {
                packer.pack(*hash, &piece)?;
            }
        }
    }
    Ok(())
}

/// The files with one of these pieces. The list is taken before any of them is packed.
fn files_with<'a>(files: &'a BTreeMap<Vec<u8>, Seen>, moved: &HashSet<Hash>) -> Vec<(&'a Vec<u8>, &'a Seen)> {
    files.iter().filter(|(_, seen)| seen.pieces.iter().any(|piece| moved.contains(piece))).collect()
}

/// Opens a file below `root`. A link that has taken the place of a folder cannot lead out of it.
fn open_below(root: &Dir, path: &Path) -> Result<cap_std::fs::File, Fault> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let name = path.file_name().unwrap_or_default();
    let opened = match parent {
        Some(parent) => root.open_dir(parent).and_then(|dir| open(&dir, name)),
        None => open(root, name),
    };
    opened.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Fault::Changed,
        _ => Fault::Io(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_packs_are_joined_as_a_counter_carries() {
        let (mut packs, mut written): (Vec<Pack>, u64) = (Vec::new(), 0);
        for n in 0..1000 {
            let live: Vec<u64> = packs.iter().map(|pack| pack.bytes).collect();
            let joined = joined(&packs, &live, 100);
            let size = 100 + joined.iter().map(|number| live[*number as usize]).sum::<u64>();
            let mut number = 0;
            packs.retain(|_| {
                number += 1;
                !joined.contains(&(number - 1))
            });
            packs.push(Pack { sha256: n.to_string(), bytes: size });
            written += size;
        }
        assert!(packs.len() < 12, "{} packs", packs.len());
        assert!(written < 100 * 1000 * 12, "{written} bytes for {}", 100 * 1000);
    }

    #[test]
    fn a_large_pack_stays_and_one_that_is_almost_dead_does_not() {
        let packs = [1_000_000, 1_000_000].map(|bytes| Pack { sha256: String::new(), bytes });
        assert!(joined(&packs, &[1_000_000, 900_000], 100).is_empty());
        assert_eq!(joined(&packs, &[1000, 900_000], 100), HashSet::from([0]));
    }
}
