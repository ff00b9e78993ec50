//! Objects: pieces of files, and folders. Equal folders have equal bytes.

use super::codec::{Hash, In, Out};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// A file is cut into pieces of this size. A change costs the pieces that it touches.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// Deepest folder of a workspace.
pub(super) const MAX_DEPTH: usize = 128;

/// The longest path in a workspace, and the longest text of a link. The system's calls take no longer ones.
pub(super) const PATH_BYTES: usize = 4096;

/// A folder's entries, by name.
pub(super) type Folder = BTreeMap<Vec<u8>, Node>;

/// What a name in a folder stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    File {
        mode: u32,
        size: u64,
        pieces: Vec<Hash>,
    },
    Folder {
        mode: u32,
        hash: Hash,
    },
    /// The link's text. It may point anywhere: reading through it never leaves the workspace.
    Link {
        target: Vec<u8>,
    },
}

pub(super) fn hash_of(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// The name of a folder without entries.
pub(super) fn nothing() -> Hash {
    hash_of(&encode(&Folder::new()))
}

/// The bytes of a folder.
pub(super) fn encode(folder: &Folder) -> Vec<u8> {
    let mut out = Out::default();
    for (name, node) in folder {
        match node {
            Node::File { mode, size, pieces } => {
                out.u8(b'f');
                out.bytes(name);
                out.u32(*mode);
                out.u64(*size);
                out.u32(pieces.len() as u32);
                pieces.iter().for_each(|piece| out.hash(piece));
            }
            Node::Folder { mode, hash } => {
                out.u8(b'd');
                out.bytes(name);
                out.u32(*mode);
                out.hash(hash);
            }
            Node::Link { target } => {
                out.u8(b'l');
                out.bytes(name);
                out.bytes(target);
            }
        }
    }
    out.0
}

/// Reads a folder. Its bytes may come from anywhere (an imported bundle), so each name is checked: it names an entry
/// of this folder and nothing else, and names come in order, each once.
pub(super) fn decode(bytes: &[u8]) -> Option<Folder> {
    let mut input = In(bytes);
    let mut folder = Folder::new();
    while !input.0.is_empty() {
        let kind = input.u8()?;
        let name = input.bytes()?.to_vec();
        if !is_name(&name) || folder.last_key_value().is_some_and(|(last, _)| *last >= name) {
            return None;
        }
        let node = match kind {
            b'f' => {
                let (mode, size, count) = (input.u32()?, input.u64()?, input.u32()?);
                if u64::from(count) != size.div_ceil(PIECE_BYTES as u64) {
                    return None;
                }
                let pieces = (0..count).map(|_| input.hash()).collect::<Option<_>>()?;
                Node::File { mode: mode & 0o777, size, pieces }
            }
            b'd' => Node::Folder { mode: input.u32()? & 0o777, hash: input.hash()? },
            b'l' => {
                Node::Link { target: input.bytes().filter(|target| target.len() <= PATH_BYTES)?.to_vec() }
            }
            _ => return None,
        };
        folder.insert(name, node);
    }
    Some(folder)
}

fn is_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && name != b"."
        && name != b".."
        && !name.contains(&b'/')
        && !name.contains(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(target: &str) -> Node {
        Node::Link { target: target.as_bytes().to_vec() }
    }

    #[test]
    fn a_folder_reads_back_and_its_name_depends_on_every_byte() {
        let mut folder = Folder::new();
        folder.insert(b"a".to_vec(), Node::File { mode: 0o755, size: 3, pieces: vec![[1; 32]] });
        folder.insert(b"b\xff".to_vec(), Node::Folder { mode: 0o700, hash: [2; 32] });
        folder.insert(b"c".to_vec(), link("../away"));
        let bytes = encode(&folder);
        assert_eq!(decode(&bytes), Some(folder.clone()));
        folder.insert(b"c".to_vec(), link("../away2"));
        assert_ne!(hash_of(&encode(&folder)), hash_of(&bytes));
        assert_eq!(decode(&[]), Some(Folder::new()));
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_no_name() {
        for name in ["", ".", "..", "a/b", "/a", "a\0", &"x".repeat(256)] {
            let bytes = encode(&[(name.as_bytes().to_vec(), link("x"))].into());
            assert_eq!(decode(&bytes), None, "{name:?}");
        }
        let twice =
            [encode(&[(b"a".to_vec(), link("x"))].into()), encode(&[(b"a".to_vec(), link("y"))].into())];
        assert_eq!(decode(&twice.concat()), None, "a name stands once");
    }

    #[test]
    fn cut_or_false_bytes_are_no_folder() {
        let bytes =
            encode(&[(b"a".to_vec(), Node::File { mode: 0o644, size: 3, pieces: vec![[1; 32]] })].into());
        for end in 1..bytes.len() {
            assert_eq!(decode(&bytes[..end]), None, "{end}");
        }
        let few = Node::File { mode: 0o644, size: 3 << 20, pieces: vec![[1; 32]] };
        assert_eq!(decode(&encode(&[(b"a".to_vec(), few)].into())), None, "pieces are missing");
    }
}
