//! What a worker knows of a folder on its host: which snapshot it holds, and how each file looked then.
//!
//! A file whose size, inode, mode and times are still the same has not changed, so it is not read again. The index lies
//! beside the folder, for the next claim on this host.

use super::codec::{Hash, In, Out};
use cap_std::fs::{Metadata, MetadataExt as _};
use std::collections::{BTreeMap, HashMap};
use wakeful_workflow::workspace::Pack;

const MAGIC: &[u8; 8] = b"wakeix1\n";
/// A file that changed within this time before a look may change again without another time. It is read again.
const TICK_NS: i64 = 50_000_000;

/// How a file looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    size: u64,
    inode: u64,
    mode: u32,
    modified_ns: i64,
    changed_ns: i64,
}

impl Stat {
    pub fn of(metadata: &Metadata) -> Stat {
        Stat {
            size: metadata.len(),
            inode: metadata.ino(),
            mode: metadata.mode(),
            modified_ns: metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec()),
            changed_ns: metadata.ctime().saturating_mul(1_000_000_000).saturating_add(metadata.ctime_nsec()),
        }
    }
}

/// A file, and its pieces when it looked like that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub stat: Stat,
    pub pieces: Vec<Hash>,
}

/// The pack that holds an object, and the bytes that the object takes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub pack: u32,
    pub stored: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Index {
    pub tree: Hash,
    pub packs: Vec<Pack>,
    /// By path from the root.
    pub files: BTreeMap<Vec<u8>, Seen>,
    pub objects: HashMap<Hash, Held>,
    /// When this look began, by the clock of the file times.
    pub looked_ns: i64,
    /// Wakeful made the folder. Otherwise it is from before snapshots, or a person put it there.
    pub ours: bool,
}

impl Index {
    /// Of a folder that was just made and is empty.
    pub fn empty() -> Index {
        Index {
            tree: super::tree::nothing(),
            packs: Vec::new(),
            files: BTreeMap::new(),
            objects: HashMap::new(),
            looked_ns: now_ns(),
            ours: true,
        }
    }

    /// The pieces of a file that looks as it did.
    pub fn unchanged(&self, path: &[u8], stat: &Stat) -> Option<&Seen> {
        let seen = self.files.get(path)?;
        let settled = stat.changed_ns < self.looked_ns - TICK_NS;
        (seen.stat == *stat && settled).then_some(seen)
    }

    pub fn encode(&self, boot: &str) -> Vec<u8> {
        let mut out = Out(MAGIC.to_vec());
        out.bytes(boot.as_bytes());
        out.hash(&self.tree);
        out.i64(self.looked_ns);
        out.u8(self.ours.into());
        out.u32(self.packs.len() as u32);
        for pack in &self.packs {
            out.bytes(pack.sha256.as_bytes());
            out.u64(pack.bytes);
        }
        out.u32(self.files.len() as u32);
        for (path, Seen { stat, pieces }) in &self.files {
            out.bytes(path);
            out.u64(stat.size);
            out.u64(stat.inode);
            out.u32(stat.mode);
            out.i64(stat.modified_ns);
            out.i64(stat.changed_ns);
            out.u32(pieces.len() as u32);
            pieces.iter().for_each(|piece| out.hash(piece));
        }
        out.u32(self.objects.len() as u32);
        for (hash, held) in &self.objects {
            out.hash(hash);
            out.u32(held.pack);
            out.u32(held.stored);
        }
        let sum = super::tree::hash_of(&out.0);
        out.hash(&sum);
        out.0
    }

    /// Reads an index that was written since this host booted. After a crash of the host, files may have lost what was
    /// written last, whatever their times say.
    pub fn decode(bytes: &[u8], boot: &str) -> Option<Index> {
        let (bytes, sum) = bytes.split_at_checked(bytes.len().checked_sub(32)?)?;
        if super::tree::hash_of(bytes) != *sum {
            return None;
        }
        let mut input = In(bytes);
        if input.take(MAGIC.len())? != MAGIC || input.bytes()? != boot.as_bytes() {
            return None;
        }
        let (tree, looked_ns, ours) = (input.hash()?, input.i64()?, input.u8()? != 0);
        let mut index = Index { tree, looked_ns, ours, ..Index::empty() };
        for _ in 0..input.u32()? {
            let sha256 = String::from_utf8(input.bytes()?.to_vec()).ok()?;
            index.packs.push(Pack { sha256, bytes: input.u64()? });
        }
        for _ in 0..input.u32()? {
            let path = input.bytes()?.to_vec();
            let stat = Stat {
                size: input.u64()?,
                inode: input.u64()?,
                mode: input.u32()?,
                modified_ns: input.i64()?,
                changed_ns: input.i64()?,
            };
            let pieces = (0..input.u32()?).map(|_| input.hash()).collect::<Option<_>>()?;
            index.files.insert(path, Seen { stat, pieces });
        }
        for _ in 0..input.u32()? {
            let (hash, held) = (input.hash()?, Held { pack: input.u32()?, stored: input.u32()? });
            index.objects.insert(hash, held);
        }
        Some(index)
    }
}

/// What the system calls this boot. Empty where it does not say; then a crash of the host is not told apart.
pub(super) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

pub(super) fn now_ns() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_reads_back_whole_on_the_same_boot_only() {
        let stat = Stat { size: 3, inode: 7, mode: 0o100_644, modified_ns: 5, changed_ns: 6 };
        let mut index = Index::empty();
        index.packs.push(Pack { sha256: "00".repeat(32), bytes: 9 });
        index.files.insert(b"a/\xff".to_vec(), Seen { stat, pieces: vec![[1; 32]] });
        index.objects.insert([1; 32], Held { pack: 0, stored: 3 });
        let bytes = index.encode("boot 1");
        assert_eq!(Index::decode(&bytes, "boot 1"), Some(index.clone()));
        assert_eq!(Index::decode(&bytes, "boot 2"), None);
        let mut broken = bytes.clone();
        broken[20] ^= 1;
        assert_eq!(Index::decode(&broken, "boot 1"), None);
        assert_eq!(Index::decode(&bytes[..bytes.len() - 1], "boot 1"), None);
    }

    #[test]
    fn a_file_that_changed_right_before_the_look_is_read_again() {
        let stat = Stat { size: 3, inode: 7, mode: 0, modified_ns: 0, changed_ns: 1_000_000_000 };
        let mut index = Index::empty();
        index.files.insert(b"a".to_vec(), Seen { stat, pieces: Vec::new() });
        for (looked_ns, trusted) in [(1_000_000_000, false), (1_050_000_000, false), (1_060_000_000, true)] {
            index.looked_ns = looked_ns;
            assert_eq!(index.unchanged(b"a", &stat).is_some(), trusted, "{looked_ns}");
        }
        assert!(index.unchanged(b"a", &Stat { size: 4, ..stat }).is_none());
    }
}
