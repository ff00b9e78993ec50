//! Packs that somebody made up, as a bundle can carry them: small ones that would become very much.

use super::super::codec::Hash;
use super::super::index::Index;
use super::super::pack::Writer;
use super::super::restore::{Bounds, Spool, Unreadable};
use super::super::tree::{Folder, Node, PIECE_BYTES, encode, hash_of};
use super::{Host, bounds, limits, listing};
use std::time::Duration;
use wakeful_workflow::workspace::{MAX_PACKS, Pack, Snapshot};

/// Objects of a made-up snapshot.
#[derive(Default)]
struct Made(Vec<Vec<u8>>);

impl Made {
    fn object(&mut self, bytes: Vec<u8>) -> Hash {
        let hash = hash_of(&bytes);
        self.0.push(bytes);
        hash
    }

    fn folder(&mut self, entries: impl IntoIterator<Item = (String, Node)>) -> Hash {
        let folder: Folder = entries.into_iter().map(|(name, node)| (name.into_bytes(), node)).collect();
        self.object(encode(&folder))
    }

    fn pack(&self) -> (Pack, Vec<u8>) {
        let mut writer = Writer::new("sess_1");
        self.0.iter().for_each(|bytes| writer.add(hash_of(bytes), bytes));
        let packed = writer.finish().unwrap();
        (Pack { sha256: hex::encode(packed.sha256), bytes: packed.bytes.len() as u64 }, packed.bytes)
    }

    fn restore(&self, tree: Hash, bounds: &Bounds) -> Result<(Index, Host), Unreadable> {
        let (pack, bytes) = self.pack();
        let spool = Spool::of(&[pack], bounds, |_| bytes.clone())?;
        let host = Host::new();
        let restored = host.take(1).restore(&spool, tree, bounds);
        if restored.is_err() {
            let left = listing(host.root.path());
            assert!(left.iter().all(|(path, ..)| !path.to_string_lossy().contains("part/")), "{left:?}");
        }
        Ok((restored?, host))
    }

    /// Says why it is refused.
    fn refused(&self, tree: Hash, bounds: &Bounds) -> String {
        match self.restore(tree, bounds) {
            Err(error) => error.to_string(),
            Ok((index, _)) => panic!("{} files were made", index.files.len()),
        }
    }
}

fn file(size: usize, pieces: &[Hash]) -> Node {
    Node::File { mode: 0o644, size: size as u64, pieces: pieces.to_vec() }
}

#[test]
fn one_piece_that_many_files_name_is_refused_before_it_is_written() {
    let mut made = Made::default();
    let piece = made.object(vec![0; PIECE_BYTES]);
    let large = |n: usize| (format!("{n:03}"), file(100 * PIECE_BYTES, &vec![piece; 100]));
    let tree = made.folder((0..900).map(large));
    let (pack, _) = made.pack();
    assert!(pack.bytes < 4 << 20, "{} bytes would become 90 GB", pack.bytes);
    assert!(made.refused(tree, &bounds()).contains("more than 67108864 bytes"));
    let one = made.folder([("a".to_owned(), file(PIECE_BYTES, &[piece]))]);
    let few = Bounds { bytes: PIECE_BYTES as u64 - 1, ..bounds() };
    assert!(made.refused(one, &few).contains("bytes"));
    made.restore(one, &bounds()).unwrap();
}

#[test]
fn pieces_are_as_long_as_the_file_says() {
    let mut made = Made::default();
    let (whole, five, long) = (vec![1; PIECE_BYTES], vec![2; 5], vec![3; PIECE_BYTES + 1]);
    let [whole, five, long] = [whole, five, long].map(|bytes| made.object(bytes));
    for (size, pieces, fits) in [
        (5, vec![five], true),
        (PIECE_BYTES + 5, vec![whole, five], true),
        (3, vec![five], false),
        (6, vec![five], false),
        (10, vec![five, five], false),
        (PIECE_BYTES + 5, vec![five, whole], false),
        (PIECE_BYTES, vec![long], false),
        (PIECE_BYTES + 1, vec![long, five], false),
        (2 * PIECE_BYTES, vec![whole, five], false),
    ] {
        let tree = made.folder([("a".to_owned(), file(size, &pieces))]);
        assert_eq!(made.restore(tree, &bounds()).is_ok(), fits, "{size} bytes in {} pieces", pieces.len());
    }
}

