//! Packs: blobs of objects, with a table of contents before them.
//!
//! A pack begins with the session's id, so two sessions never write the same pack, and the erasure of one takes nothing
//! from another.

use super::codec::{Hash, In, Out};
use super::tree::{PIECE_BYTES, hash_of};
use flate2::read::{DeflateDecoder, DeflateEncoder};
use std::io::Read as _;

const MAGIC: &[u8; 8] = b"wakepk1\n";
/// A pack holds about this much. A worker holds one while it writes it.
pub(super) const PACK_BYTES: usize = 16 << 20;
/// Below this size, compression gains nothing.
const SMALL: usize = 256;
/// The most that an object can have: a folder with very many entries.
const OBJECT_BYTES: usize = 64 << 20;
const AS_IS: u8 = 0;
const DEFLATED: u8 = 1;

/// Where an object lies in a pack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub offset: u64,
    pub stored: u32,
    raw: u32,
    coding: u8,
}

/// A pack that is being written.
pub(super) struct Writer {
    session_id: String,
    contents: Vec<(Hash, u8, u32, u32)>,
    data: Vec<u8>,
}

/// A finished pack.
pub(super) struct Packed {
    pub sha256: Hash,
    pub bytes: Vec<u8>,
    /// Its objects, each with the number of bytes that it takes.
    pub objects: Vec<(Hash, u32)>,
}

impl Writer {
    pub fn new(session_id: &str) -> Writer {
        Writer { session_id: session_id.to_owned(), contents: Vec::new(), data: Vec::new() }
    }

    pub fn add(&mut self, hash: Hash, bytes: &[u8]) {
        let mut coding = AS_IS;
        let at = self.data.len();
        if bytes.len() >= SMALL {
            // Reading from memory cannot fail.
            let _ = DeflateEncoder::new(bytes, flate2::Compression::fast()).read_to_end(&mut self.data);
            coding = DEFLATED;
        }
        if coding == AS_IS || self.data.len() - at >= bytes.len() {
            self.data.truncate(at);
            self.data.extend_from_slice(bytes);
            coding = AS_IS;
        }
        let stored = (self.data.len() - at) as u32;
        self.contents.push((hash, coding, stored, bytes.len() as u32));
    }

    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Returns the pack and begins the next one. `None` if it has no objects.
    pub fn finish(&mut self) -> Option<Packed> {
        if self.contents.is_empty() {
            return None;
        }
        let mut out = Out::default();
        out.0.extend_from_slice(MAGIC);
        out.bytes(self.session_id.as_bytes());
        out.u32(self.contents.len() as u32);
        for (hash, coding, stored, raw) in &self.contents {
            out.hash(hash);
            out.u8(*coding);
            out.u32(*stored);
            out.u32(*raw);
        }
        out.0.append(&mut self.data);
        let objects = self.contents.drain(..).map(|(hash, _, stored, _)| (hash, stored)).collect();
        Some(Packed { sha256: hash_of(&out.0), bytes: out.0, objects })
    }
}

/// The table of contents of a pack whose first bytes are `start`.
pub(super) enum Contents {
    Read(Vec<(Hash, Place)>),
    /// So many first bytes are needed.
    Needs(usize),
    /// It is not a pack.
    Broken,
}

pub(super) fn contents(start: &[u8]) -> Contents {
    let mut input = In(start);
    let Some(magic) = input.take(MAGIC.len()) else { return Contents::Needs(4096) };
    if magic != MAGIC {
        return Contents::Broken;
    }
    let (Some(_), Some(count)) = (input.bytes(), input.u32()) else {
        return Contents::Needs(4096.max(start.len() * 2));
    };
    let entry = 32 + 1 + 4 + 4;
    let header = start.len() - input.0.len() + count as usize * entry;
    if count as usize > (PACK_BYTES + OBJECT_BYTES) / 2 {
        return Contents::Broken;
    }
    let mut offset = header as u64;
    let mut places = Vec::new();
    for _ in 0..count {
        let (Some(hash), Some(coding), Some(stored), Some(raw)) =
            (input.hash(), input.u8(), input.u32(), input.u32())
        else {
            return Contents::Needs(header);
        };
        places.push((hash, Place { offset, stored, raw, coding }));
        offset += u64::from(stored);
    }
    Contents::Read(places)
}

/// Returns the object at `place`, whose stored bytes are `stored`, if it is the one that `hash` names.
pub(super) fn object(hash: &Hash, place: &Place, stored: &[u8]) -> Option<Vec<u8>> {
    if place.raw as usize > OBJECT_BYTES || stored.len() != place.stored as usize {
        return None;
    }
    let bytes = match place.coding {
        AS_IS => stored.to_vec(),
        DEFLATED => {
            let mut bytes = Vec::with_capacity((place.raw as usize).min(PIECE_BYTES));
            // One byte more than promised shows that there are too many.
            DeflateDecoder::new(stored).take(u64::from(place.raw) + 1).read_to_end(&mut bytes).ok()?;
            bytes
        }
        _ => return None,
    };
    (bytes.len() == place.raw as usize && hash_of(&bytes) == *hash).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_read_back_and_a_changed_byte_is_seen() {
        let mut writer = Writer::new("sess_1");
        let objects = [b"one".to_vec(), vec![7; 5000], Vec::new(), (0..=255).collect()];
        for object in &objects {
            writer.add(hash_of(object), object);
        }
        let packed = writer.finish().unwrap();
        assert!(packed.bytes.len() < 2000, "{} bytes", packed.bytes.len());
        let Contents::Needs(header) = contents(&packed.bytes[..60]) else { panic!("it is not whole") };
        let Contents::Read(places) = contents(&packed.bytes[..header]) else { panic!("its contents") };
        for ((hash, place), expected) in places.iter().zip(&objects) {
            let at = place.offset as usize;
            let mut stored = packed.bytes[at..at + place.stored as usize].to_vec();
            assert_eq!(object(hash, place, &stored).as_ref(), Some(expected));
            if let Some(byte) = stored.first_mut() {
                *byte ^= 0x10;
                assert!(object(hash, place, &stored).is_none());
            }
        }
        assert!(writer.finish().is_none(), "nothing is left");
    }

    #[test]
    fn two_sessions_never_write_one_pack() {
        let packed = |session: &str| {
            let mut writer = Writer::new(session);
            writer.add(hash_of(b"x"), b"x");
            writer.finish().unwrap().sha256
        };
        assert_ne!(packed("sess_1"), packed("sess_2"));
        assert_eq!(packed("sess_1"), packed("sess_1"));
    }

    #[test]
    fn what_is_no_pack_is_refused() {
        assert!(matches!(contents(b"wakepk0\nxxxxxxxxxxxxxxxxx"), Contents::Broken));
        let mut many = MAGIC.to_vec();
        many.extend([0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(contents(&many), Contents::Broken));
    }
}