#[test]
fn one_folder_that_many_names_point_to_is_refused() {
    let mut made = Made::default();
    let mut hash = made.folder([]);
    // 10^20 folders in 21 objects.
    for _ in 0..20 {
        hash = made.folder((0..10).map(|n| (n.to_string(), Node::Folder { mode: 0o700, hash })));
    }
    assert!(made.refused(hash, &bounds()).contains("more than 1000 folders"));
}

#[test]
fn files_and_links_are_no_more_than_the_snapshot_says() {
    let mut made = Made::default();
    let link = || Node::Link { target: b"x".to_vec() };
    let tree = made.folder((0..10).map(|n| (n.to_string(), if n < 5 { link() } else { file(0, &[]) })));
    made.restore(tree, &Bounds { files: 10, ..bounds() }).unwrap();
    assert!(made.refused(tree, &Bounds { files: 9, ..bounds() }).contains("more than 9 files"));
    let snapshot =
        Snapshot { tree_sha256: hex::encode(tree), packs: Vec::new(), files: 9, bytes: 7, message_number: 1 };
    let of = Bounds::of(&limits(), &snapshot);
    assert_eq!((of.files, of.folders, of.bytes, of.packs), (9, 1000, 7, MAX_PACKS));
    let more = Bounds::of(&limits(), &Snapshot { files: u64::MAX, bytes: u64::MAX, ..snapshot });
    assert_eq!((more.files, more.bytes), (1000, 64 << 20));
}

#[test]
fn a_restore_ends_at_its_deadline() {
    let mut made = Made::default();
    let tree = made.folder([("a".to_owned(), file(0, &[]))]);
    let late = Bounds { time: Duration::ZERO, ..bounds() };
    assert!(made.refused(tree, &late).contains("not written within 0 seconds"));
}

#[test]
fn paths_and_links_are_no_longer_than_the_system_takes() {
    let mut made = Made::default();
    let target = |length: usize| Node::Link { target: vec![b'x'; length] };
    let long = made.folder([("a".to_owned(), target(4097))]);
    assert!(made.restore(long, &bounds()).is_err());
    let mut hash = made.folder([]);
    for _ in 0..20 {
        hash = made.folder([("n".repeat(250), Node::Folder { mode: 0o700, hash })]);
    }
    assert!(made.refused(hash, &bounds()).contains("4096 bytes in a path"));
}

#[test]
fn packs_are_few_and_one_that_is_named_again_is_read_once() {
    let mut made = Made::default();
    let tree = made.folder([("a".to_owned(), file(0, &[]))]);
    let (pack, bytes) = made.pack();
    let named = |times: usize| {
        let read = std::cell::Cell::new(0);
        let spool = Spool::of(&vec![pack.clone(); times], &bounds(), |_| {
            read.set(read.get() + 1);
            bytes.clone()
        });
        spool.map(|spool| (spool, read.get()))
    };
    let (spool, read) = named(1000).unwrap();
    assert_eq!(read, 1);
    Host::new().take(1).restore(&spool, tree, &bounds()).unwrap();
    let Err(error) = named(1001) else { panic!("1001 packs") };
    assert!(error.to_string().contains("more than 1000 packs"), "{error}");
}

#[test]
fn a_table_that_points_beyond_its_pack_is_refused() {
    let mut made = Made::default();
    made.object(vec![7; 100]);
    let (pack, mut bytes) = made.pack();
    // The length of the first object: after magic, id, count, its hash and its coding.
    let at = 8 + (4 + 6) + 4 + 32 + 1;
    let length: [u8; 4] = bytes[at..at + 4].try_into().unwrap();
    assert!(u32::from_le_bytes(length) == 100 || u32::from_be_bytes(length) == 100, "{length:?}");
    bytes[at..at + 4].fill(0xff);
    assert!(Spool::of(&[pack], &bounds(), |_| bytes.clone()).is_err());
}
